"""`meshwright systolic`: cycles, proof, pictures."""

import pytest


def test_cycles_and_proof(call):
    found = call("systolic", "8x8", "--input", "16", "--json").json
    assert (found["load"], found["fill"], found["stream"], found["drain"], found["total"]) == (8, 14, 2, 14, 38)
    assert found["useful_share"] == pytest.approx(16 / 38)
    assert found["bubble_share"] == pytest.approx(22 / 38)
    assert found["product_is_right"] is True
    assert found["simulated_cycles"] == 38
    assert max(found["busy_cells"]) == 64
    words = call("systolic", "8x8", "--input", "16").words
    for fact in ("total 38 M + (t - 1) max(B, M) + B + M + N - 2", "42.1% of cells x cycles, bubble 57.9%",
                 "38 cycles on integers gave a result equal to the matrix product"):  # fmt: skip
        assert fact in words


def test_the_mxu_of_a_chip(call):
    found = call("systolic", "--on", "v5e", "--input", "100000", "--json").json
    assert (found["rows"], found["cols"]) == (128, 128)
    # four of them make the chip's 197 TFLOP/s
    assert 4 * found["peak_flops"] == pytest.approx(197e12, rel=0.01)
    assert found["flops_per_s"] == pytest.approx(found["peak_flops"], rel=0.01)
    assert found["product_is_right"] is None
    assert found["time_s"] == pytest.approx(found["total"] / 1.5e9)


def test_weights_of_many_tiles(call):
    found = call("systolic", "4x4", "--input", "8", "--weights", "12x10", "--json").json
    assert found["num_tiles"] == 9
    assert found["product_is_right"] is True
    assert found["total"] == 4 + 8 * 8 + 8 + 6


def test_pictures(call, tmp_path):
    said = call("systolic", "3x3", "--input", "2", "--png", "telling.png", "--frames", "all", "--json")
    assert said.code == 0
    assert (tmp_path / "telling.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((tmp_path / "all").glob("cycle_*.png"))) == said.json["total"] == 9
    assert len(said.json["files"]) == 10


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--input", "4"), "needs a shape"),
        (("8", "--input", "4"), "not rows x columns"),
        (("0x8", "--input", "4"), "not rows x columns"),
        (("8x8", "--input", "0"), "--input '0' is below 1"),
        (("--on", "h100", "--input", "4"), "mxu_dim of h100"),
        (("64x64", "--input", "8", "--png", "x.png"), "Draw at most 32"),
        (("8x8", "--input", "900", "--frames", "x"), "too many pictures"),
    ],
)
def test_refused(call, args, message):
    call("systolic", *args).assert_refused(2, message)


@pytest.mark.slow
def test_a_chip_without_a_published_clock_has_cycles_and_no_time(call):
    found = call("systolic", "--on", "v3", "--input", "1024", "--json").json
    assert (found["rows"], found["chip"], found["time_s"]) == (128, "v3", None)
    assert found["total"] == 128 + 1024 + 128 + 128 - 2
    assert "no clock of v3 is published" in call("systolic", "--on", "v3", "--input", "1024").words
