"""Reads and prints quantities. Values inside meshwright are plain SI floats with the unit in the name."""

import math
import re
from collections.abc import Callable, Iterable, Mapping

from meshwright.core.errors import InputError
from meshwright.core.fields import LARGEST

_DECIMAL: dict[str, float] = {"": 1, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY: dict[str, float] = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_SMALL: dict[str, float] = {"": 1, "m": 1e-3, "u": 1e-6, "n": 1e-9}
MOST = 1e15
"""Largest count that `parse_count` takes by default: above the parameters, tokens and positions of any run."""
_NUMBER = re.compile(r"\s*(-?[0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*")


def _split(text: str, what: str, least: int = 0, most: float = LARGEST) -> tuple[float, str]:
    number_match = _NUMBER.fullmatch(text)
    if number_match is None:
        raise InputError(f"{what} {text!r} is not a number. Write for example 4Mi, 15T, 4096 or 1e6.")
    number = float(number_match.group(1).replace("_", ""))
    if number < 0 or number == 0 < least:
        raise InputError(f"{what} {text!r} is below {least}. Give a number of at least {least}.")
    if number > most:
        raise InputError(f"{what} {text!r} is larger than {most:g}. Give a smaller number.")
    return number, number_match.group(2)


def parse_count(text: str, *, what: str = "count", least: int = 0, most: float = MOST) -> int:
    """Parses a whole number from ``"4Mi"``, ``"15T"``, ``"1e6"``: k M G T are powers of ten, Ki Mi Gi of two.

    Raises InputError if the text is not a whole number of at least ``least``, 0 or 1, and at most ``most``.
    """
    number, suffix = _split(text, what, least, most)
    scale = _BINARY.get(suffix, _DECIMAL.get(suffix))
    if scale is None:
        raise InputError(f"{what} {text!r} has an unknown suffix {suffix!r}. Use k M G T (1e3..) or Ki Mi Gi (1024..).")
    count = number * scale
    if count > most:
        raise InputError(f"{what} {text!r} is larger than {most:g}. Give a smaller number.")
    if abs(count - round(count)) > 1e-9 * count:
        raise InputError(f"{what} {text!r} is {count:g}, not a whole number.")
    return round(count)


def parse_bytes(text: str) -> float:
    """Parses bytes from ``"80 GB"`` (1e9), ``"16 GiB"`` (2**30) or a bare number. Raises InputError for other text."""
    number, suffix = _split(text, "size")
    prefix = suffix.removesuffix("B") if suffix != "B" else ""
    scale = _BINARY.get(prefix, _DECIMAL.get(prefix))
    if scale is None:
        raise InputError(f"size {text!r} has the unknown unit {suffix!r}. Use GB (1e9 bytes) or GiB (2**30).")
    return number * scale


def parse_rate(text: str, *, what: str = "rate") -> float:
    """Parses bytes per second from ``"1Gbit/s"``, ``"10 Mbit/s"`` or ``"25GB/s"``, in powers of ten.

    Raises InputError for another unit, and for a rate of 0.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(bit|B)/s", text.strip())
    bytes_per_s = float(match[1]) * _DECIMAL[match[2]] / (8 if match[3] == "bit" else 1) if match else 0.0
    if not 0 < bytes_per_s <= LARGEST:
        raise InputError(f"{what} {text!r} is not a rate. Write for example 1Gbit/s, 10Mbit/s or 25GB/s.")
    return bytes_per_s


def parse_seconds(text: str, *, what: str = "time") -> float:
    """Parses seconds from ``"20ms"``, ``"1.5 s"``, ``"800us"`` or a bare number. Raises InputError for other text."""
    number, suffix = _split(text, what)
    scale = _SMALL.get(suffix[:-1]) if suffix.endswith("s") else None if suffix else 1.0
    if scale is None:
        raise InputError(f"{what} {text!r} has the unknown unit {suffix!r}. Write for example 1s, 20ms or 800us.")
    return number * scale


def _scaled(value: float, unit: str, prefixes: Iterable[str], scales: Mapping[str, float] = _DECIMAL) -> str:
    """Formats a value with the first prefix that is not larger, else the last, to three significant digits."""
    for prefix in prefixes:
        if abs(value) >= scales[prefix] * (1 - 0.5e-3):
            break
    return f"{_significant(value / scales[prefix])} {prefix}{unit}"


def _significant(value: float) -> str:
    if value == 0:
        return "0"
    short_text = f"{value:.3g}"
    return f"{float(short_text):.0f}" if "e" in short_text else short_text


LONG_S = {"year": (365 * 86400.0, 999.5 * 86400), "day": (86400.0, 86400), "h": (3600.0, 3600)}
"""Units of long times in seconds, and the seconds from which they are used."""
NOTHING_S = 5e-13
"""Shorter times, in seconds, are rounding errors and are printed as 0."""


def format_seconds(seconds: float) -> str:
    """Returns a time as ``"1.2 ms"``, ``"2.5 h"``, ``"44 days"``: three significant digits; "never" for infinity."""
    if math.isinf(seconds):
        return "never"
    if abs(seconds) < NOTHING_S:
        return "0 ns"
    for unit, (unit_s, least_s) in LONG_S.items():
        if seconds >= least_s:
            number_text = f"{seconds / unit_s:,.0f}" if seconds >= 999.5 * unit_s else _significant(seconds / unit_s)
            return f"{number_text} {unit}{'s' * (unit != 'h' and number_text != '1')}"
    return _scaled(seconds, "s", _SMALL, _SMALL)


def format_bytes(num_bytes: float) -> str:
    """Returns bytes as ``"95 GB"``: powers of ten, three significant digits."""
    return _scaled(num_bytes, "B", (*"EPTGMk", ""))


def format_rate(bytes_per_s: float) -> str:
    """Returns bytes per second as ``"95 GB/s"``: powers of ten, three significant digits."""
    return f"{format_bytes(bytes_per_s)}/s"


def format_bit_rate(bytes_per_s: float) -> str:
    """Returns bytes per second as ``"1Gbit/s"``, with up to 12 digits, so that `parse_rate` reads the same rate."""
    scale, prefix = next(((_DECIMAL[p], p) for p in "TGMk" if 8 * bytes_per_s >= _DECIMAL[p]), (1.0, ""))
    return f"{8 * bytes_per_s / scale:.12g}{prefix}bit/s"


def format_flops(flops: float, *, unit: str = "FLOP/s") -> str:
    """Returns a rate as ``"459 TFLOP/s"``, or FLOPs with ``unit="FLOP"``: powers of ten, three significant digits."""
    return _scaled(flops, unit, (*"EPTGMk", ""))


def plural(what: str, number: float) -> str:
    """Returns ``"chip"`` for 1 and ``"chips"``, ``"microbatches"`` for other numbers."""
    return what if number == 1 else f"{what}{'es' if what.endswith('ch') else 's'}"


def counted(number: float, what: str) -> str:
    """Returns a number with the singular or plural of ``what``: ``"1 chip"``, ``"1,024 chips"``, ``"2 batches"``."""
    number_text = f"{number:,.0f}" if number == round(number) else f"{number:.4g}"
    return f"{number_text} {plural(what, number)}"


def format_count(count: float) -> str:
    """Returns a count as ``"4 Mi"`` if it is exactly 1 to 1023 Ki, Mi or Gi, else by `format_params`."""
    whole_count = int(count)
    for scale, prefix in ((2**30, "Gi"), (2**20, "Mi"), (2**10, "Ki")):
        if whole_count == count and whole_count >= scale and whole_count % scale == 0 and whole_count // scale < 1024:
            return f"{whole_count // scale} {prefix}"
    return format_params(count)


def format_params(count: float) -> str:
    """Returns a number of parameters as ``"70.6 B"``: powers of ten, three significant digits."""
    return _scaled(count, "", (*"TBMk", "")).strip()


_SHOWN: dict[str, Callable[[float], str]] = {
    r"bytes_per_s(_per_[a-z]+)?": format_rate,
    r"(peak_flops|flops_per_s)": format_flops,
    r"bytes(_per_[a-z]+)?": format_bytes,
    r"params": format_params,
    r"(?<!per_)s(_lower|_upper)?": format_seconds,
}
"""Pattern of the end of a field's name -> function that formats its numbers; the first pattern that matches counts."""


def shown_by_name(name: str) -> Callable[[float], str] | None:
    """Returns the function that formats a field, by the unit that its name ends with: `format_seconds` for ``step_s``,
    `format_bytes` for ``hbm_bytes_per_chip``; None for names that end in no unit of `_SHOWN`."""
    return next((show for unit_pattern, show in _SHOWN.items() if re.search(f"(^|[_./]){unit_pattern}$", name)), None)
