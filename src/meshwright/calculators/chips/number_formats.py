"""Number formats of machine learning: their values, and how they round. Exact arithmetic, no array library.

A float of e exponent and m mantissa bits holds (-1)^s 2^(E - bias) (1 + M / 2^m), and below the smallest normal
2^(1 - bias) M / 2^m. Sources: IEEE 754; OCP 8-bit floating point (2023) for e4m3 and e5m2; OCP microscaling formats
(2023) for e2m1; How to Scale Your Model, section 1, and Scaling systems for LLMs (slides) for the dot product.
"""

import math
from bisect import bisect_left
from fractions import Fraction
from typing import Literal

import msgspec

from meshwright.core.errors import InputError, nearest


class NumberFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A number format. ``specials`` says which codes with the largest exponent are not numbers.

    "ieee": all codes with the largest exponent are infinities or NaN; "nan": only the largest mantissa is NaN, and
    there is no infinity; "none": every code is a number. Integers have no exponent bits; the largest is ``2^(bits-1) -
    1`` and the step is 1.
    """

    name: str
    stored_bits: int
    exponent_bits: int = 0
    mantissa_bits: int = 0
    specials: Literal["ieee", "nan", "none"] = "ieee"
    aliases: tuple[str, ...] = ()

    @property
    def kind(self) -> Literal["float", "integer"]:
        return "float" if self.exponent_bits else "integer"

    @property
    def bits(self) -> int:
        """Bits that carry a value; tf32 fills more in memory."""
        return 1 + self.exponent_bits + self.mantissa_bits if self.exponent_bits else self.stored_bits

    @property
    def num_bytes(self) -> float:
        """Bytes of an element in memory; tf32 is stored as fp32."""
        return self.stored_bits / 8

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1 if self.exponent_bits else 0

    @property
    def top_code(self) -> int:
        """The code of the largest finite number; codes of positive numbers are in the order of their values."""
        num_special = {"ieee": 2**self.mantissa_bits, "nan": 1, "none": 0}[self.specials]
        return (1 << (self.bits - 1)) - 1 - int(num_special)

    def magnitude(self, code: int) -> Fraction:
        """Returns the exact value of a code without its sign; codes beyond ``top_code`` are read as numbers too."""
        if not self.exponent_bits:
            return Fraction(code)
        exponent, mantissa = divmod(code, 2**self.mantissa_bits)
        hidden_bit = 2**self.mantissa_bits if exponent else 0
        return Fraction((hidden_bit + mantissa) * Fraction(2) ** (max(exponent, 1) - self.bias - self.mantissa_bits))

    @property
    def figures(self) -> dict[str, float]:
        """The largest number, the smallest normal number (1 for integers), the smallest number above zero, and more.

        ``epsilon`` is the step from 1 to the next number; ``num_finite`` counts distinct finite values, zero once.
        """
        max_value, is_integer = self.magnitude(self.top_code), self.kind == "integer"
        return {
            "max": float(max_value),
            "min": float(-max_value - is_integer),
            "min_normal": float(self.magnitude(2**self.mantissa_bits)),
            "min_subnormal": float(self.magnitude(1)),
            "epsilon": 2.0**-self.mantissa_bits,
            "num_finite": 2 * self.top_code + 1 + is_integer,
        }


class Rounded(msgspec.Struct, frozen=True, kw_only=True):
    """A value as a format stores it: its bit pattern, and the error, None for an infinity or NaN."""

    code: int
    value: float
    relative_error: float | None


FORMATS: dict[str, NumberFormat] = {
    form.name: form
    for form in (
        NumberFormat(name="fp64", stored_bits=64, exponent_bits=11, mantissa_bits=52),
        NumberFormat(name="fp32", stored_bits=32, exponent_bits=8, mantissa_bits=23),
        NumberFormat(name="tf32", stored_bits=32, exponent_bits=8, mantissa_bits=10),
        NumberFormat(name="bf16", stored_bits=16, exponent_bits=8, mantissa_bits=7),
        NumberFormat(name="fp16", stored_bits=16, exponent_bits=5, mantissa_bits=10),
        NumberFormat(name="fp8-e5m2", stored_bits=8, exponent_bits=5, mantissa_bits=2, aliases=("e5m2",)),
        NumberFormat(
            name="fp8-e4m3", stored_bits=8, exponent_bits=4, mantissa_bits=3, specials="nan", aliases=("e4m3", "fp8")
        ),
        NumberFormat(
            name="fp4-e2m1", stored_bits=4, exponent_bits=2, mantissa_bits=1, specials="none", aliases=("e2m1", "fp4")
        ),
        *(NumberFormat(name=f"int{bits}", stored_bits=bits, specials="none") for bits in (32, 16, 8, 4)),
    )
}


def number_format(name: str) -> NumberFormat:
    """Returns the format of a name or alias. Raises InputError with the nearest name."""
    format_by_name = {known_name: form for form in FORMATS.values() for known_name in (form.name, *form.aliases)}
    if name.lower() not in format_by_name:
        raise InputError(f"number format {name!r} is not known.{nearest(name.lower(), format_by_name)}")
    return format_by_name[name.lower()]


def round_to(form: NumberFormat, value: Fraction) -> Rounded:
    """Rounds a value to the nearest number of the format, ties to even.

    Values that round to one step above the largest number overflow: to infinity in "ieee", to NaN in "nan"; in "none"
    and in integers to the largest number.
    """
    magnitude, is_minus = abs(value), value < 0
    last_code = form.top_code + (is_minus and form.kind == "integer")
    code_above = bisect_left(range(last_code + 1), magnitude, key=form.magnitude)
    code_below = max(code_above - 1, 0)
    # an even code has an even mantissa, and the code after the last one stands for what overflows
    twice_distance = 2 * magnitude - form.magnitude(code_below) - form.magnitude(code_above)
    code = code_below if twice_distance < 0 or (twice_distance == 0 and code_below % 2 == 0) else code_above
    if form.specials == "none":
        code = min(code, last_code)
    pattern = code + is_minus * 2 ** (form.bits - 1) if form.exponent_bits else (-1) ** is_minus * code % 2**form.bits
    if code > last_code:
        return Rounded(code=pattern, value=decode(form, pattern), relative_error=None)
    rounded_value = (-1) ** is_minus * form.magnitude(code)
    relative_error = 0.0 if rounded_value == value else abs(float((rounded_value - value) / value))
    return Rounded(code=pattern, value=float(rounded_value), relative_error=relative_error)


def decode(form: NumberFormat, code: int) -> float:
    """Returns the value of a bit pattern, also infinity and NaN. Raises InputError for a code of too many bits."""
    if not 0 <= code < 2**form.bits:
        raise InputError(f"code {code:#x} does not fit the {form.bits} bits of {form.name}.")
    is_negative, magnitude_code = divmod(code, 2 ** (form.bits - 1))
    if form.kind == "integer":
        return float(code - is_negative * 2**form.bits)
    if magnitude_code <= form.top_code:
        return (-1 if is_negative else 1) * float(form.magnitude(magnitude_code))
    is_infinite = form.specials == "ieee" and magnitude_code == form.top_code + 1
    return (-1.0) ** is_negative * math.inf if is_infinite else math.nan


def bit_text(form: NumberFormat, code: int) -> str:
    """Returns the pattern as sign, exponent and mantissa: ``"0 01111011 1001101"``; two's complement of an integer."""
    bit_string = f"{code:0{form.bits}b}"
    if form.kind == "integer":
        return bit_string
    return f"{bit_string[0]} {bit_string[1 : 1 + form.exponent_bits]} {bit_string[1 + form.exponent_bits :]}"
