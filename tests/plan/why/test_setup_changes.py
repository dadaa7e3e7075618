"""What can be different of a setup: every factor lands where it should, and clusters grow as they are wired."""

import pytest

from meshwright.core.errors import InputError
from meshwright.cost.setting import Setting
from meshwright.plan.why.setup_changes import changed_setting, parse_what_if, scaled_cluster
from meshwright.spec import catalogue
from meshwright.spec.calibration import Calibration, CollectiveRate, Efficiency
from meshwright.spec.cluster import NetworkLevel, make_cluster, parse_cluster
from meshwright.spec.job import Job


def setup_of(cluster="v5p:4x4x4", calibration=None):
    return Setting(
        model=catalogue.load_model("tiny"),
        cluster=parse_cluster(cluster) if isinstance(cluster, str) else cluster,
        job=Job(batch_seqs=64, seq_len=512),
        calibration=calibration,
    )


def test_several_at_once_in_words():
    assert parse_what_if("chip.flops=8x, links=.1x") == {"chip.flops": 8.0, "links": 0.1}
    changed, words = changed_setting(setup_of(), {"chip.flops": 8.0, "links": 0.1})
    now = parse_cluster("v5p:4x4x4").chip
    assert changed.cluster.chip.peak_flops == {dtype: 8 * rate for dtype, rate in now.peak_flops.items()}
    assert changed.cluster.chip.ici_link_bytes_per_s == pytest.approx(now.ici_link_bytes_per_s / 10)
    assert words == ("chip.flops 8x: 459 TFLOP/s -> 3.67 PFLOP/s in bf16", "links 0.1x: ici 90 GB/s -> 9 GB/s")


def test_memory_and_its_rate():
    now = parse_cluster("v5e:4x4").chip
    changed, _ = changed_setting(setup_of("v5e:4x4"), {"chip.memory": 2.0, "chip.hbm": 3.0})
    chip = changed.cluster.chip
    assert (chip.hbm_bytes, chip.usable_hbm_bytes) == (2 * now.hbm_bytes, 2 * now.usable_hbm_bytes)
    assert chip.hbm_bytes_per_s == 3 * now.hbm_bytes_per_s


def test_measured_rates_change_with_the_chip():
    rate = CollectiveRate(kind="all_gather", group_size=8, latency_s=1e-4, bytes_per_s=1e9)
    measured = Calibration(
        name="test",
        chip="cpu",
        matmul_flops_per_s={"fp32": 1e10},
        memory_bytes_per_s=1e9,
        memory_bytes=2e9,
        collectives=(rate,),
    )
    factors = {"chip.flops": 2.0, "chip.hbm": 3.0, "chip.memory": 4.0, "network": 5.0}
    changed, _ = changed_setting(setup_of("cpu:8", measured), factors)
    rates = changed.calibration
    assert rates.matmul_flops_per_s == {"fp32": 2e10}
    assert (rates.memory_bytes_per_s, rates.memory_bytes) == (3e9, 8e9)
    assert rates.collectives[0].bytes_per_s == 5e9


def test_levels_of_a_network():
    chip = parse_cluster("h100:8x4").chip
    changed, _ = changed_setting(setup_of("h100:8x4"), {"nvlink": 2.0})
    assert changed.cluster.chip.nvlink_bytes_per_s == 2 * chip.nvlink_bytes_per_s
    assert changed.cluster.chip.nic_bytes_per_s == chip.nic_bytes_per_s
    given = (NetworkLevel(name="domain"), NetworkLevel(name="nodes", bytes_per_s=25e9))
    own = make_cluster(chip, (8, 4), levels=given)
    changed, _ = changed_setting(setup_of(own), {"network": 0.5})
    assert [level.bytes_per_s for level in changed.cluster.levels] == [None, 12.5e9]
    assert changed.cluster.chip.nvlink_bytes_per_s == chip.nvlink_bytes_per_s
    assert changed_setting(setup_of(own), {"links": 0.5})[0].cluster.chip.nvlink_bytes_per_s == 225e9
    with pytest.raises(InputError, match=r"h100:8x1 has no nic or dcn: nothing leaves its domain\. Change nvlink\."):
        changed_setting(setup_of("h100:8"), {"network": 0.5})
    changed, _ = changed_setting(setup_of("2*v5e:16x16"), {"dcn": 2.0})
    assert changed.cluster.chip.dcn_bytes_per_s_per_host == 5e10


