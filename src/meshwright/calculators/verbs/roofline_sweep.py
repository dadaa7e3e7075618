"""`meshwright roofline --sweep`: one product in many sizes: intensity, rate, what binds, and the plot of the rates."""

import bisect
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from meshwright.calculators.chips.local_op import LocalOp
from meshwright.cli.fields import dim_sizes, split_values
from meshwright.cli.output import four_digits
from meshwright.cli.sweeps.fields import combinations
from meshwright.core.errors import InputError
from meshwright.core.units import format_flops
from meshwright.cost.formulas.roofline import Roofline
from meshwright.report.answer import Answer, Facts, Table
from meshwright.spec.chip import Chip

SweptSizes = dict[str, int]
"""Dim -> its size."""
Sweep = Sequence[SweptSizes]
"""Sizes of one or several dims that change together, in order."""
SweptLines = Sequence[tuple[SweptSizes, Roofline]]
"""The roofline of each combination of swept sizes."""


def parse_sweep(text: str) -> Sweep:
    """Parses ``"B=1,16,256"``, ``"B=1..4096"`` (doubling) and ``"D,F=1024,4096"`` (D = F); sizes such as 4Ki."""
    dims = text.partition("=")[0].split(",")
    size_texts = split_values(text, what="--sweep", form="dims=sizes")
    return [dim_sizes(",".join(f"{dim}={size_text}" for dim in dims), "--sweep") for size_text in size_texts]


def sweep_points(
    price: Callable[[SweptSizes], Roofline], dims: Iterable[str], sizes: SweptSizes, sweeps: Sequence[Sweep]
) -> SweptLines:
    """Returns every combination of swept sizes with its roofline, the first sweep running fastest.

    Raises InputError for a dim that is not one of the product's ``dims`` or is given twice, and for too many points.
    """
    swept_dims = [dim for sweep in sweeps for dim in sweep[0]]
    for dim in swept_dims:
        if dim not in dims:
            raise InputError(f"--sweep {dim}: the product has no such dim. Choose of {', '.join(dims)}.")
        if swept_dims.count(dim) > 1 or dim in sizes:
            raise InputError(f"dim {dim} is given twice. Leave it out of --dims, or of one --sweep.")
    swept_fields = {",".join(sweep[0]): {str(sizes): sizes for sizes in sweep} for sweep in reversed(sweeps)}
    points = (values.values() for _, values in combinations(swept_fields))
    sizes_of_points = [{dim: size for part in reversed(parts) for dim, size in part.items()} for parts in points]
    return [(point_sizes, price(point_sizes)) for point_sizes in sizes_of_points]


def with_knees(price: Callable[[SweptSizes], Roofline], points: SweptLines, along: Sweep) -> SweptLines:
    """Returns the points of curves along the first sweep and, between two of them, the first size that another bound
    binds: that point leaves out tiles that are not whole, which would put it below the curve."""
    dims, drawn_points = tuple(along[0]), list(points[:1])

    def whole(size: int, point_sizes: SweptSizes) -> tuple[SweptSizes, Roofline]:
        sizes = {**point_sizes, **dict.fromkeys(dims, size)}
        return sizes, replace(price(sizes), padding=1.0)

    def binds_as_there(size: int, there: SweptSizes) -> bool:
        return whole(size, there)[1].bound_by == whole(there[dims[0]], there)[1].bound_by

    for (low_sizes, _), (high_sizes, high_line) in itertools.pairwise(points):
        sizes_between = range(low_sizes[dims[0]], high_sizes[dims[0]])
        first_index = bisect.bisect(sizes_between, 0, key=partial(binds_as_there, there=high_sizes))
        drawn_points += [whole(sizes_between[first_index], high_sizes)] if 0 < first_index < len(sizes_between) else []
        drawn_points.append((high_sizes, high_line))
    return drawn_points


RATE_COLUMNS: Facts = {
    "FLOPs/byte": ("intensity", four_digits),
    "time": "time_s_lower",
    "rate": "flops_per_s",
    "of peak": ("share_of_peak", lambda share: f"{share:.0%}"),
    "bound by": "bound_by",
}


def sweep_answer(op: LocalOp, unit: Chip, given: Any, sizes: SweptSizes, sweeps: Sequence[Sweep]) -> Answer:
    """Returns a table of the swept points, and a picture of their rates."""

    def price(swept_sizes: SweptSizes) -> Roofline:
        return op.roofline(unit, {**sizes, **swept_sizes}, given.channel)

    points, dtype = sweep_points(price, op.dims, sizes, sweeps), op.dtype(unit)
    title = f"{given.product} on {unit.name}"
    rows = [
        {
            "sizes": sizes,
            "intensity": roof.work.intensity,
            "time_s_lower": roof.lower_s,
            "time_s_upper": roof.upper_s,
            "flops_per_s": roof.reached_flops_per_s,
            "share_of_peak": roof.reached_flops_per_s / roof.peak_flops,
            "bound_by": roof.bound_by,
        }
        for sizes, roof in points
    ]
    first_roof = points[0][1]
    facts = {
        "chip": unit.name,
        "channel": given.channel,
        "compute_dtype": dtype,
        "peak_flops": first_roof.peak_flops,
        "bytes_per_s": first_roof.bytes_per_s,
        "points": rows,
    }
    columns = {" = ".join(sweep[0]): (f"sizes/{next(iter(sweep[0]))}", "{:,}".format) for sweep in sweeps}
    table = Table.of(rows, {**columns, **RATE_COLUMNS}, f"{title} in {dtype}")
    return Answer(
        facts, [table], {given.png: lambda: _figure(title, unit, sweeps, with_knees(price, points, sweeps[0]))}
    )


def _figure(title: str, unit: Chip, sweeps: Sequence[Sweep], points: SweptLines) -> Any:
    """Returns FLOP/s against the first sweep, one curve for each combination of further sweeps, and the peak."""
    from meshwright.report.marks import ReferenceLine
    from meshwright.report.sweeps import curves_figure

    first_sweep, *others = sweeps
    curves: dict[str, list[tuple[float, float]]] = {}
    for sizes, roof in points:
        label = ", ".join(f"{' = '.join(sweep[0])} = {sizes[next(iter(sweep[0]))]:,}" for sweep in others) or unit.name
        curves.setdefault(label, []).append((float(sizes[next(iter(first_sweep[0]))]), float(roof.reached_flops_per_s)))
    peak_flops = points[0][1].peak_flops
    return curves_figure(
        curves,
        x_title=" = ".join(first_sweep[0]),
        y_title="rate (FLOP/s)",
        title=title,
        subtitle="The rate that a roofline allows, perfect overlap.",
        references=[ReferenceLine(axis="y", value=float(peak_flops), text=f"peak {format_flops(peak_flops)}")],
    )
