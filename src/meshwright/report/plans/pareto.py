"""Pareto frontiers: plans by step time against memory and, where prices are known, against cost."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from meshwright.core.units import format_bytes
from meshwright.report.figure import INK, MUTED, PALETTE, Figure, Layer, alt, panel, si_scale, themed
from meshwright.report.labels import Frame, point_labels, reference
from meshwright.report.marks import Datum, ReferenceLine, log_axis, plot

PANEL_PX = (430, 320)
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

    frame = Frame(x=x.domain, y=y.domain, size=PANEL_PX, log=(x.log, y.log))
    named = [row for row in rows if row["text"]]
    # a step function keeps the memory of the faster plan up to the time of the slower one
    corners = [(row["x"], row["y"]) for row in rows]
    if interpolate == "step-after":
        corners = [corners[0], *(at for a, b in pairwise(corners) for at in ((b[0], a[1]), b))]
    taken = [*frame.curve(corners), *frame.dots([(row["x"], row["y"]) for row in rows], half=4)]
    every, chosen = (plot(some).encode(x=x.drawn, y=y.drawn) for some in (rows, named))
    return panel(
        every.mark_line(interpolate=interpolate, strokeWidth=1.5, color=PALETTE[0], opacity=0.6),
        *(reference(line, frame, taken) for line in limit),
        point_labels(named, frame, taken, fill=INK),
        every.mark_circle(size=26, opacity=1, color=PALETTE[4]),
        chosen.mark_circle(size=60, opacity=1, color=PALETTE[0]),
        size=PANEL_PX,
    )


class _Axis:
    """An axis over sorted values; it is logarithmic if the last is over `LOG_FROM` times the first."""

    def __init__(self, channel: Any, field: str, values: Sequence[float], linear: tuple[float, float], title: str):
        log = values[-1] > LOG_FROM * values[0]
        self.domain = (values[0] / 1.25, values[-1] * 1.25) if log else linear
        self.log = log
        scale, axis = alt.Scale(domain=list(self.domain), nice=False), alt.Axis(tickCount=6, grid=field == "y")
        self.drawn = channel(f"{field}:Q", title=title, scale=scale, axis=axis)
        if log:
            self.drawn = log_axis(channel, field, self.domain, title, grid=field == "y")
