"""Number formats of machine learning: what they hold, and how they round. Exact arithmetic, no array library.

A float of e exponent and m mantissa bits holds (-1)^s 2^(E - bias) (1 + M / 2^m), and below the smallest normal
2^(1 - bias) M / 2^m. Sources: IEEE 754; OCP 8-bit floating point (2023) for e4m3 and e5m2; OCP microscaling formats
(2023) for e2m1; How to Scale Your Model, section 1, and Scaling systems for LLMs (slides) for the dot product.
"""

import math
from fractions import Fraction
from typing import Literal

import msgspec

from meshwright.core.errors import InputError, nearest


class NumberFormat(msgspec.Struct, frozen=True, kw_only=True):
    """One format. ``specials`` are the codes of the largest exponent that are no numbers.

    "ieee": all of them, infinities and NaN; "nan": the largest mantissa alone is NaN, no infinity; "none": all are
    numbers. Integers have no exponent bits; their largest is ``2^(bits-1) - 1`` and their step 1.
    """

    name: str
    kind: Literal["float", "integer"]
    bits: int
    exponent_bits: int = 0
    mantissa_bits: int = 0
    specials: Literal["ieee", "nan", "none"] = "ieee"
    stored_bits: int
    aliases: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> float:
        """Bytes of an element in memory; tf32 is stored as fp32."""
        return self.stored_bits / 8

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1 if self.kind == "float" else 0

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest numbers."""
        last = 2**self.exponent_bits - 1
        return (last - 1 if self.specials == "ieee" else last) - self.bias

    @property
    def max_value(self) -> Fraction:
        """Largest finite number."""
        if self.kind == "integer":
            return Fraction(2 ** (self.bits - 1) - 1)
        top = 2**self.mantissa_bits - (2 if self.specials == "nan" else 1)
        return _power(self.max_exponent) * (1 + Fraction(top, 2**self.mantissa_bits))

    @property
    def min_value(self) -> Fraction:
        """Most negative finite number."""
        return -self.max_value - (1 if self.kind == "integer" else 0)

    @property
    def min_normal(self) -> Fraction:
        """Smallest number with its full precision; 1 for integers."""
        return Fraction(1) if self.kind == "integer" else _power(1 - self.bias)

    @property
    def min_subnormal(self) -> Fraction:
        """Smallest number above zero."""
        return Fraction(1) if self.kind == "integer" else _power(1 - self.bias - self.mantissa_bits)

    @property
    def epsilon(self) -> Fraction:
        """Step from 1 to the next number."""
        return Fraction(1) if self.kind == "integer" else _power(-self.mantissa_bits)

    @property
    def num_finite(self) -> int:
        """Distinct finite values; zero counts once."""
        if self.kind == "integer":
            return 2**self.bits
        codes = 2 ** (self.exponent_bits + self.mantissa_bits)
        lost = {"ieee": 2**self.mantissa_bits, "nan": 1, "none": 0}[self.specials]
        return 2 * (codes - lost) - 1


class Rounded(msgspec.Struct, frozen=True, kw_only=True):
    """A value as a format stores it. ``code`` is the bit pattern; ``exact`` None for an infinity or NaN."""

    format: str
    code: int
    value: float
    exact: Fraction | None
    relative_error: float | None


def _float(name: str, exponent: int, mantissa: int, specials: str = "ieee", **more: object) -> NumberFormat:
    bits = 1 + exponent + mantissa
    fields = {"stored_bits": bits, **more}
    return msgspec.convert(
        {
            "name": name, "kind": "float", "bits": bits, "exponent_bits": exponent, "mantissa_bits": mantissa,
            "specials": specials, **fields,
        },
        NumberFormat,
    )  # fmt: skip


FORMATS: dict[str, NumberFormat] = {
    form.name: form
    for form in (
        _float("fp64", 11, 52),
        _float("fp32", 8, 23),
        _float("tf32", 8, 10, stored_bits=32),
        _float("bf16", 8, 7),
        _float("fp16", 5, 10),
        _float("fp8-e5m2", 5, 2, aliases=["e5m2"]),
        _float("fp8-e4m3", 4, 3, "nan", aliases=["e4m3", "fp8"]),
        _float("fp4-e2m1", 2, 1, "none", aliases=["e2m1", "fp4"]),
        NumberFormat(name="int32", kind="integer", bits=32, stored_bits=32),
        NumberFormat(name="int16", kind="integer", bits=16, stored_bits=16),
        NumberFormat(name="int8", kind="integer", bits=8, stored_bits=8),
        NumberFormat(name="int4", kind="integer", bits=4, stored_bits=4),
    )
}


def number_format(name: str) -> NumberFormat:
    """The format of that name or alias; InputError with the nearest name."""
    names = {word: form for form in FORMATS.values() for word in (form.name, *form.aliases)}
    if name.lower() not in names:
        raise InputError(f"number format {name!r} is not known.{nearest(name.lower(), names)}")
    return names[name.lower()]


# -- rounding -------------------------------------------------------------------------------------------


def round_to(form: NumberFormat, value: Fraction) -> Rounded:
    """The nearest number of the format, ties to the even one; beyond the largest: infinity, NaN or the largest.

    What is half a step above the largest number overflows: to infinity in "ieee", to NaN in "nan"; "none" and integers
    stop at their ends, as converters do.
    """
    sign = 1 if value < 0 else 0
    step = _step_at(form, abs(value))
    count = _half_even(abs(value) / step)
    found = (-1) ** sign * count * step
    if form.min_value <= found <= form.max_value:
        return _rounded(form, found, value, code=_encode(form, found, negative=bool(sign)))
    if form.kind == "integer" or form.specials == "none":
        end = form.min_value if sign else form.max_value
        return _rounded(form, end, value, code=_encode(form, end, negative=bool(sign)))
    top = sign << (form.bits - 1)
    if form.specials == "ieee":
        code = top | ((2**form.exponent_bits - 1) << form.mantissa_bits)
        return Rounded(format=form.name, code=code, value=(-1) ** sign * math.inf, exact=None, relative_error=math.inf)
    return Rounded(
        format=form.name, code=top | (2 ** (form.bits - 1) - 1), value=math.nan, exact=None, relative_error=None
    )


def decode(form: NumberFormat, code: int) -> float:
    """The value of a bit pattern; infinity and NaN included."""
    if not 0 <= code < 2**form.bits:
        raise InputError(f"code {code:#x} does not fit the {form.bits} bits of {form.name}.")
    if form.kind == "integer":
        return float(code - 2**form.bits if code >> (form.bits - 1) else code)
    sign = -1.0 if code >> (form.bits - 1) else 1.0
    exponent = (code >> form.mantissa_bits) & (2**form.exponent_bits - 1)
    mantissa = code & (2**form.mantissa_bits - 1)
    if exponent == 2**form.exponent_bits - 1:
        if form.specials == "ieee":
            return sign * math.inf if mantissa == 0 else math.nan
        if form.specials == "nan" and mantissa == 2**form.mantissa_bits - 1:
            return math.nan
    if exponent == 0:
        return sign * float(form.min_subnormal * mantissa)
    return sign * float(_power(exponent - form.bias) * (1 + Fraction(mantissa, 2**form.mantissa_bits)))


def bit_text(form: NumberFormat, code: int) -> str:
    """The pattern as sign, exponent and mantissa: ``"0 01111011 1001101"``; two's complement of an integer."""
    text = f"{code:0{form.bits}b}"
    if form.kind == "integer":
        return text
    return f"{text[0]} {text[1 : 1 + form.exponent_bits]} {text[1 + form.exponent_bits :]}"


