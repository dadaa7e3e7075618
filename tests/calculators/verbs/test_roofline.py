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
    # the batches of whole tiles on both sides: rows by 8
    below = call("roofline", PRODUCT, "--dims", "B=120,D=8192,F=32768", "--on", "v5e", "--json").json
    above = call("roofline", PRODUCT, "--dims", "B=128,D=8192,F=32768", "--on", "v5e", "--json").json
    assert (below["bound_by"], above["bound_by"]) == ("hbm", "compute")


def test_the_text(call):
    text = call("roofline", PRODUCT, "--dims", DIMS, "--on", "v5e").words
    for fact in ("compute 68.7 GFLOP 197 TFLOP/s 349 us", "hbm 279 MB 819 GB/s 341 us", "bound by compute",
                 "246.4 FLOPs/byte, compute-bound from 240.5", "349 us with perfect overlap, 689 us without",
                 "B > 124.9; > 120.3 if only the weight's bytes counted"):  # fmt: skip
        assert fact in text


def test_a_product_that_is_never_compute_bound(call):
    args = ("roofline", "bf16[B,D] * bf16[D,F] -> bf16[B,F]", "--dims", "B=8,D=100,F=100", "--on", "v5e")
    found = call(*args, "--json").json
    assert found["critical_batch"] is None
    # rows to 8 and columns to 128: [100, 100] is stored as [104, 128]
    assert found["tile_expansion"] == pytest.approx({"A": 1.28, "B": 104 * 128 / 1e4, "C": 1.28})
    assert "never, at any B" in call(*args).out


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
        (("A + B", "--dims", "B=8"), "'A + B' is no op. Write A[I,J] * B[J,K] -> C[I,K], A[I] + B[I] -> C[I]"),
        (("A[B] + B[B]", "--dims", "B=8"), "is no op"),
        (("A[B] + B[D] -> C[B]", "--dims", "B=8,D=8"), "is not the sum of two arrays"),
        (("softmax(A[B,S]) -> C[B]", "--dims", "B=8,S=8"), "softmax keeps the dims of A[B, S]"),
        (("softmax(A[B_X,S])", "--dims", "B=8,S=8"), "roofline is for one chip"),
        ((PRODUCT,), "has no sizes"),
        ((PRODUCT, "--sweep", "B"), "is not dims=sizes"),
        ((PRODUCT, "--sweep", "B=8..4"), "smaller size first"),
        ((PRODUCT, "--sweep", "Q=8"), "the product has no such dim"),
        ((PRODUCT, "--dims", "B=8", "--sweep", "B=8"), "B is given twice"),
        ((PRODUCT, "--sweep", "B=8", "--dims", "D=8"), "no size for F"),
        ((PRODUCT, "--dims", "B=8,D=64,F=128,Q=7"), "--dims Q: no array has this dim. Choose of "),
        ((PRODUCT, "--dims", "D=64,F=128,Q=7", "--sweep", "B=1..4"), "--dims Q: no array has this dim. Choose of "),
        ((PRODUCT, "--sweep", "B=1..1Gi", "--sweep", "D,F=1..1Mi"), "too many for one sweep"),
        ((PRODUCT, "--attention", "tiny"), "Leave PRODUCT"),
        (("--attention", "tiny", "--sweep", "S=8"), "is swept over T"),
        (("--attention", "tiny", "--batch", "0"), "at least 1"),
        (("--attention", "deepseek-v3"), "keeps latents"),
    ],
)
def test_refused(call, args, message):
    call("roofline", *args, "--on", "v5e").assert_refused(2, message)


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
    call("roofline", PRODUCT, "--dims", DIMS, "--on", chip, "--channel", channel).assert_refused(2, words)


def test_over_nvlink(call):
    found = call("roofline", PRODUCT, "--dims", DIMS, "--on", "h100", "--channel", "nvlink", "--json").json
    assert found["critical_intensity"] == pytest.approx(989.4e12 / 450e9)


def test_whole_tiles_take_the_time(call):
    """100 x 64 x 64 on MXUs of 256: the 100 rows are held, 256 x 256 x 64 multiply-adds, 10.24 times as many."""
    args = ("roofline", "bf16[M,N] * bf16[N,P] -> bf16[M,P]", "--dims", "M=100,N=64,P=64", "--on")
    found = call(*args, "v6e", "--json").json
    assert found["padding"] == pytest.approx(256 * 256 * 64 / (100 * 64 * 64))
    assert found["math_s"] == pytest.approx(2 * 256 * 256 * 64 / 918e12)
    assert found["flops"] == 2 * 100 * 64 * 64
    assert "padded compute 10.2 times the FLOPs (whole tiles of 256 x 256" in call(*args, "v6e").words
    # on MXUs of 128 the other factor may be held too: 104 x 128 x 128 against 128 x 128 x 64
    assert call(*args, "v5e", "--json").json["padding"] == pytest.approx(128 * 128 * 64 / (100 * 64 * 64))
    assert call(*args, "h100", "--json").json["padding"] == 1


