"""`meshwright roofline`: intensity, bounds, what binds, and the critical batch of one product."""

import json

import pytest

PRODUCT = "bf16[B,D] * int8[D,F] -> bf16[B,F]"
DIMS = "B=128,D=8192,F=32768"
FLOPS = 2 * 128 * 8192 * 32768
BYTES = 2 * 128 * 8192 + 8192 * 32768 + 2 * 128 * 32768


def test_the_numbers(call):
    found = call("roofline", PRODUCT, "--dims", DIMS, "--on", "v5e", "--json").json
    assert found["flops"] == FLOPS
    assert found["bytes"] == BYTES
    assert found["intensity"] == pytest.approx(FLOPS / BYTES)
    assert found["critical_intensity"] == pytest.approx(197e12 / 819e9)
    assert found["compute_dtype"] == "bf16"
    assert found["math_s"] == pytest.approx(FLOPS / 197e12)
    assert found["transfer_s"] == pytest.approx(BYTES / 819e9)
    assert found["time_s_lower"] == pytest.approx(FLOPS / 197e12)
    assert found["time_s_upper"] == pytest.approx(FLOPS / 197e12 + BYTES / 819e9)
    assert found["bound_by"] == "compute"
    assert found["critical_dim"] == "B"
    assert found["critical_batch_wide"] == pytest.approx(197e12 / 819e9 / 2)
    assert found["tile_expansion"] == {"A": 1, "B": 1, "C": 1}


def test_the_critical_batch_is_where_both_times_are_equal(call):
    at = call("roofline", PRODUCT, "--dims", DIMS, "--on", "v5e", "--json").json["critical_batch"]
    assert at == pytest.approx(124.9, abs=0.05)
    below = call("roofline", PRODUCT, "--dims", f"B={int(at)},D=8192,F=32768", "--on", "v5e", "--json").json
    above = call("roofline", PRODUCT, "--dims", f"B={int(at) + 1},D=8192,F=32768", "--on", "v5e", "--json").json
    assert (below["bound_by"], above["bound_by"]) == ("hbm", "compute")


def test_the_text(call):
    text = call("roofline", PRODUCT, "--dims", DIMS, "--on", "v5e").words
    for fact in ("compute 68.7 GFLOP 197 TFLOP/s 349 us", "hbm 279 MB 819 GB/s 341 us", "bound by compute",
                 "intensity 246.4 FLOPs/byte (critical 240.5)", "349 us with perfect overlap, 689 us with none",
                 "B > 124.9 (every byte counted; 120.3 by the weight's alone)", "in tiles of (8,128)"):  # fmt: skip
        assert fact in text


def test_a_product_that_is_never_compute_bound(call):
    args = ("roofline", "bf16[B,D] * bf16[D,F] -> bf16[B,F]", "--dims", "B=8,D=100,F=100", "--on", "v5e")
    found = call(*args, "--json").json
    assert found["critical_batch"] is None
    # rows to 8 and columns to 128: [100, 100] is stored as [104, 128]
    assert found["tile_expansion"] == pytest.approx({"A": 1.28, "B": 104 * 128 / 1e4, "C": 1.28})
    assert "never, whatever B" in call(*args).out


@pytest.mark.parametrize(("channel", "rate"), [("pcie", 64e9), ("hbm", 3.35e12)])
def test_channels(call, channel, rate):
    args = ("roofline", PRODUCT, "--dims", DIMS, "--on", "h100", "--channel", channel)
    found = call(*args, "--json").json
    assert found["bytes_per_s"] == rate
    assert found["bound_by"] == channel
    assert found["tile_expansion"] is None
    assert "tiles" not in call(*args).out


def test_the_picture(call, tmp_path):
    said = call("roofline", PRODUCT, "--dims", DIMS, "--on", "v5e", "--png", "out.png")
    assert said.code == 0
    assert said.err == "wrote out.png\n"
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


