"""Curves on two logarithmic axes, such as the rate of a product over its batch size."""

from collections.abc import Mapping, Sequence

from meshwright.core.errors import InputError
from meshwright.report.figure import Figure, alt, themed
from meshwright.report.marks import (
    WHOLE_NUMBERS,
    Points,
    ReferenceLine,
    check_positive,
    lines,
    log_axis,
    reference,
    stroke_colors,
)


def curves_figure(
    curves: Mapping[str, Points],
    *,
    x_title: str,
    y_title: str,
    title: str,
    subtitle: str = "",
    references: Sequence[ReferenceLine] = (),
    x_ticks: Sequence[float] = (),
) -> Figure:
    """Draws all curves with a legend, and dashed reference lines.

    ``x_ticks`` are whole numbers that label the horizontal axis in place of powers of ten.
    """
    if not curves or not all(curves.values()):
        raise InputError("there is no curve, or one without points. Give each curve at least one point.")
    check_positive((name, value) for name, points in curves.items() for point in points for value in point)
    xs = [x for points in curves.values() for x, _ in points]
    ys = [y for points in curves.values() for _, y in points]
    ys += [line.value for line in references if line.axis == "y"]
    low, high = min(xs), max(xs)
    ticks = {"values": sorted({*x_ticks}), "labelExpr": WHOLE_NUMBERS, "labelOverlap": True, "labelFlush": False}
    x = log_axis(alt.X, "x", (low, high) if low < high else (low / 2, high * 2), x_title, **(ticks if x_ticks else {}))
    y = log_axis(alt.Y, "y", (min(ys) / 1.5, max(ys) * 1.5), y_title)
    color = stroke_colors(curves, orient="right", symbolStrokeWidth=3)
    layers = [*lines(curves, x, y, color, strokeWidth=2.4, point={"size": 28}), *map(reference, references)]
    return themed(alt.layer(*layers), title, subtitle, width=620, height=380)
