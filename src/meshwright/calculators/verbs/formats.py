"""`meshwright formats`: number formats, how each stores a value, and what a dot product of them takes."""

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import msgspec

from meshwright.calculators.chips.dot_product import LOAD_CYCLES, VECTOR_BITS, dot_product_ways, dot_product_work
from meshwright.calculators.chips.number_formats import (
    NumberFormat,
    Rounded,
    bit_text,
    decode,
    number_format,
    round_to,
)
from meshwright.cli.verb import Options, argument, option, verb
from meshwright.core.errors import InputError
from meshwright.report.answer import Answer, Fact, Piece, Table

LISTED = ("fp32", "tf32", "bf16", "fp16", "fp8-e5m2", "fp8-e4m3", "fp4-e2m1", "int8", "int4")
"""Formats that are shown where none are named."""

MAX_LENGTH = 10**9


class Given(Options):
    names: tuple[str, ...] = argument(metavar="[FORMAT]...")
    values: tuple[str, ...] = option("Show how each format stores it; repeatable.", "--value", metavar="NUMBER")
    code: str | None = option(
        "Decode a bit pattern of one format, such as 0x7e or 0b0111.", "--bits", metavar="PATTERN"
    )
    scale: str = option("Values are divided by it before they are stored.", default="1")
    length: int | None = option("Elements of a dot product: its instructions and cycles.", "--dot")
    load_cycles: float = option("Of one load from memory.", default=LOAD_CYCLES)
    vector_bits: int = option("Width of a vector register.", default=VECTOR_BITS)


@verb(Given)
def command(given: Given) -> Answer:
    """Range, precision and bytes of FORMATs (all common ones where none is named)."""
    forms = [number_format(name) for name in given.names or LISTED]
    factor = _number(given.scale, "--scale")
    if factor <= 0:
        raise InputError(
            f"--scale {given.scale} must be positive. A value is divided by it, stored, and multiplied back."
        )
    found: dict[str, Any] = {
        "formats": [format_facts(form) for form in forms],
        "values": [_stored(text, forms, factor) for text in given.values],
        "decoded": None if given.code is None else _decoded(given.code, forms),
        "dot_product": [_dot(form, given.length, given.load_cycles, given.vector_bits) for form in forms]
        if given.length is not None
        else None,
    }
    return Answer(found, _text(given, forms, factor, found))


def _text(given: Given, forms: Sequence[NumberFormat], factor: Fraction, found: dict[str, Any]) -> Iterator[Piece]:
    if not given.values and given.code is None and given.length is None:
        yield from _formats_text(forms)
    for text in given.values:
        yield from _value_text(text, forms, factor)
    if found["decoded"]:
        bits, value = found["decoded"]["bits"], found["decoded"]["value"]
        yield Fact(forms[0].name, f"{bits} is {_short(value)}")
    if found["dot_product"]:
        yield from _dot_text(found["dot_product"], given.length or 0, given.load_cycles)


# -- what formats hold ----------------------------------------------------------------------------------


def format_facts(form: NumberFormat) -> dict[str, Any]:
    """One format's fields and what follows from them; decimal_digits of a float: log10(2^(m+1))."""
    digits = (form.mantissa_bits + 1 if form.kind == "float" else form.bits - 1) * math.log10(2)
    return {
        "name": form.name,
        "kind": form.kind,
        "bits": form.bits,
        "bytes": form.num_bytes,
        "exponent_bits": form.exponent_bits,
        "mantissa_bits": form.mantissa_bits,
        "bias": form.bias,
        "max": float(form.max_value),
        "min": float(form.min_value),
        "min_normal": float(form.min_normal),
        "min_subnormal": float(form.min_subnormal),
        "epsilon": float(form.epsilon),
        "decimal_digits": digits,
        "num_finite": form.num_finite,
        "infinity": form.kind == "float" and form.specials == "ieee",
        "nan": form.kind == "float" and form.specials != "none",
    }


def _formats_text(forms: Sequence[NumberFormat]) -> Iterator[Piece]:
    rows = []
    for form in forms:
        fields = f"1+{form.exponent_bits}+{form.mantissa_bits}" if form.kind == "float" else f"{form.bits}"
        rows.append(
            [form.name, fields, f"{form.num_bytes:g}", *(_short(float(x)) for x in (
                form.max_value, form.min_normal, form.min_subnormal, form.epsilon
            ))]
        )  # fmt: skip
    yield Table(["format", "bits", "bytes", "largest", "min normal", "min above 0", "step at 1"], rows)
    yield Fact("bits", "sign + exponent + mantissa; tf32 fills 4 bytes in memory; integers need a scale")