@pytest.mark.parametrize(
    ("cluster", "factor", "found"),
    [
        ("v5p:4x4x4", 2, "v5p:4x4x8"),
        ("v5p:4x4x4", 8, "v5p:8x8x8"),
        ("v5p:4x4x8", 2, "v5p:4x8x8"),
        ("v5p:16x20x28", 2, "2*v5p:16x20x28"),
        ("v5e:4x4", 2, "v5e:4x8"),
        ("v5e:8x16", 2, "v5e:16x16"),
        ("v5e:16x16", 4, "4*v5e:16x16"),
        ("4*v5e:16x16", 0.5, "2*v5e:16x16"),
        ("v5p:4x4x8", 0.5, "v5p:4x4x4"),
        ("h100:8x4", 2, "h100:8x8"),
        ("h100:8x4", 0.125, "h100:4x1"),
        ("h100:8x2x16x8", 3, "h100:8x2x16x24"),
        ("v4p:4x4x8_twisted", 2, "v4p:4x8x8"),
        ("h100:8x4", 1.5, "h100:8x6"),
        ("cpu:8", 2, "cpu:16"),
    ],
)
def test_a_cluster_of_more_or_fewer_chips(cluster, factor, found):
    scaled = scaled_cluster(parse_cluster(cluster), factor)
    assert scaled.short_name == found
    assert scaled.num_chips == factor * parse_cluster(cluster).num_chips


def test_the_work_of_a_step():
    changed, words = changed_setting(setup_of(), {"batch": 0.5, "seq": 2.0})
    assert (changed.job.batch_seqs, changed.job.seq_len) == (32, 1024)
    assert words[0] == "batch 0.5x: 64 -> 32 sequences a step, 16.4 k tokens"
    assert words[1].startswith("seq 2x: 512 -> 1,024 tokens a sequence, as many sequences a step")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chip.flop=2x", "Did you mean 'chip.flops'"),
        ("chips=2", "is not a factor"),
        ("chips=0x", "is not a factor"),
        ("chips", "is not a factor"),
        ("chips=2x,chips=4x", "changes chips twice"),
    ],
)
def test_what_cannot_be_read(text, message):
    with pytest.raises(InputError, match=message):
        parse_what_if(text)


@pytest.mark.parametrize(
    ("cluster", "factors", "message"),
    [
        ("v5p:4x4x4", {"dcn": 2.0}, "v5p:4x4x4 has no dcn. Change ici."),
        ("h100:8x1", {"nic": 2.0}, "has no nic. Change nvlink."),
        ("v5p:4x4x4", {"batch": 0.3}, "19.2, not a positive whole number"),
        ("v5p:4x4x4", {"chips": 1 / 3}, "no cluster like v5p:4x4x4 has 0.333333 times its chips"),
        ("h100:8x4", {"chips": 0.3}, "no cluster like h100:8x4 has 0.3 times its chips"),
        ("v5p:4x4x4", {"chips": 3.1416}, "not a simple ratio"),
        ("cpu:64", {"chips": 2.0}, "no cluster like cpu:64"),
    ],
)
def test_what_has_no_meaning_here(cluster, factors, message):
    with pytest.raises(InputError, match=message):
        changed_setting(setup_of(cluster), factors)


def test_everyone_waits_for_the_slowest():
    """The peak that MFU is counted against stays."""
    rates = Calibration(name="x", chip="h100", efficiency=Efficiency(compute=0.6, attention=0.4, hbm=0.8))
    changed, words = changed_setting(setup_of("h100:8", rates), {"slowest": 0.5})
    assert changed.calibration.efficiency == Efficiency(compute=0.3, attention=0.2, hbm=0.4)
    assert changed.cluster == parse_cluster("h100:8")
    assert words == ("slowest 0.5x: every chip waits for one whose compute and memory run at 50%",)
    with pytest.raises(InputError, match="at most 1x"):
        changed_setting(setup_of(), {"slowest": 1.5})