SWEEP = ("roofline", PRODUCT, "--on", "v5e-book", "--sweep", "B=1..4096", "--sweep", "D,F=1024,4096")


def test_a_sweep(call):
    """Exercise 1.3: the rate against the batch for two widths, up to the peak."""
    points = call(*SWEEP, "--json").json["points"]
    assert [p["sizes"]["B"] for p in points[:13]] == [2**n for n in range(13)]
    assert [(p["sizes"]["D"], p["sizes"]["F"]) for p in points[::13]] == [(1024, 1024), (4096, 4096)]
    at = points[13 + 5]
    alone = call("roofline", PRODUCT, "--on", "v5e-book", "--dims", "B=32,D=4096,F=4096", "--json").json
    for key in ("intensity", "flops_per_s", "time_s_lower", "bound_by"):
        assert at[key] == alone[key]
    assert points[-1]["share_of_peak"] == pytest.approx(1)
    assert "32 4,096 62.06 21.4 us 50.3 TFLOP/s 26% hbm" in call(*SWEEP).words


def test_a_sweep_is_drawn(call, tmp_path):
    assert call(*SWEEP, "--png", "sweep.json").code == 0
    spec = json.loads((tmp_path / "sweep.json").read_text())
    assert spec["layer"][0]["encoding"]["color"]["scale"]["domain"] == ["D = F = 1,024", "D = F = 4,096"]


def test_attention_beside_the_feed_forward_block(call, tmp_path):
    args = ("roofline", "--attention", "llama3-70b", "--on", "v5e-book", "--batch", "240", "--png", "a.png")
    found = call(*args, "--json").json
    assert found["compute_bound_len"] == pytest.approx(197e12 / 810e9 * 9 / 8)
    ratios = [row["ratio"] for row in found["generation"]]
    assert ratios == sorted(ratios)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "compute-bound from 273.6 positions" in call(*args).words


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "there is no product"),
        ((PRODUCT,), "has no sizes"),
        ((PRODUCT, "--sweep", "B"), "is not dims=sizes"),
        ((PRODUCT, "--sweep", "B=8..4"), "smaller size first"),
        ((PRODUCT, "--sweep", "Q=8"), "the product has no such dim"),
        ((PRODUCT, "--dims", "B=8", "--sweep", "B=8"), "B is given twice"),
        ((PRODUCT, "--sweep", "B=8", "--dims", "D=8"), "no size for F"),
        ((PRODUCT, "--sweep", "B=1..1Gi", "--sweep", "D,F=1..1Mi"), "too many to read"),
        ((PRODUCT, "--attention", "tiny"), "Leave PRODUCT"),
        (("--attention", "tiny", "--sweep", "S=8"), "is swept over T"),
        (("--attention", "tiny", "--batch", "0"), "at least 1"),
        (("--attention", "deepseek-v3"), "keeps latents"),
    ],
)
def test_refused(call, args, message):
    said = call("roofline", *args, "--on", "v5e")
    assert (said.code, message in said.err) == (2, True), said.err


def test_tables_fit(call):
    for args in (SWEEP, ("roofline", "--attention", "llama3-70b", "--on", "v5e")):
        for width in (80, 120):
            assert max(map(len, call(*args, width=width).out.splitlines())) <= width


@pytest.mark.parametrize(
    ("chip", "channel", "words"),
    [
        ("h100", "ici", "h100 has no ICI. Use --channel nvlink."),
        ("v5e", "nvlink", "v5e has no NVLink. Use --channel ici."),
    ],
)
def test_a_link_that_a_chip_lacks(call, chip, channel, words):
    said = call("roofline", PRODUCT, "--dims", DIMS, "--on", chip, "--channel", channel)
    assert (said.code, words in said.err) == (2, True)


def test_over_nvlink(call):
    found = call("roofline", PRODUCT, "--dims", DIMS, "--on", "h100", "--channel", "nvlink", "--json").json
    assert found["critical_intensity"] == pytest.approx(989.4e12 / 450e9)