# -- values ---------------------------------------------------------------------------------------------


def _stored(text: str, forms: Sequence[NumberFormat], scale: Fraction) -> dict[str, Any]:
    value = _number(text, "--value")
    stored = [(form, round_to(form, value / scale)) for form in forms]
    return {
        "value": float(value),
        "scale": float(scale),
        "stored": [
            {
                "format": form.name,
                "value": one.value * float(scale),
                "relative_error": one.relative_error,
                "bits": bit_text(form, one.code),
                "code": one.code,
            }
            for form, one in stored
        ],
    }


def _value_text(text: str, forms: Sequence[NumberFormat], scale: Fraction) -> Iterator[Piece]:
    value = _number(text, "--value")
    rows = []
    for form in forms:
        one = round_to(form, value / scale)
        rows.append([form.name, f"{one.value * float(scale):.10g}", _error(one), bit_text(form, one.code)])
    of = "" if scale == 1 else f", stored as multiples of {float(scale):g}"
    yield Table(["format", "stored", "error", "sign exponent mantissa"], rows, f"{text}{of}")


def _error(one: Rounded) -> str:
    if one.relative_error is None or math.isinf(one.relative_error):
        return "overflow"
    return "exact" if one.relative_error == 0 else f"{one.relative_error:.2g}"


def _decoded(text: str, forms: Sequence[NumberFormat]) -> dict[str, Any]:
    if len(forms) != 1:
        raise InputError(f"--bits {text} needs one format, that it is of: meshwright formats fp8 --bits {text}.")
    try:
        code = int(text.replace(" ", ""), 0)
    except ValueError:
        raise InputError(f"--bits {text!r} is no bit pattern. Write it as 0x7e, 0b01111110 or 126.") from None
    return {"format": forms[0].name, "bits": bit_text(forms[0], code), "value": decode(forms[0], code)}


def _number(text: str, what: str) -> Fraction:
    """The exact decimal that was written: 0.1 is a tenth, not the nearest double."""
    try:
        if abs(float(text)) < 1e300:
            return Fraction(text)
    except (ValueError, ZeroDivisionError, OverflowError):
        pass
    raise InputError(f"{what} {text!r} is not a finite number. Write for example 0.1 or 6e4.")


def _short(value: float) -> str:
    """Four digits; whole numbers below a million in full."""
    whole = math.isfinite(value) and abs(value) < 1e6 and value == int(value)
    return f"{int(value):,}" if whole else f"{value:.4g}"


# -- dot products ---------------------------------------------------------------------------------------


def _dot(form: NumberFormat, length: int, load_cycles: float, vector_bits: int) -> dict[str, Any]:
    if length > MAX_LENGTH:
        raise InputError(f"--dot {length} is longer than any row. Give at most {MAX_LENGTH:,}.")
    if not (load_cycles >= 0 and math.isfinite(load_cycles)):
        raise InputError(f"--load-cycles {load_cycles:g} must be 0 or more.")
    work = dot_product_work(form, length)
    ways = dot_product_ways(form, length, load_cycles=load_cycles, vector_bits=vector_bits)
    return {
        "format": form.name,
        "flops": work.flops,
        "bytes": work.num_bytes,
        "intensity": work.intensity,
        "ways": [{**msgspec.structs.asdict(way), "instructions": way.instructions} for way in ways],
    }


def _dot_text(dots: Sequence[dict[str, Any]], length: int, load_cycles: float) -> Iterator[Piece]:
    for dot in dots:
        rows = [
            [way["way"], *(f"{way[key]:,.4g}" if way[key] < 1e4 else f"{way[key]:,.0f}" for key in (
                "loads", "arithmetic", "instructions", "cycles_lower", "cycles_upper"
            ))]
            for way in dot["ways"]
        ]  # fmt: skip
        moved = f"{dot['bytes']:,.0f} bytes, {dot['intensity']:.3g} FLOPs/byte"
        title = f"{dot['format']}: {dot['flops']:,} FLOPs on {moved}"
        yield Table(["way", "loads", "arithmetic", "instructions", "cycles", "no overlap"], rows, title)
    yield Fact("cycles", f"1 for arithmetic, {load_cycles:g} for a load; the larger of both, or their sum")
    yield Fact("matrix", f"the share that one dot product of {length:,} has in a whole matrix product")
