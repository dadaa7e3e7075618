"""Pictures of a server under load: measured dots over predicted curves."""

from collections.abc import Mapping, Sequence

from meshwright.report.figure import MUTED, PALETTE, Figure, Layer, alt, panel, si_scale, themed
from meshwright.report.marks import DASHES, Points, color_by, lines, log_axis, plot

PANEL_PX = (250, 230)
LOG_FROM = 8
"""Ratio of the largest to the smallest value above which the axis of a panel with a unit is logarithmic."""


def load_figure(
    panels: Mapping[str, tuple[str, Points, Points]],
    *,
    capacity: float | None = None,
    x: str = "requests offered a second",
    title: str,
    subtitle: str = "",
) -> Figure:
    """Draws a panel for each entry of ``panels``: title -> (unit, predicted points, measured points).

    The horizontal axis of every panel is titled ``x`` and has a dashed line at ``capacity``. ``{}`` in a title becomes
    the unit with its prefix.
    """
    load_panels = [_panel(name, curves_of_panel, capacity, x) for name, curves_of_panel in panels.items()]
    return themed(alt.hconcat(*load_panels, spacing=28), title, subtitle)


def _panel(title_format: str, panel_data: tuple[str, Points, Points], capacity: float | None, x_title: str) -> Layer:
    unit, predicted_points, measured_points = panel_data
    positive_ys = [y for _, y in (*predicted_points, *measured_points) if y == y and y > 0] or [1.0]
    scale, unit_name = si_scale(max(positive_ys), unit) if unit else (1.0, "")
    min_y, max_y, title = min(positive_ys) / scale / 1.3, max(positive_ys) / scale * 1.3, title_format.format(unit_name)
    is_whole = all(float(x).is_integer() for x, _ in (*predicted_points, *measured_points))
    ticks = {"tickMinStep": 1} if is_whole else {}
    x = alt.X("x:Q", title=x_title, scale=alt.Scale(zero=True), axis=alt.Axis(grid=False, format="~g", **ticks))
    y = alt.Y("y:Q", title=title, scale=alt.Scale(zero=True), axis=alt.Axis(tickCount=5))
    if unit and max_y > LOG_FROM * min_y:
        y = log_axis(alt.Y, "y", (min_y, max_y), title)
    color = color_by("name", {"predicted": PALETTE[0], "measured": PALETTE[5]}, orient="top", symbolType="circle")
    layers = lines({"predicted": _scaled(predicted_points, scale)}, x, y, color) if predicted_points else []
    measured_rows = [{"x": a, "y": b, "name": "measured"} for a, b in _scaled(measured_points, scale) if b == b]
    layers.append(plot(measured_rows).mark_point(filled=True, size=70, opacity=1).encode(x=x, y=y, color=color))
    if capacity is not None:
        rule = plot([{"x": capacity}]).mark_rule(strokeDash=DASHES, color=MUTED).encode(x="x:Q")
        layers.insert(0, rule)
    return panel(*layers, size=PANEL_PX)


def _scaled(points: Points, scale: float) -> Sequence[tuple[float, float]]:
    return [(x, y / scale) for x, y in points]
