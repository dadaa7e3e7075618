"""Number formats beside ml_dtypes and NumPy: every small pattern, limits, and rounding of many values."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from meshwright.calculators.chips.number_formats import FORMATS, bit_text, decode, number_format, round_to
from meshwright.core.dims import DTYPE_BYTES
from meshwright.core.errors import InputError

THEIRS = {
    "fp64": np.float64,
    "fp32": np.float32,
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "fp8-e5m2": ml_dtypes.float8_e5m2,
    "fp8-e4m3": ml_dtypes.float8_e4m3fn,
    "fp4-e2m1": ml_dtypes.float4_e2m1fn,
}
EDGES = [0.0, 0.1, -0.1, 1 / 3, 0.25, 0.75, 1.25, 2.5, 5, 6, 7, 240, 448, 463.9, 464, 465, 57344, 61439, 61440, 61441,
         65504, 65519, 65520, 3.4e38, 1e-7, 2**-25, 2**-24, 3 * 2**-25, 2**-150, 2**-149, 1.5 * 2**-9]  # fmt: skip


def same(mine: float, theirs: float) -> bool:
    return mine == theirs or (math.isnan(mine) and math.isnan(theirs))


@pytest.mark.parametrize("name", THEIRS)
def test_limits(name):
    form, theirs = FORMATS[name], ml_dtypes.finfo(THEIRS[name])
    assert form.bits == theirs.bits
    assert form.figures["max"] == float(theirs.max)
    assert form.figures["min_normal"] == float(theirs.smallest_normal)
    assert form.figures["min_subnormal"] == float(theirs.smallest_subnormal)
    assert form.figures["epsilon"] == float(theirs.eps)


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp8-e5m2", "fp8-e4m3", "fp4-e2m1"])
def test_every_pattern_of_small_formats(name):
    form = FORMATS[name]
    codes = np.arange(2**form.bits, dtype=np.uint16 if form.bits > 8 else np.uint8)[:: 7 if form.bits > 8 else 1]
    with np.errstate(invalid="ignore"):  # NaNs are cast too
        theirs = codes.view(THEIRS[name]).astype(np.float64)
    mine = [decode(form, int(code)) for code in codes]
    assert all(same(a, float(b)) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("name", ["fp32", *list(THEIRS)[2:]])
def test_rounding(name):
    form = FORMATS[name]
    rng = np.random.default_rng(1)
    values = np.concatenate([rng.standard_normal(300) * 10.0 ** rng.integers(-12, 6, 300), EDGES])
    with np.errstate(all="ignore"):
        theirs = values.astype(THEIRS[name]).astype(np.float64)
    for value, expected in zip(values, theirs, strict=True):
        mine = round_to(form, Fraction(value))
        assert same(mine.value, float(expected)), value
        assert same(decode(form, mine.code), mine.value)


def test_finite_values_are_counted():
    for name in ("fp8-e4m3", "fp8-e5m2", "fp4-e2m1"):
        form = FORMATS[name]
        values = {decode(form, code) for code in range(2**form.bits)}
        assert form.figures["num_finite"] == len({v for v in values if math.isfinite(v)})


def test_integers_round_to_even_and_stop_at_their_ends():
    int4 = FORMATS["int4"]
    found = [round_to(int4, Fraction(v)).value for v in (0.5, 1.5, -2.5, 7.9, -8.2, 100, -100)]
    assert found == [0, 2, -2, 7, -8, 7, -8]
    assert [decode(int4, code) for code in (0b0111, 0b1000, 0b1111)] == [7, -8, -1]
    assert bit_text(int4, round_to(int4, Fraction(-1)).code) == "1111"


def test_a_tenth():
    stored = {name: round_to(form, Fraction(1, 10)) for name, form in FORMATS.items()}
    assert stored["fp32"].value == float(np.float32(0.1))
    assert stored["bf16"].value == 0.10009765625
    assert bit_text(FORMATS["bf16"], stored["bf16"].code) == "0 01111011 1001101"
    assert stored["int8"].relative_error == 1
    # tf32 has fp32's range and fp16's precision
    assert stored["tf32"].value == stored["fp16"].value
    assert FORMATS["tf32"].figures["min_normal"] == FORMATS["fp32"].figures["min_normal"]


def test_bytes_agree_with_the_dtypes_of_the_product():
    for dtype, size in DTYPE_BYTES.items():
        assert number_format(dtype).num_bytes == size


def test_names():
    assert number_format("E4M3").name == number_format("fp8").name == "fp8-e4m3"
    with pytest.raises(InputError, match="Did you mean 'bf16'"):
        number_format("bf17")
    with pytest.raises(InputError, match="does not fit the 8 bits"):
        decode(FORMATS["int8"], 256)
