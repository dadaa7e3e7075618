"""`meshwright formats`: what formats hold, how they store a value, what a dot product takes."""

import pytest


def test_the_usual_formats(call):
    found = {one["name"]: one for one in call("formats", "--json").json["formats"]}
    assert found["bf16"]["max"] == pytest.approx(3.39e38, rel=1e-3)
    assert found["bf16"]["min_normal"] == found["fp32"]["min_normal"]
    assert (found["fp8-e4m3"]["max"], found["fp8-e5m2"]["max"]) == (448, 57344)
    assert (found["fp8-e4m3"]["infinity"], found["fp8-e5m2"]["infinity"]) == (False, True)
    assert found["tf32"]["bytes"] == 4
    assert "fp16 1+5+10 2 65,504 6.104e-05" in call("formats").words


def test_a_value(call):
    (found,) = call("formats", "bf16", "fp8", "--value", "0.1", "--json").json["values"]
    assert [one["value"] for one in found["stored"]] == [0.10009765625, 0.1015625]
    assert "bf16 0.1000976562 0.00098 0 01111011 1001101" in call("formats", "bf16", "--value", "0.1").words
    assert "overflow" in call("formats", "fp8", "--value", "1e6").words


def test_a_scale(call):
    (found,) = call("formats", "int8", "--value", "3.3", "--value", "1", "--scale", "0.05", "--json").json["values"][:1]
    (stored,) = found["stored"]
    assert (stored["code"], stored["relative_error"]) == (66, 0)
    assert stored["value"] == pytest.approx(3.3)


def test_a_pattern(call):
    assert call("formats", "e4m3", "--bits", "0x7e", "--json").json["decoded"]["value"] == 448
    assert call("formats", "e4m3", "--bits", "0x7f", "--json").json["decoded"]["value"] is None  # NaN


def test_a_dot_product(call):
    (found,) = call("formats", "bf16", "--dot", "1000", "--json").json["dot_product"]
    assert (found["flops"], found["bytes"]) == (1999, 4000)
    assert found["intensity"] == pytest.approx(0.5, rel=1e-3)
    scalar, fused = found["ways"][:2]
    assert scalar["instructions"] - fused["instructions"] == 999
    assert fused["cycles_upper"] == fused["cycles_lower"] + fused["arithmetic"]
    assert "fused multiply-add" in call("formats", "bf16", "--dot", "1000").words


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("bf17",), "Did you mean 'bf16'"),
        (("--value", "x"), "not a finite number"),
        (("--value", "inf"), "not a finite number"),
        (("--value", "1", "--scale", "0"), "must be positive"),
        (("--bits", "0x7e"), "needs one format"),
        (("bf16", "--bits", "zz"), "no bit pattern"),
        (("fp8", "--bits", "0x1ff"), "does not fit the 8 bits"),
        (("--dot", "0"), "at least 1"),
    ],
)
def test_refused(call, args, message):
    call("formats", *args).assert_refused(2, message)


def test_it_fits_the_terminal(call):
    for args in ((), ("--value", "0.1"), ("fp8", "--dot", "4096")):
        assert max(map(len, call("formats", *args).out.splitlines())) <= 80
