"""`meshwright formats`: number formats, how each stores a value, and the cost of a dot product in each.

Arithmetic takes one cycle and a load about ten, with or without overlap. Source: Scaling systems for LLMs (slides): 2n
- 1 FLOPs on 2n elements, near 1/2 FLOP per byte in bf16.
"""

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

from meshwright.calculators.chips.number_formats import NumberFormat, bit_text, decode, number_format, round_to
from meshwright.cli.output import four_digits
from meshwright.cli.verb import Count, Options, argument, option, verb
from meshwright.core.errors import InputError
from meshwright.cost.formulas.roofline import Work
from meshwright.report.answer import Answer, Condition, Fact, Facts, Piece, Table

LISTED = ("fp32", "tf32", "bf16", "fp16", "fp8-e5m2", "fp8-e4m3", "fp4-e2m1", "int8", "int4")
"""Formats that are shown if none is named."""

MAX_LENGTH = 10**9
LOAD_CYCLES = 10.0
VECTOR_BITS = 512
MATRIX_SHAPE = (16, 8, 16)
"""m, n, k of the product that one matrix instruction makes: an H100 warp's mma in 16-bit."""


class Given(Options):
    names: tuple[str, ...] = argument(metavar="[FORMAT]...")
    values: tuple[str, ...] = option("Show how each format stores it; repeatable.", "--value", metavar="NUMBER")
    code: str | None = option(
        "Decode a bit pattern of one format, such as 0x7e or 0b0111.", "--bits", metavar="PATTERN"
    )
    scale: str = option(
        "Values are divided by it before they are stored.", default="1", needs={"values": "--value", "code": "--bits"}
    )
    length: Count | None = option("Elements of a dot product: its instructions and cycles.", "--dot")
    load_cycles: float = option("Cycles of one load from memory.", default=LOAD_CYCLES, needs={"length": "--dot"})
    vector_bits: Count = option("Width of a vector register.", default=VECTOR_BITS, needs={"length": "--dot"})


@verb(Given)
def command(given: Given) -> Answer:
    """Show range, precision and bytes of FORMATs (by default all common ones)."""
    forms = [number_format(name) for name in given.names or LISTED]
    scale = _number(given.scale, "--scale")
    if scale <= 0:
        raise InputError(f"--scale {given.scale} must be positive. Values are divided by it, stored, multiplied back.")
    facts: Facts = {
        "formats": [format_facts(form) for form in forms],
        "values": [_stored(text, forms, scale) for text in given.values],
        "decoded": None if given.code is None else _decoded(given.code, forms),
        "dot_product": None if given.length is None else _dots(forms, given.length, given),
    }
    stored_rows = [{"given": row["value"], **way} for row in facts["values"] for way in row["stored"]]
    way_rows = [{"format": row["format"], **way} for row in facts["dot_product"] or () for way in row["ways"]]
    tables = [t for t in (stored_rows, facts["decoded"] and [facts["decoded"]], way_rows) if t] or [facts["formats"]]
    return Answer(facts, _text(given, facts), raw=tables)


def _text(given: Given, facts: Facts) -> Iterator[Piece]:
    if not given.values and given.code is None and given.length is None:
        yield Table.of(facts["formats"], FORMAT_COLUMNS)
        yield Condition("bits: sign + exponent + mantissa; tf32 takes 4 bytes in memory; integers need a scale")
    for text, value in zip(given.values, facts["values"], strict=True):
        rows = [[s["format"], f"{s['value']:.10g}", _error(s["relative_error"]), s["bits"]] for s in value["stored"]]
        suffix = "" if value["scale"] == 1 else f", stored as multiples of {value['scale']:g}"
        yield Table(["format", "stored", "error", "sign exponent mantissa"], rows, f"{text}{suffix}")
    if facts["decoded"]:
        code_facts = facts["decoded"]
        yield Fact(code_facts["format"], f"{code_facts['bits']} is {_short(code_facts['value'])}")
    for dot in facts["dot_product"] or ():
        moved_text = f"{dot['bytes']:,.0f} bytes, {dot['intensity']:.3g} FLOPs/byte"
        yield Table.of(dot["ways"], WAY_COLUMNS, f"{dot['format']}: {dot['flops']:,} FLOPs on {moved_text}")
    if facts["dot_product"]:
        yield Condition(f"cycles: 1 for arithmetic, {given.load_cycles:g} for a load or store; the larger of both sums")
        yield Condition(f"matrix: one of the many dot products of {given.length:,} elements of a matrix product")


# -- what formats hold ----------------------------------------------------------------------------------


def format_facts(form: NumberFormat) -> Facts:
    """Returns a format's fields and figures that follow from them; decimal_digits of a float are log10(2^(m+1))."""
    figures, digits = form.figures, (form.mantissa_bits + 1 if form.kind == "float" else form.bits - 1) * math.log10(2)
    num_finite = figures.pop("num_finite")
    return {
        "name": form.name,
        "kind": form.kind,
        "bits": form.bits,
        "bytes": form.num_bytes,
        "exponent_bits": form.exponent_bits,
        "mantissa_bits": form.mantissa_bits,
        "bias": form.bias,
        **figures,
        "decimal_digits": digits,
        "num_finite": num_finite,
        "infinity": form.kind == "float" and form.specials == "ieee",
        "nan": form.kind == "float" and form.specials != "none",
    }


def _short(value: float) -> str:
    """Returns four digits; whole numbers below a million in full."""
    is_whole = math.isfinite(value) and abs(value) < 1e6 and value == int(value)
    return f"{int(value):,}" if is_whole else f"{value:.4g}"


def _fields(form: Facts) -> str:
    return f"1+{form['exponent_bits']}+{form['mantissa_bits']}" if form["kind"] == "float" else f"{form['bits']}"


