"""Prints answers, as one JSON object or as text as wide as the terminal, and messages on standard error."""

import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

from meshwright.cli.progress import erase_progress
from meshwright.core.errors import InputError
from meshwright.core.units import LONG_S, counted, format_flops, format_seconds
from meshwright.report.answer import Fact, Piece, Symbols, Table, as_markdown, unfolded

RENAMED: dict[str, tuple[str, str]] = {}
"""Old key of `--json` -> (its name now, the version that no longer prints the old one), see docs/api.md."""

START_LOAD = os.getloadavg()[0]
"""Load average of the minute before this process began."""


def emit_json(value: Mapping[str, Any]) -> None:
    """Prints one JSON object on standard output; values that are unknown or not finite are null."""
    encoded = msgspec.json.encode(value, enc_hook=_plain)
    click.echo((msgspec.json.encode(_with_old_keys(msgspec.json.decode(encoded))) if RENAMED else encoded).decode())


def _with_old_keys(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_old_keys(item) for item in value]
    if not isinstance(value, dict):
        return value
    old = {key: value[new] for key, (new, _) in RENAMED.items() if new in value}
    return {key: _with_old_keys(item) for key, item in (value | old).items()}


def _plain(value: Any) -> Any:
    """Converts paths, mappings, and NumPy's numbers and arrays, which msgspec does not know."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise NotImplementedError(f"{type(value).__name__} has no form in JSON.")


def say(message: str) -> None:
    """Prints a message on standard error, in place of the progress line."""
    erase_progress()
    click.echo(message, err=True)


def save_to(path: Path, save: Callable[[Path], None]) -> None:
    """Writes a plan by ``save(path)`` and prints the path. Raises InputError if the file cannot be written."""
    try:
        save(path)
    except OSError as error:
        raise InputError(f"cannot write the plan to {path}: {error.strerror}. Name a file in your folder.") from None
    say(f"wrote {path}")


def busy_words(load: float | None = None) -> list[str]:
    """Returns that measured times are too long, if the ``load`` before measuring (by default `START_LOAD`) was above
    half of the cores; else []."""
    load, num_cores = START_LOAD if load is None else load, os.cpu_count() or 1
    cores_text = counted(num_cores, "core")
    return [f"measured at load {load:.1f} on {cores_text}: times are too long"] * (load > num_cores / 2)


def width() -> int:
    """Returns the columns to print in: the terminal's, 80 without one, at most 120."""
    return min(shutil.get_terminal_size((80, 24)).columns, 120)


def or_dash(value: Any, show: Callable[[Any], str]) -> str:
    """Returns ``show(value)``, or a dash for None."""
    return "-" if value is None else show(value)


def format_range(lower: float, upper: float) -> str:
    """Returns ``"0.54-1.17 s"``: two times in one unit, with the decimals of the upper one's three digits."""
    if not math.isfinite(upper):
        return f"{format_seconds(lower)} or more"
    unit = format_seconds(upper).split()[1]
    low, high = (
        value / _SECONDS[unit if unit in ("ms", "us", "ns") else unit.rstrip("s") or "s"] for value in (lower, upper)
    )
    decimals = 2 if high < 10 else 1 if high < 100 else 0
    return f"{low:.{decimals}f}-{high:.{decimals}f} {unit}"


_SECONDS = {**{unit: size for unit, (size, _) in LONG_S.items()}, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def three_digits(value: float) -> str:
    """Returns ``"80.1"``, ``"11,574"``: at least three digits, and no power of ten for large numbers."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def four_digits(value: float) -> str:
    """Returns ``"0.3333"``, ``"243.2"``, ``"26,214"``: at least four digits, and no power of ten for large numbers."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def format_power(watts: float) -> str:
    """Returns ``"700 W"``, ``"5.6 kW"``, ``"1.43 MW"``."""
    return format_flops(watts, unit="W") if watts >= 1e6 or watts < 1e3 else f"{watts / 1e3:.3g} kW"


def format_energy(kwh: float) -> str:
    """Returns ``"134 kWh"``, ``"34.4 MWh"``, ``"1.2 GWh"``."""
    return format_flops(kwh * 1e3, unit="Wh") if kwh >= 1e3 else f"{kwh:.3g} kWh"


def format_flop_count(flops: float) -> str:
    """Returns ``"459 TFLOP"``, an amount of work; whole numbers below a million in full, ``"80,640 FLOP"``."""
    is_exact = flops < 1e6 and flops == int(flops)
    return f"{int(flops):,} FLOP" if is_exact else format_flops(flops, unit="FLOP")


def answer_markdown(pieces: Iterable[Piece]) -> Iterator[str]:
    """Yields every block in GitHub-flavoured Markdown; text drawings stay as they are."""
    for piece in unfolded(pieces):
        if isinstance(piece, Table):
            yield as_markdown(piece)
            continue
        if isinstance(piece, Symbols):
            piece = ", ".join(f"{name} {meaning}" for name, meaning in piece.meanings.items())
        text = piece if isinstance(piece, str) else piece.text
        label = f"{piece.label.strip()}: " if isinstance(piece, Fact) and piece.label.strip() else ""
        if stripped_text := text.strip():
            yield f"```text\n{text}\n```\n" if "\n" in stripped_text else f"{label}{stripped_text}\n"