def _rounded(form: NumberFormat, found: Fraction, value: Fraction, *, code: int) -> Rounded:
    error = 0.0 if found == value else abs(float((found - value) / value)) if value else math.inf
    return Rounded(format=form.name, code=code, value=float(found), exact=found, relative_error=error)


def _step_at(form: NumberFormat, size: Fraction) -> Fraction:
    """Distance of neighbouring numbers at a magnitude: that of the largest numbers beyond them."""
    if form.kind == "integer" or size < form.min_normal:
        return form.min_subnormal
    return _power(min(_floor_log2(size), form.max_exponent) - form.mantissa_bits)


def _encode(form: NumberFormat, exact: Fraction, *, negative: bool) -> int:
    """Bit pattern of a number that the format holds."""
    if form.kind == "integer":
        return int(exact) % 2**form.bits
    size, sign = abs(exact), int(negative) << (form.bits - 1)
    if size < form.min_normal:
        return sign | int(size / form.min_subnormal)
    exponent = _floor_log2(size)
    mantissa = int((size / _power(exponent) - 1) * 2**form.mantissa_bits)
    return sign | ((exponent + form.bias) << form.mantissa_bits) | mantissa


def _half_even(value: Fraction) -> int:
    return round(value)  # of a Fraction: exact, ties to even


def _floor_log2(size: Fraction) -> int:
    guess = size.numerator.bit_length() - size.denominator.bit_length()
    return guess if _power(guess) <= size else guess - 1


def _power(exponent: int) -> Fraction:
    return Fraction(2**exponent) if exponent >= 0 else Fraction(1, 2**-exponent)