FORMAT_COLUMNS: Facts = {
    "format": "name",
    "bits": _fields,
    "bytes": ("bytes", "{:g}".format),
    "largest": ("max", _short),
    "min normal": ("min_normal", _short),
    "min above 0": ("min_subnormal", _short),
    "step at 1": ("epsilon", _short),
}


# -- values ---------------------------------------------------------------------------------------------


def _stored(text: str, forms: Sequence[NumberFormat], scale: Fraction) -> Facts:
    value, rows = _number(text, "--value"), []
    for form in forms:
        rounding = round_to(form, value / scale)
        rows.append(
            {
                "format": form.name,
                "value": rounding.value * float(scale),
                "relative_error": rounding.relative_error,
                "bits": bit_text(form, rounding.code),
                "code": rounding.code,
            }
        )
    return {"value": float(value), "scale": float(scale), "stored": rows}


def _error(relative_error: float | None) -> str:
    if relative_error is None:
        return "overflow"
    return "exact" if relative_error == 0 else f"{relative_error:.2g}"


def _decoded(text: str, forms: Sequence[NumberFormat]) -> Facts:
    if len(forms) != 1:
        raise InputError(f"--bits {text} needs one format, to decode it in: meshwright formats fp8 --bits {text}.")
    try:
        code = int(text.replace(" ", ""), 0)
    except ValueError:
        raise InputError(f"--bits {text!r} is no bit pattern. Write it as 0x7e, 0b01111110 or 126.") from None
    return {"format": forms[0].name, "bits": bit_text(forms[0], code), "value": decode(forms[0], code)}


def _number(text: str, what: str) -> Fraction:
    """Returns the exact decimal that was written: 0.1 is a tenth, not the nearest double."""
    try:
        if abs(float(text)) < 1e300:
            return Fraction(text)
    except (ValueError, ZeroDivisionError, OverflowError):
        pass
    raise InputError(f"{what} {text!r} is not a finite number. Write for example 0.1 or 6e4.")


# -- dot products ---------------------------------------------------------------------------------------


def _dots(forms: Sequence[NumberFormat], num_elements: int, given: Given) -> list[Facts]:
    if num_elements > MAX_LENGTH:
        raise InputError(f"--dot {num_elements} is longer than any row. Give at most {MAX_LENGTH:,}.")
    return [
        {
            "format": form.name,
            "flops": work.flops,
            "bytes": work.num_bytes,
            "intensity": work.intensity,
            "ways": dot_product_ways(form, num_elements, load_cycles=given.load_cycles, vector_bits=given.vector_bits),
        }
        for form, work in ((form, dot_product_work(form, num_elements)) for form in forms)
    ]


def dot_product_work(form: NumberFormat, length: int) -> Work:
    """Returns the work of n products and n - 1 sums on 2n elements read. Raises InputError for n below 1."""
    if length < 1:
        raise InputError(f"a dot product of {length} elements has no result. Give at least 1.")
    return Work(flops=2 * length - 1, num_bytes=2 * length * form.num_bytes)


def dot_product_ways(
    form: NumberFormat, length: int, *, load_cycles: float = LOAD_CYCLES, vector_bits: int = VECTOR_BITS
) -> list[Facts]:
    """Returns the cost of a dot product by four kinds of instructions: multiply and add, fused, vector, matrix.

    A vector of V lanes needs n/V fused instructions and 2 log2(V) to add its lanes (a shuffle and an add each). A
    matrix instruction makes m n dot products at once, its operands loaded once per tile; the cost is divided by m n.
    Cycles are the larger of loads and arithmetic, or their sum without overlap. Raises InputError for a vector shorter
    than an element.
    """
    num_lanes = vector_bits // form.stored_bits
    if num_lanes < 1:
        raise InputError(f"a vector of {vector_bits} bits holds no {form.name}. Give at least {form.stored_bits}.")
    num_vectors = math.ceil(length / num_lanes)
    rows, cols, depth = MATRIX_SHAPE
    # operands of a matrix instruction arrive in vector loads of their own
    depth = depth * 16 // form.stored_bits if form.stored_bits <= 16 else depth
    num_tiles, results = math.ceil(length / depth), rows * cols
    operand_loads = math.ceil((rows + cols) * depth / num_lanes)
    way_counts: list[tuple[str, float, float, float, float]] = [
        ("multiply, then add", 1, 2 * length, 2 * length - 1, 1),
        ("fused multiply-add", 1, 2 * length, length, 1),
        (f"vector of {num_lanes}", num_lanes, 2 * num_vectors, num_vectors + 2 * int(math.log2(num_lanes)), 1),
        (f"matrix {rows}x{cols}x{depth}", results * depth, num_tiles * operand_loads / results, num_tiles / results,
         math.ceil(results / num_lanes) / results),
    ]  # fmt: skip
    return [
        {
            "way": way,
            "elements_per_instruction": num_elements,
            "loads": num_loads,
            "arithmetic": num_arithmetic,
            "stores": num_stores,
            "instructions": num_loads + num_arithmetic + num_stores,
            "cycles_lower": max((num_loads + num_stores) * load_cycles, num_arithmetic),
            "cycles_upper": (num_loads + num_stores) * load_cycles + num_arithmetic,
        }
        for way, num_elements, num_loads, num_arithmetic, num_stores in way_counts
    ]


WAY_COLUMNS: Facts = {
    "way": "way",
    "loads": ("loads", four_digits),
    "arithmetic": ("arithmetic", four_digits),
    "instructions": ("instructions", four_digits),
    "cycles": ("cycles_lower", four_digits),
    "without overlap": ("cycles_upper", four_digits),
}
