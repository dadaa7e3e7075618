"""`meshwright roofline --sweep`: one product in many sizes: intensity, rate, what binds, and the plot of the rates."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from meshwright.core.errors import InputError
from meshwright.core.units import format_flops, format_seconds, parse_count
from meshwright.cost.formulas.roofline import Channel, Operand, Roofline, chip_roofline, einsum_work
from meshwright.report.answer import Answer, Table
from meshwright.spec.chip import Chip

MAX_POINTS = 400
MAX_DIM = 10**15


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """Dims that take the same sizes together, one after the other."""

    dims: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def name(self) -> str:
        """``"D = F"``."""
        return " = ".join(self.dims)


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One combination of sizes: that of each sweep, and its roofline."""

    chosen: tuple[int, ...]
    line: Roofline


def parse_sweep(text: str) -> Sweep:
    """``"B=1,16,256"``, ``"B=1..4096"`` (doubling), ``"D,F=1024,4096"`` (both alike); sizes such as 4Ki are read."""
    names, sep, values = text.partition("=")
    dims = tuple(name.strip() for name in names.split(","))
    if not sep or not all(dims) or not values.strip():
        raise InputError(f"--sweep {text!r} is not dims=sizes. Write B=1,16,256, B=1..4096 or D,F=1024,4096.")
    first, dots, last = values.partition("..")
    if dots:
        low, high = (_size(part, text) for part in (first, last))
        sizes = tuple(itertools.takewhile(lambda size: size <= high, (low * 2**n for n in range(64))))
    else:
        sizes = tuple(_size(part, text) for part in values.split(","))
    if not sizes:
        raise InputError(f"--sweep {text!r} ends before it begins. Write the smaller size first.")
    return Sweep(dims=dims, sizes=sizes)


def _size(text: str, whole: str) -> int:
    size = parse_count(text.strip(), what=f"size of --sweep {whole}")
    if not 1 <= size <= MAX_DIM:
        raise InputError(f"--sweep {whole!r}: {text.strip()} must be between 1 and {MAX_DIM:.0e}.")
    return size


def sweep_points(
    operands: Sequence[Operand],
    out: Operand,
    sizes: dict[str, int],
    sweeps: Sequence[Sweep],
    *,
    unit: Chip,
    dtype: str,
    channel: Channel,
) -> list[Point]:
    """The roofline of every combination, the first sweep running fastest."""
    _refuse(operands, sizes, sweeps)
    found = []
    for back in itertools.product(*(one.sizes for one in reversed(sweeps))):
        chosen = tuple(reversed(back))
        given = {dim: size for one, size in zip(sweeps, chosen, strict=True) for dim in one.dims}
        line = chip_roofline(einsum_work(operands, out, sizes | given), unit, dtype=dtype, channel=channel)
        found.append(Point(chosen=chosen, line=line))
    return found


def _refuse(operands: Sequence[Operand], sizes: dict[str, int], sweeps: Sequence[Sweep]) -> None:
    dims = [dim for one in sweeps for dim in one.dims]
    known = dict.fromkeys(dim for operand in operands for dim in operand.dims)
    for dim in dims:
        if dim not in known:
            raise InputError(f"--sweep {dim}: the product has no such dim. Choose of {', '.join(known)}.")
        if dims.count(dim) > 1 or dim in sizes:
            raise InputError(f"dim {dim} is given twice. Leave it out of --dims, or of one --sweep.")
    count = 1
    for one in sweeps:
        count *= len(one.sizes)
    if count > MAX_POINTS:
        raise InputError(f"{count:,} combinations are too many to read. Give at most {MAX_POINTS}.")


RATE_COLUMNS: dict[str, Any] = {
    "FLOPs/byte": ("intensity", lambda value: f"{value:,.4g}"),
    "time": ("time_s_lower", format_seconds),
    "rate": ("flops_per_s", format_flops),
    "of peak": ("share_of_peak", lambda share: f"{share:.0%}"),
    "bound by": "bound_by",
}


def sweep_answer(
    title: str, unit: Chip, given: Any, dtype: str, sweeps: Sequence[Sweep], points: Sequence[Point]
) -> Answer:
    """The points as a table, and their rates as curves."""
    rows = [
        {
            "sizes": {dim: size for one, size in zip(sweeps, p.chosen, strict=True) for dim in one.dims},
            "intensity": p.line.work.intensity,
            "time_s_lower": p.line.lower_s,
            "time_s_upper": p.line.upper_s,
            "flops_per_s": p.line.reached_flops_per_s,
            "share_of_peak": p.line.reached_flops_per_s / p.line.peak_flops,
            "bound_by": p.line.bound_by,
        }
        for p in points
    ]
    first = points[0].line
    facts = {
        "chip": unit.name,
        "channel": given.channel,
        "compute_dtype": dtype,
        "peak_flops": first.peak_flops,
        "bytes_per_s": first.bytes_per_s,
        "points": rows,
        **drawn(given.png),
    }
    sizes = {one.name: (one.dims[0], "{:,}".format) for one in sweeps}
    table = Table.of([{**row["sizes"], **row} for row in rows], {**sizes, **RATE_COLUMNS}, f"{title} in {dtype}")
    return Answer(facts, [table], {given.png: lambda: _figure(title, unit, sweeps, points)})


def drawn(png: Path | None) -> dict[str, str]:
    """What JSON says of a picture."""
    return {} if png is None else {"png": str(png)}


def _figure(title: str, unit: Chip, sweeps: Sequence[Sweep], points: Sequence[Point]) -> Any:
    """FLOP/s against the first sweep, a curve for each choice of the others, and the peak."""
    from meshwright.report.curves import Curve, Mark, curves_figure

    grouped: dict[tuple[int, ...], list[Point]] = {}
    for point in points:
        grouped.setdefault(point.chosen[1:], []).append(point)
    curves = [
        Curve(
            name=", ".join(f"{one.name} = {size:,}" for one, size in zip(sweeps[1:], others, strict=True)) or unit.name,
            x=tuple(float(p.chosen[0]) for p in group),
            y=tuple(float(p.line.reached_flops_per_s) for p in group),
        )
        for others, group in grouped.items()
    ]
    top = points[0].line.peak_flops
    return curves_figure(
        curves,
        x_title=sweeps[0].name,
        y_title="rate (FLOP/s)",
        title=title,
        subtitle="The rate that a roofline allows, perfect overlap.",
        marks=[Mark(axis="y", value=float(top), text=f"peak {format_flops(top)}")],
    )
