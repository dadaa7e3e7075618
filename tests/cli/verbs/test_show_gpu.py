"""`meshwright show` of GPUs and of clusters with levels: anatomy, floor sweeping, totals."""

import pytest

from meshwright.cli.verbs.show_cluster import clusters_answer, slice_facts
from meshwright.report.answer import as_text
from meshwright.spec.cluster import parse_clusters


def test_inside_an_h100(call):
    gpu = call("show", "h100", "--json").json["gpu"]
    assert (gpu["sold"]["sms"], gpu["die"]["sms"], gpu["die"]["name"]) == (132, 144, "GH100")
    assert gpu["sms_used"] == pytest.approx(132 / 144)
    assert gpu["tensor_over_fp32_a_cycle"] == 16
    assert gpu["tensor_over_fp32_peak"] == pytest.approx(989.4 / 67)
    assert gpu["peak_flops_from_anatomy"] == pytest.approx(989.4e12, rel=1e-3)
    text = call("show", "h100").printed("text").words
    for fact in ("92% of the die's SMs are switched on", "SMs 132 144", "FP32 lanes (CUDA cores) 16,896 18,432",
                 "tensor cores 528 576", "L2 cache 50 MB 60 MB", "registers of an SM 262 kB",
                 "4,096 FLOPs in its tensor cores, 256 in its FP32 lanes: 16 times",
                 "the data sheet says 67 TFLOP/s (+8.3%)",
                 "1% of the FLOPs on FP32 lanes takes 13% of the time"):  # fmt: skip
        assert fact in text


def test_a_gpu_without_tensor_cores_and_chips_without_sms(call):
    old = call("show", "k40", "--json").json["gpu"]
    assert (old["sold"]["fp32_lanes"], old["sold"]["tensor_flops_per_sm_cycle"], old["die"]) == (2880, None, None)
    assert "tensor cores" not in call("show", "k40").out
    assert call("show", "v5p", "--json").json["gpu"] is None
    assert "Inside the GPU" not in call("show", "v5p").out


def test_a_cluster_with_levels(call):
    found = call("show", "h100:8x2x192x8", "--json").json
    assert (found["num_chips"], found["num_fp32_lanes"], found["num_tensor_cores"]) == (
        24576, 24576 * 16896, 24576 * 528
    )  # fmt: skip
    assert found["hbm_bytes"] == pytest.approx(1.97e15, rel=1e-2)
    assert [(one["name"], one["chips"]) for one in found["levels"]] == [
        ("domain", 8), ("nodes", 16), ("racks", 3072), ("pods", 24576)
    ]  # fmt: skip
    text = call("show", "h100:8x2x192x8").printed("text").words
    for fact in ("FP32 lanes 415 M", "tensor cores 13 M", "FLOP/s 24.3 EFLOP/s", "racks 192 3,072 50 GB/s 5 us"):
        assert fact in text


def test_a_file_with_levels(call, tmp_path):
    (tmp_path / "mine.toml").write_text(
        'chip = "h100"\n[[levels]]\nsize = 8\n[[levels]]\nsize = 16\n[[levels]]\nsize = 4\noversubscription = 4\n'
    )
    assert "racks 4 512 12.5 GB/s 5 us" in call("show", "mine.toml").printed("text").words


def test_a_twisted_slice(call):
    assert call("show", "v4p:4x4x8_twisted", "--json").json["twisted"] is True
    assert "ring: wraps around, twisted" in call("show", "v4p:4x4x8_twisted").printed("text").words
    assert call("show", "v800:8x2", "--json").code == 2
    assert call("show", "trn3:8x2", "--json").json["levels"] is None


def test_slices_of_a_number_of_chips(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    clusters = parse_clusters("v5p:2048chips")
    plain, twisted = (slice_facts(one) for one in clusters[:2])
    assert (plain["cluster"], twisted["cluster"]) == ("v5p:8x16x16", "v5p:8x16x16_twisted")
    # every chip's 1 GB crosses the long ring of 16 in quarters: 16 / 8 x 1 GB over one link
    assert plain["all_to_all_s"] == pytest.approx(16 / 8 * 1e9 / 90e9)
    assert plain["all_to_all_s"] / twisted["all_to_all_s"] == pytest.approx(1.31)
    answer = clusters_answer(clusters)
    assert "v5p:4x4x128 3 32 2.88 TB/s" in " ".join(" ".join(as_text(answer.pieces, 80)).split())
    assert 256 in [one["bisection_links"] for one in answer.facts["slices"]]
