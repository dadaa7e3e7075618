"""Pareto frontiers: plans by step time against memory and, where prices are known, against cost."""

import math
from collections.abc import Sequence
from typing import Any

from meshwright.core.units import format_bytes
from meshwright.report.figure import INK, MUTED, PALETTE, Figure, Layer, alt, panel, si_scale, themed
from meshwright.report.marks import Datum, ReferenceLine, labels, log_axis, plot, reference, without_overlaps

PANEL_PX = (430, 320)
LABEL_PX = (16, 13)
LOG_FROM = 5.0
"""Ratio of the largest to the smallest figure above which an axis is logarithmic."""


PlanPoints = Sequence[tuple[float, float, str]]
"""(step time in seconds, memory or cost, label) of each plan, fastest first; with an empty label a small dot."""


def pareto_figure(
    memory: PlanPoints,
    cost: PlanPoints = (),
    *,
    limit_bytes: float | None = None,
    title: str,
    subtitle: str = "",
) -> Figure:
    """Draws memory (bytes) over step time and, if ``cost`` has several points, dollars per billion tokens over it."""
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
    across, up = (sorted(row[axis] for row in rows) for axis in "xy")
    room = 0.08 * (across[-1] - across[0]) or 0.1 * across[-1]
    low, high = max(0.0, across[0] - room), across[-1] + 2 * room
    x = _Axis(alt.X, "x", across, (low, high), f"time per step ({x_unit})")
    top = max([up[-1], *(line.value for line in limit)])
    y = _Axis(alt.Y, "y", [*up, top], (0, 1.08 * top), y_title)

    def at(row: Datum) -> tuple[float, float]:
        return x.share(row["x"]) * PANEL_PX[0] / LABEL_PX[0], y.share(row["y"]) * PANEL_PX[1] / LABEL_PX[1]

    named = [row for row in rows if row["text"]]
    right = without_overlaps(named, at)
    left = without_overlaps([row for row in named if row not in right], at)
    # The label of a plan close below the limit would overlap the limit's line.
    near = 2 * LABEL_PX[1] / PANEL_PX[1]
    close = [row for row in right for line in limit if 0 <= y.share(line.value) - y.share(row["y"]) < near]
    above = [row for row in right if row not in close]
    every, chosen = (plot(some).encode(x=x.drawn, y=y.drawn) for some in (rows, named))
    return panel(
        every.mark_line(interpolate=interpolate, strokeWidth=1.5, color=PALETTE[0], opacity=0.6),
        every.mark_circle(size=26, opacity=1, color=PALETTE[4]),
        chosen.mark_circle(size=60, opacity=1, color=PALETTE[0]),
        *map(reference, limit),
        labels(above, x.drawn, y.drawn, align="left", baseline="bottom", dx=5, dy=-4, fill=INK),
        labels(close, x.drawn, y.drawn, align="left", baseline="top", dx=5, dy=4, fill=INK),
        labels(left, x.drawn, y.drawn, align="right", baseline="top", dx=-5, dy=2, fill=INK),
        size=PANEL_PX,
    )


class _Axis:
    """An axis over sorted values; it is logarithmic if the last is over `LOG_FROM` times the first."""

    def __init__(self, channel: Any, field: str, values: Sequence[float], linear: tuple[float, float], title: str):
        log = values[-1] > LOG_FROM * values[0]
        self.domain = (values[0] / 1.25, values[-1] * 1.25) if log else linear
        self.scale = math.log if log else float
        scale, axis = alt.Scale(domain=list(self.domain), nice=False), alt.Axis(tickCount=6, grid=field == "y")
        self.drawn = channel(f"{field}:Q", title=title, scale=scale, axis=axis)
        if log:
            self.drawn = log_axis(channel, field, self.domain, title, grid=field == "y")

    def share(self, value: float) -> float:
        """Returns where the value is on the axis, from 0 to 1."""
        low, high, at = (self.scale(one) for one in (*self.domain, value))
        return (at - low) / (high - low)
