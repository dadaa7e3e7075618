"""Frontiers: plans by step time against memory or cost, services by tokens per second over the time per token."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from meshwright.core.units import format_bytes
from meshwright.report import marks
from meshwright.report.figure import INK, MUTED, PALETTE, Figure, Layer, alt, panel, si_scale, themed
from meshwright.report.labels import Frame, point_labels, reference

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
    limit_lines = []
    if limit_bytes is not None:
        text = f"what a chip holds: {format_bytes(limit_bytes)}"
        limit_lines.append(marks.ReferenceLine(axis="y", value=limit_bytes / scale, text=text, at="end", color=MUTED))
    # A step function: between two step times the memory of the faster plan is needed.
    panels = [_panel(memory, scale, f"memory of a chip ({unit})", "step-after", limit_lines)]
    if len(cost) > 1:
        panels.append(_panel(cost, 1.0, "cost of a billion tokens ($)", "linear", []))
    return themed(alt.hconcat(*panels, spacing=36), title, subtitle)


def _panel(
    points: PlanPoints, scale: float, y_title: str, interpolate: str, limits: Sequence[marks.ReferenceLine]
) -> Layer:
    """Draws dots joined by a line, and the limit as a reference line."""
    x_scale, x_unit = si_scale(max(step_s for step_s, _, _ in points), "s")
    rows: list[marks.Datum] = [
        {"x": step_s / x_scale, "y": amount / scale, "text": label} for step_s, amount, label in points
    ]
    xs, ys = (sorted(row[axis] for row in rows) for axis in "xy")
    margin = 0.08 * (xs[-1] - xs[0]) or 0.1 * xs[-1]
    min_x, max_x = max(0.0, xs[0] - margin), xs[-1] + 2 * margin
    x = _Axis(alt.X, "x", xs, (min_x, max_x), f"time per step ({x_unit})")
    max_y = max([ys[-1], *(line.value for line in limits)])
    y = _Axis(alt.Y, "y", [*ys, max_y], (0, 1.08 * max_y), y_title)

    frame = Frame(x=x.domain, y=y.domain, size=PANEL_PX, log=(x.log, y.log))
    labelled_rows = [row for row in rows if row["text"]]
    # a step function keeps the memory of the faster plan up to the time of the slower one
    corners = [(row["x"], row["y"]) for row in rows]
    if interpolate == "step-after":
        corners = [corners[0], *(corner for a, b in pairwise(corners) for corner in ((b[0], a[1]), b))]
    areas = [*frame.curve(corners), *frame.dots([(row["x"], row["y"]) for row in rows], half=4)]
    all_points, labelled_dots = (marks.plot(dots).encode(x=x.drawn, y=y.drawn) for dots in (rows, labelled_rows))
    return panel(
        all_points.mark_line(interpolate=interpolate, strokeWidth=1.5, color=PALETTE[0], opacity=0.6),
        *(reference(line, frame, areas) for line in limits),
        point_labels(labelled_rows, frame, areas, fill=INK),
        all_points.mark_circle(size=26, opacity=1, color=PALETTE[4]),
        labelled_dots.mark_circle(size=60, opacity=1, color=PALETTE[0]),
        size=PANEL_PX,
    )


class _Axis:
    """An axis over sorted values; it is logarithmic if the last is over `LOG_FROM` times the first."""

    def __init__(self, channel: Any, field: str, values: Sequence[float], linear: tuple[float, float], title: str):
        is_log = values[-1] > LOG_FROM * values[0]
        self.domain = (values[0] / 1.25, values[-1] * 1.25) if is_log else linear
        self.log = is_log
        scale, axis = alt.Scale(domain=list(self.domain), nice=False), alt.Axis(tickCount=6, grid=field == "y")
        self.drawn = channel(f"{field}:Q", title=title, scale=scale, axis=axis)
        if is_log:
            self.drawn = marks.log_axis(channel, field, self.domain, title, grid=field == "y")


SIZE_PX = (620, 340)
SPLIT_PX = (620, 240)
WHOLE = "time per output token"


def services_figure(
    curves: Mapping[str, marks.Points],
    split: Mapping[str, marks.Points],
    chosen: tuple[float, float, str],
    *,
    title: str,
    subtitle: str = "",
) -> Figure:
    """Draws a curve of (ms per token, tokens per second and chip) for each pair of dtypes, with the chosen point and
    its name, and below the parts of the time along the best of all curves, (ms per token, ms) each by itself.

    Parts overlap in time, so that they do not add up; those that take nothing are left out.
    """
    x, y, point_name = chosen
    marks.check_positive((curve, value) for curve, points in curves.items() for point in points for value in point)
    all_ms = [x, *(ms for points in curves.values() for ms, _ in points)]
    all_rates = [y, *(rate for points in curves.values() for _, rate in points)]
    low_ms, high_ms = min(all_ms), max(all_ms)
    ms_range = (low_ms / 1.05, high_ms * 1.05)
    ms_axis = marks.log_axis(alt.X, "x", ms_range, WHOLE + " (ms)")
    y_range = (min(all_rates) / 1.5, max(all_rates) * 1.5)
    rate_axis = marks.log_axis(alt.Y, "y", y_range, "output tokens per second and chip")
    style = {"strokeWidth": 2.4, "point": {"size": 28}}
    rows = [{"x": x, "y": y, "text": point_name}]
    chosen_mark = (
        marks.plot(rows).mark_point(size=170, color=INK, strokeWidth=2.4, opacity=1).encode(x=ms_axis, y=rate_axis)
    )
    frame = Frame(x=ms_range, y=y_range, size=SIZE_PX)
    areas = [box for points in curves.values() for box in (*frame.curve(points), *frame.dots(points, half=4))]
    chosen_label = point_labels(rows, frame, [*areas, *frame.dots([(x, y)], half=9)], fill=INK)
    legend = {"orient": "right", "symbolStrokeWidth": 3}
    rate_lines = marks.lines(curves, ms_axis, rate_axis, marks.stroke_colors(curves, **legend), **style)
    curve_of = {WHOLE: [(ms, ms) for ms in sorted({ms for points in split.values() for ms, _ in points})]}
    # a logarithmic axis has no zero: parts below a thousandth of the time are not seen
    visible = {part: [(ms, s if s > ms / 1000 else float("nan")) for ms, s in points] for part, points in split.items()}
    curve_of |= {part: points for part, points in visible.items() if any(s == s for _, s in points)}
    min_ms = min(s for points in curve_of.values() for _, s in points if s == s)
    part_axis = marks.log_axis(alt.Y, "y", (min_ms / 1.3, high_ms * 1.3), "ms of each part by itself")
    color_of = {WHOLE: INK, **marks.palette_of(part for part in curve_of if part != WHOLE)}
    part_lines = marks.lines(
        curve_of, ms_axis, part_axis, marks.color_by("name", color_of, symbolType="stroke", **legend), **style
    )
    panels = (panel(*rate_lines, chosen_mark, chosen_label, size=SIZE_PX), panel(*part_lines, size=SPLIT_PX))
    return themed(alt.concat(*panels, columns=1, spacing=28).resolve_scale(color="independent"), title, subtitle)
