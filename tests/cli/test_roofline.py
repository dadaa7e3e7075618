"""`meshwright roofline`: intensity, bounds, what binds, and the critical batch of one product."""

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
