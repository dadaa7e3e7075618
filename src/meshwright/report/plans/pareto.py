"""Pareto frontiers: plans by step time against memory and, where prices are known, against cost."""

import math
from collections.abc import Sequence

from meshwright.core.units import format_bytes
from meshwright.report.figure import INK, MUTED, PALETTE, Figure, Layer, alt, panel, si_scale, themed
from meshwright.report.marks import Datum, ReferenceLine, labels, log_axis, plot, reference, without_overlaps

PANEL_PX = (430, 320)
LABEL_PX = (16, 13)
LOG_FROM = 5.0
"""Ratio of the longest to the shortest step above which the time axis is logarithmic."""


PlanPoints = Sequence[tuple[float, float, str]]
"""(step time in seconds, memory or cost, label) of each plan; with an empty label a small dot."""


def pareto_figure(
    memory: PlanPoints,
    cost: PlanPoints = (),
    *,
    limit_bytes: float | None = None,
    title: str,
    subtitle: str = "",
) -> Figure:
    """Draws memory (bytes) over step time and, given at least two points, dollars per billion tokens over step time."""
    scale, unit = si_scale(max([limit_bytes or 0.0, *(amount for _, amount, _ in memory)]), "B")
    limit = []
    if limit_bytes is not None:
        text = f"what a chip holds: {format_bytes(limit_bytes)}"
        limit.append(ReferenceLine(axis="y", value=limit_bytes / scale, text=text, at="end", color=MUTED))
    # A step function: between two step times the memory of the faster plan is needed.
    panels = [_panel(memory, scale, f"memory of a chip ({unit})", "step-after", limit)]
    if len(cost) > 1:
        panels.append(_panel(cost, 1.0, "cost of a billion tokens ($)", "linear", []))
    return themed(alt.hconcat(*panels, spacing=36), title, subtitle)


def _panel(points: PlanPoints, scale: float, y_title: str, interpolate: str, limit: Sequence[ReferenceLine]) -> Layer:
    """Draws dots joined by a line, and the limit as a reference line."""
    x_scale, x_unit = si_scale(max(step_s for step_s, _, _ in points), "s")
    rows: list[Datum] = [
        {"x": step_s / x_scale, "y": amount / scale, "text": label} for step_s, amount, label in points
    ]
    top = 1.08 * max([*(line.value for line in limit), *(row["y"] for row in rows)])
    low, high = min(row["x"] for row in rows), max(row["x"] for row in rows)
    log, x_title = high > LOG_FROM * low, f"time per step ({x_unit})"
    if log:
        domain = low / 1.1, high * 1.25
        x = log_axis(alt.X, "x", domain, x_title, grid=False)
    else:
        room = 0.08 * (high - low) or 0.1 * high
        domain = max(0.0, low - room), high + 2 * room
        axis = alt.Axis(tickCount=6, grid=False)
        x = alt.X("x:Q", title=x_title, scale=alt.Scale(domain=list(domain), nice=False), axis=axis)
    y = alt.Y("y:Q", title=y_title, scale=alt.Scale(domain=[0, top], nice=False), axis=alt.Axis(tickCount=6))
    named = [row for row in rows if row["text"]]
    on_axis = math.log if log else float
    left, width = on_axis(domain[0]), on_axis(domain[1]) - on_axis(domain[0])

    def at(row: Datum) -> tuple[float, float]:
        across, up = (on_axis(row["x"]) - left) / width, row["y"] / top
        return across * PANEL_PX[0] / LABEL_PX[0], up * PANEL_PX[1] / LABEL_PX[1]

    legible = without_overlaps(named, at)
    # the number of a plan close below the limit would lie on its line
    close = [
        row for row in legible for line in limit if 0 <= line.value - row["y"] < top * 2 * LABEL_PX[1] / PANEL_PX[1]
    ]
    above = [row for row in legible if row not in close]
    every, chosen = (plot(some).encode(x=x, y=y) for some in (rows, named))
    return panel(
        every.mark_line(interpolate=interpolate, strokeWidth=1.5, color=PALETTE[0], opacity=0.6),
        every.mark_circle(size=26, opacity=1, color=PALETTE[4]),
        chosen.mark_circle(size=60, opacity=1, color=PALETTE[0]),
        *map(reference, limit),
        labels(above, x, y, align="left", baseline="bottom", dx=5, dy=-4, fill=INK),
        labels(close, x, y, align="left", baseline="top", dx=5, dy=4, fill=INK),
        size=PANEL_PX,
    )
