"""Read and print quantities. Values inside the product are plain SI floats with the unit in the name."""

import math
import re

from meshwright.core.errors import InputError

_DECIMAL = {"": 1, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_NUMBER = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*")


def _split(text: str, what: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise InputError(f"{what} {text!r} is not a number. Write for example 4Mi, 15T, 4096 or 1e6.")
    return float(match.group(1).replace("_", "")), match.group(2)


def parse_count(text: str, *, what: str = "count") -> int:
    """Whole number from ``"4Mi"``, ``"15T"``, ``"1e6"``: k M G T are powers of ten, Ki Mi Gi of two.

    Raises InputError when the text is not a whole number of things.
    """
    value, suffix = _split(text, what)
    scale = _BINARY.get(suffix, _DECIMAL.get(suffix))
    if scale is None:
        raise InputError(
            f"{what} {text!r} has the unknown suffix {suffix!r}. Use k M G T (1e3..) or Ki Mi Gi (1024..)."
        )
    scaled = value * scale
    if not math.isfinite(scaled) or abs(scaled - round(scaled)) > 1e-9 * max(1.0, abs(scaled)):
        raise InputError(f"{what} {text!r} is {scaled:g}, not a whole number.")
    return round(scaled)


def parse_bytes(text: str) -> float:
    """Bytes from ``"80 GB"`` (1e9) or ``"16 GiB"`` (2**30); a bare number is bytes."""
    value, suffix = _split(text, "size")
    unit = suffix.removesuffix("B") if suffix != "B" else ""
    scale = _BINARY.get(unit, _DECIMAL.get(unit))
    if scale is None:
        raise InputError(f"size {text!r} has the unknown unit {suffix!r}. Use GB (1e9 bytes) or GiB (2**30).")
    return value * scale


def _scaled(value: float, steps: list[tuple[float, str]], unit: str, digits: int) -> str:
    for scale, prefix in steps:
        if abs(value) >= scale * (1 - 0.5 * 10**-digits):
            return f"{_significant(value / scale, digits)} {prefix}{unit}"
    scale, prefix = steps[-1]
    return f"{_significant(value / scale, digits)} {prefix}{unit}"


def _significant(value: float, digits: int) -> str:
    if value == 0:
        return "0"
    text = f"{value:.{digits}g}"
    return f"{float(text):.0f}" if "e" in text else text


NOTHING_S = 5e-13
"""Seconds that are rounding, not time."""


def format_seconds(seconds: float) -> str:
    """``"1.2 ms"``, ``"11.6 us"``, ``"3.4 s"``, ``"2.5 h"``, ``"44 days"``: three significant digits."""
    if math.isinf(seconds):
        return "never"
    if abs(seconds) < NOTHING_S:
        return "0 ns"
    if seconds >= 86400:
        return f"{_significant(seconds / 86400, 3)} days"
    if seconds >= 3600:
        return f"{_significant(seconds / 3600, 3)} h"
    return _scaled(seconds, [(1, ""), (1e-3, "m"), (1e-6, "u"), (1e-9, "n")], "s", 3)


def format_bytes(num_bytes: float) -> str:
    """``"95 GB"``: powers of ten, three significant digits."""
    steps = [(1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, "")]
    return _scaled(num_bytes, steps, "B", 3)


def format_rate(bytes_per_s: float) -> str:
    """``"95 GB/s"``: powers of ten, three significant digits."""
    return f"{format_bytes(bytes_per_s)}/s"


def format_flops(flops: float, *, unit: str = "FLOP/s") -> str:
    """``"459 TFLOP/s"``: powers of ten, three significant digits (``unit="FLOP"`` for an amount)."""
    return _scaled(flops, [(1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1.0, "")], unit, 3)


def format_count(count: float) -> str:
    """``"4 Mi"`` for a number of tokens or sequences that is a whole number of powers of two, else decimal."""
    whole = int(count)
    for scale, prefix in ((2**30, "Gi"), (2**20, "Mi"), (2**10, "Ki")):
        if whole == count and whole >= scale and whole % scale == 0 and whole // scale < 1024:
            return f"{whole // scale} {prefix}"
    return format_params(count)


def format_params(count: float) -> str:
    """``"70.6 B"`` for a number of parameters: powers of ten, three significant digits."""
    return _scaled(count, [(1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"), (1.0, "")], "", 3).strip()