def test_the_batch_is_in_whole_tiles_but_the_width_is_not(call):
    """D = F = 64 fill a quarter of a tile of 128: four times the time of compute."""
    of = {}
    for width in (64, 128):
        args = ("roofline", PRODUCT, "--dims", f"B=8,D={width},F=128", "--on", "v5e", "--channel", "vmem", "--json")
        of[width] = call(*args).json
    assert (of[64]["padding"], of[128]["padding"]) == (2, 1)
    assert of[64]["math_s"] == of[128]["math_s"]


@pytest.mark.parametrize(
    ("op", "flops", "num_bytes", "steps"),
    [
        ("bf16[B,D] + bf16[B,D] -> bf16[B,D]", 64 * 512, 3 * 2 * 64 * 512, ["add"]),
        ("bf16[B,D] + fp32[D] -> bf16[B,D]", 64 * 512, 2 * 2 * 64 * 512 + 4 * 512, ["add"]),
        ("bf16[B,D] * bf16[B,D] -> bf16[B,D]", 64 * 512, 3 * 2 * 64 * 512, ["multiply"]),
        ("bf16[B,D] * bf16[B,D] -> bf16[B]", 2 * 64 * 512, 2 * (2 * 64 * 512 + 64), ["multiply", "add"]),
        ("softmax(A[B,D])", 5 * 64 * 512, 2 * 2 * 64 * 512, ["max", "subtract", "exp", "sum", "divide"]),
        (
            "rms_norm(fp32[B,D]) -> bf16[B,D]",
            4 * 64 * 512,
            (4 + 2) * 64 * 512 + 4 * 512,
            ["square", "sum", "divide", "scale"],
        ),
        (
            "layer_norm(bf16[B,D])",
            7 * 64 * 512,
            2 * (2 * 64 + 2) * 512,
            ["sum", "subtract", "square", "sum", "divide", "scale", "shift"],
        ),
    ],
)
def test_what_runs_on_vector_units(call, op, flops, num_bytes, steps):
    """A v5e's VPU: 1,024 lanes of 4 ALUs at 1.5 GHz, 6.144e12 operations a second."""
    found = call("roofline", op, "--dims", "B=64,D=512", "--on", "v5e", "--json").json
    assert (found["flops"], found["bytes"], found["steps"]) == (flops, num_bytes, steps)
    assert (found["units"], found["peak_flops"], found["critical_batch"]) == ("vector", 1024 * 4 * 1.5e9, None)
    assert found["math_s"] == pytest.approx(flops / 6.144e12)
    assert found["bound_by"] == "hbm"


def test_vector_rates(call):
    """The book's v5p has 7e12; an H100's lanes have its FP32 FLOP/s, two a cycle; v6e's are unknown."""
    args = ("roofline", "A[P] * B[P] -> C[]", "--dims", "P=1048576", "--on")
    assert call(*args, "v5p-book", "--json").json["critical_intensity"] == 7e12 / 2.8e12
    assert call(*args, "h100", "--json").json["peak_flops"] == pytest.approx(2 * 132 * 128 * 1.83e9, rel=1e-3)
    assert "whose rate is not known" in call(*args, "v6e").words
    assert "known" not in call(*args, "v5p").words


def test_the_knee_is_a_point_of_the_curve(call, tmp_path):
    """With D = F = 4096 in bf16 on a v5e, compute binds from B = 272.5: 273 is drawn between the swept 256 and 512."""
    args = ("roofline", "bf16[B,D] * bf16[D,F] -> bf16[B,F]", "--on", "v5e", "--dims", "D=4096,F=4096")
    assert call(*args, "--sweep", "B=64..1024", "--png", "sweep.json").code == 0
    values = [row for data in json.loads((tmp_path / "sweep.json").read_text())["datasets"].values() for row in data]
    drawn = sorted({row["x"] for row in values if "x" in row and row["x"] >= 64})
    assert drawn == [64, 128, 256, 273, 512, 1024]
