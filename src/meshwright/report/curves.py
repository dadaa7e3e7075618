"""Curves over one number: the rate of a product against its batch, the cost of a block against the context."""

import math
from collections.abc import Sequence

from meshwright.core.errors import InputError
from meshwright.report.figure import Spec, alt, themed
from meshwright.report.marks import WHOLE_NUMBERS, Curve, Mark, lines, log_axis, reference, stroke_colors

__all__ = ["Curve", "Mark", "curves_figure"]


def curves_figure(
    curves: Sequence[Curve],
    *,
    x_title: str,
    y_title: str,
    title: str,
    subtitle: str = "",
    marks: Sequence[Mark] = (),
    x_ticks: Sequence[float] = (),
) -> Spec:
    """All curves on two logarithmic axes with a legend, and dashed marks on either axis.

    ``x_ticks`` are whole numbers that label the horizontal axis instead of powers of ten.
    """
    _check(curves)
    low, high = min(min(curve.x) for curve in curves), max(max(curve.x) for curve in curves)
    ys = [y for curve in curves for y in curve.y] + [mark.value for mark in marks if mark.axis == "y"]
    ticks = {"values": sorted({*x_ticks}), "labelExpr": WHOLE_NUMBERS, "labelOverlap": True, "labelFlush": False}
    x = log_axis(alt.X, "x", (low, high) if low < high else (low / 2, high * 2), x_title, **(ticks if x_ticks else {}))
    y = log_axis(alt.Y, "y", (min(ys) / 1.5, max(ys) * 1.5), y_title)
    color = stroke_colors(curves, orient="right", symbolStrokeWidth=3)
    layers = [*lines(curves, x, y, color, strokeWidth=2.4, point={"size": 28}), *map(reference, marks)]
    return themed(alt.layer(*layers), title, subtitle, width=620, height=380)


def _check(curves: Sequence[Curve]) -> None:
    if not curves or not all(curve.x for curve in curves):
        raise InputError("There is no curve to draw. Give at least one point.")
    for curve in curves:
        if len(curve.x) != len(curve.y):
            raise InputError(f"{curve.name}: {len(curve.x)} places do not go with {len(curve.y)} values.")
        bad = [value for value in (*curve.x, *curve.y) if not (math.isfinite(value) and value > 0)]
        if bad:
            raise InputError(f"{curve.name}: {bad[0]:g} cannot be drawn on a logarithmic axis. Give positive numbers.")
