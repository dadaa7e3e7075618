"""Measurements become a calibration that says where each rate is from, and that plan prices with."""

import jax
import msgspec
import pytest

from meshwright.bench import results
from meshwright.bench.calibration import calibration_of
from meshwright.bench.devices import EMULATED
from meshwright.bench.run import make_bench, num_rows, run_bench
from meshwright.bench.timing import timing_of
from meshwright.cost.setting import Setting
from meshwright.plan.planner import rank_plans
from meshwright.spec.calibration import CollectiveRate, load_calibration, save_calibration
from meshwright.spec.chip import chip
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.efficiency import fitted_calibration
from meshwright.spec.job import Job
from meshwright.spec.model import Model

SECOND = timing_of([1.0])
SMALL = Model(
    name="small", family="llama", num_layers=2, d_model=64, d_ff=128, num_heads=4, num_kv_heads=2, head_dim=16,
    vocab_size=256, max_positions=64,
)  # fmt: skip


def product(dtype, side, rate):
    return results.Product(
        dtype=dtype, m=side, k=side, n=side, contents="normal", seconds=SECOND, flops_per_s=rate, share_of_peak=None
    )


def report(**parts):
    facts = {
        "machine": "1 NVIDIA H200", "device_kind": "NVIDIA H200", "platform": "cuda", "num_devices": 1, "chip": "h200",
        "date": "2026-11-21T12:00:00+00:00", "versions": {"jax": "0"}, "seconds": 60.0, "took_s": 59.0,
        "memory_bytes": 1e11,
    }  # fmt: skip
    return results.BenchReport(**(facts | parts))


@pytest.fixture(scope="module")
def measured():
    """All that a plan needs; the seconds are more than it takes, so that a busy machine measures everything too."""
    bench = make_bench(jax.devices()[:2], dtypes=["fp32"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwright.bench.devices.EMULATED", msgspec.structs.replace(EMULATED, mlps=EMULATED.mlps[:1]))
        return run_bench(bench, ["mlp", "copy", "collectives"], seconds=60)


@pytest.mark.slow
def test_a_real_run_round_trips_and_prices_a_plan(measured, tmp_path):
    found = calibration_of(measured)
    save_calibration(found, tmp_path / "rates.toml")
    assert load_calibration(tmp_path / "rates.toml") == found
    result = rank_plans(Setting(SMALL, parse_cluster("cpu:2"), Job(batch_seqs=4, seq_len=32), found))
    assert result.plans[0].calibration == found
    assert result.plans[0].predicted.step_s > 0


@pytest.mark.slow
def test_every_rate_says_what_it_is_and_when(measured):
    found = calibration_of(measured)
    assert found.chip == "cpu"
    assert found.machine == "2 cpu devices emulated on " + found.machine.split(" on ")[1]
    assert set(found.sources) == {"matmul_flops_per_s", "memory_bytes_per_s", "memory_bytes", "collectives"}
    assert all(text.startswith(f"meshwright bench, {measured.date}") for text in found.sources.values())
    assert "gated MLP with gradients, 512 x 256 x 704" in found.sources["matmul_flops_per_s"]
    assert "lines through 5 sizes" in found.sources["collectives"]


@pytest.mark.slow
def test_a_run_keeps_what_it_measured(measured):
    again = msgspec.json.decode(msgspec.json.encode(measured), type=results.BenchReport)
    assert again == measured
    assert measured.matmul is None
    assert measured.took_s < measured.seconds
    assert num_rows(measured.copy) == len(measured.copy.copies)
    for one in measured.collectives.collectives:
        assert len(one.times) >= 5
        assert one.rate.bytes_per_s > 0


def test_rates_of_an_accelerator():
    sweep = (product("bf16", 4096, 6e14), product("bf16", 8192, 7e14), product("tf32", 8192, 3e14))
    mlp = results.Mlp(
        dtype="bf16", tokens=4096, d_model=4096, d_ff=16384, seconds=SECOND, flops_per_s=6.5e14, mfu=0.6, of_matmul=0.9
    )
    times = tuple(
        results.AttentionTime(
            batch=1, length=length, num_heads=32, num_kv_heads=8, head_dim=128, forward=SECOND, both=SECOND,
            forward_flops_per_s=rate, both_flops_per_s=rate, share_of_peak=None,
        )
        for length, rate in ((1024, 2e14), (8192, 4e14))
    )  # fmt: skip
    copies = tuple(
        results.Copy(kind=kind, array_bytes=size, seconds=SECOND, bytes_per_s=rate)
        for kind, size, rate in (("silu", 2**22, 9e12), ("copy", 2**22, 8e12), ("copy", 2**30, 4e12))
    )
    found = calibration_of(
        report(
            matmul=results.MatmulPart(sweep=sweep), mlp=results.MlpPart(mlps=(mlp,)),
            copy=results.CopyPart(copies=copies), attention=results.AttentionPart(dtype="bf16", times=times),
        )
    )  # fmt: skip
    fitted = fitted_calibration(chip("h200"))
    half = fitted.efficiency.contraction_half
    assert found.matmul_flops_per_s["bf16"] == pytest.approx(6.5e14 * (1 + half * (2 / 4096 + 1 / 16384) / 3))
    assert found.matmul_flops_per_s["fp32"] == found.matmul_flops_per_s["tf32"]
    assert found.matmul_flops_per_s["tf32"] == pytest.approx(3e14 * (1 + half / 8192))
    at = fitted.efficiency
    expected = 4e14 * (1 + at.head_half / 128) * (1 + at.rows_half / 8192)
    assert found.attention_flops_per_s == {"bf16": pytest.approx(expected)}
    assert found.memory_bytes_per_s == 4e12
    assert found.memory_bytes == 1e11
    assert found.efficiency == fitted.efficiency
    assert "efficiency" in found.sources


def test_links_of_accelerators_are_their_largest_gather():
    times = (results.CollectiveTime(array_bytes=2**20, seconds=SECOND, fitted_s=1.0, datasheet_s=None),)
    gathers = tuple(
        results.Collective(
            kind="all_gather", group=results.Group(axis="group", size=size, mesh={"group": size}), times=times,
            fit_error=0.0, rate=CollectiveRate(kind="all_gather", group_size=size, latency_s=latency, bytes_per_s=rate),
        )
        for size, latency, rate in ((8, 2e-5, 0.25 * chip("h200").nvlink_bytes_per_s), (2, 1e-5, 1e10))
    )  # fmt: skip
    found = calibration_of(report(collectives=results.CollectivesPart(collectives=gathers)))
    assert found.efficiency.nvlink == pytest.approx(0.25)
    assert found.hop_s["nvlink"] == 2e-5
    assert found.hop_s["network"] == fitted_calibration(chip("h200")).hop_s["network"]


def test_parts_are_bounded_and_named_when_time_is_short():
    bench = make_bench(jax.devices()[:2], dtypes=["fp32", "int8"])
    found = run_bench(bench, ["matmul", "attention"], seconds=0.5)
    assert found.took_s < 8
    assert any("no time left" in line for line in found.attention.left_out)
    assert found.matmul.left_out
