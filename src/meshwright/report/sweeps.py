"""Pictures of sweeps: curves over chips, a field or two logarithmic axes, and heatmaps of best plans."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from meshwright.core.errors import InputError
from meshwright.report.answer import Facts
from meshwright.report.figure import INK, MUTED, PALETTE, Encoding, Figure, Layer, alt, si_scale, themed
from meshwright.report.labels import Frame, reference
from meshwright.report.marks import (
    DASHES,
    WHOLE_NUMBERS,
    Points,
    ReferenceLine,
    check_positive,
    color_by,
    lines,
    log_axis,
    palette_of,
    plot,
    stroke_colors,
)

PANEL_PX, CURVES_PX = (300, 240), (620, 380)
MIN_SHARE = 5e-3
"""Largest share of a step that a bubble may have without being drawn."""
MOST_LETTERS = 36
"""Number of letters, in all labels together, for which a panel's horizontal axis has room side by side."""
MAX_DOTS = 40
"""Number of points of a curve above which it has no dots, which would hide it."""
LEAST_RANGE = 3
"""Ratio of the largest to the smallest value above which an axis is logarithmic: a shorter one has too few labels."""
CELL_PX = (84, 74)
LINE_PX = 13
SCHEME = ("#F7FBFF", "#D6E6F4", "#ABCFE6", "#6FB0D7", "#3787C0", "#105BA4")
DARK_FROM = 0.6
"""Share of the colour range above which text is white."""
EMPTY = "#EFEFEF"
TOO_LARGE = "does not fit in a chip's memory"
PERFECT, LIMIT = "perfect scaling", "what a chip holds"


def scaling_figure(
    points: Sequence[Mapping[str, Any]], *, over: str, limit_bytes: float | None = None, title: str, subtitle: str = ""
) -> Figure:
    """Draws tokens per second, time per step, shares of a step, and memory over one field.

    A point is one of `sweep --json`. Over clusters of one kind of chip (``over="on"``) the axis shows numbers of chips,
    and perfect scaling is drawn beside tokens per second; else it shows every value. ``limit_bytes`` is of one chip.
    """
    xs, x = _over(points, over)
    first_point = points[0]

    def of(name: str) -> list[float]:
        return [point[name] for point in points]

    rate_curves = {"best plan": of("tokens_per_s")}
    if _by_chips(points, over):
        rate_curves[PERFECT] = [first_point["tokens_per_s"] * chips / first_point["num_chips"] for chips in xs]
    share_curves = {"MFU": of("mfu"), "exposed communication": of("exposed_share")}
    if max(of("bubble_share")) > MIN_SHARE:
        share_curves["bubble"] = of("bubble_share")
    hbm_curves = {"best plan": of("hbm_bytes_per_chip")} | ({LIMIT: [limit_bytes] * len(points)} if limit_bytes else {})
    panels = [
        _panel(xs, x, rate_curves, "tokens per second ({})"),
        _panel(xs, x, {"time per step": of("step_s")}, "time per step ({})", "s"),
        _panel(xs, x, share_curves, "share", "%"),
        _panel(xs, x, hbm_curves, "memory of a chip ({})", "B"),
    ]
    return _panels_figure(panels, title, subtitle)


def service_figure(points: Sequence[Mapping[str, Any]], *, over: str, title: str, subtitle: str = "") -> Figure:
    """Draws tokens per second and chip, times, chips and dollars of the best services over one field."""
    xs, x = _over(points, over)

    def of(**names: str) -> dict[str, list[float]]:
        return {words: [point[name] for point in points] for words, name in names.items()}

    panels = [
        _panel(xs, x, of(best="tokens_per_s_per_chip"), "output tokens/s per chip ({})"),
        _panel(xs, x, of(TPOT="tpot_s"), "time per output token ({})", "s"),
        _panel(xs, x, of(TTFT="ttft_s"), "time to the first token ({})", "s"),
    ]
    if all(point["usd_per_m_output"] for point in points):
        dollar_curves = of(input="usd_per_m_input", output="usd_per_m_output")
        panels.append(_panel(xs, x, dollar_curves, "per million tokens ({})", "$"))
    return _panels_figure(panels, title, subtitle)


def _panels_figure(panels: Sequence[Layer], title: str, subtitle: str) -> Figure:
    chart = alt.concat(*panels, columns=2, spacing=28).resolve_scale(color="independent")
    return themed(chart, title, subtitle)


def _by_chips(points: Sequence[Mapping[str, Any]], over: str) -> bool:
    """True if the field is clusters that differ in their number of chips alone."""
    return over == "on" and all(point["values"][over].replace(",", "").isdigit() for point in points)


def _over(points: Sequence[Mapping[str, Any]], over: str) -> tuple[list[float], Encoding]:
    """Returns the place of each point on the horizontal axis, and the axis."""
    if not points:
        raise InputError("there is no point to draw: nothing in the sweep runs. Sweep other values.")
    if _by_chips(points, over):
        chip_counts = [float(point["num_chips"]) for point in points]
        return chip_counts, chips_axis(chip_counts)
    # a name at each of 0, 1, 2 and so on, slanted if the names are long
    point_names = [point["values"][over] for point in points]
    label_angle = -35 if max(map(len, point_names)) * len(point_names) > MOST_LETTERS else 0
    axis = alt.Axis(labelExpr=f"{json.dumps(point_names)}[datum.value]", labelAngle=label_angle)
    return list(map(float, range(len(points)))), alt.X("x:O", title="cluster" if over == "on" else over, axis=axis)


def _panel(
    xs: Sequence[float], x: Encoding, values_by_name: Mapping[str, Sequence[float]], y_title: str, unit: str = ""
) -> Layer:
    """Draws a line with dots per series; rates and times may have a logarithmic axis; references are dashed lines."""
    scale, unit_name = (1.0, "") if unit == "%" else si_scale(max(map(max, values_by_name.values())), unit)
    curves: dict[str, Points] = {
        name: list(zip(xs, (value / scale for value in values), strict=True)) for name, values in values_by_name.items()
    }
    ys, title = [y for points in curves.values() for _, y in points], y_title.format(unit_name).removesuffix(" ()")
    if unit in ("", "s", "$") and max(ys) > LEAST_RANGE * min(ys):
        y = log_axis(alt.Y, "y", (min(ys) / 1.2, max(ys) * 1.2), title)
    elif unit == "%":
        y = alt.Y("y:Q", title=title, scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format=".0%", tickCount=5))
    else:
        y = alt.Y("y:Q", title=title, axis=alt.Axis(tickCount=5))
    guide_names = [name for name in (PERFECT, LIMIT) if name in values_by_name]
    color_by_name = palette_of(values_by_name) | dict.fromkeys(guide_names, MUTED)
    curve_colors = color_by("name", color_by_name, orient="top", symbolType="stroke", columns=3)
    color = curve_colors if len(curves) > 1 else alt.ColorValue(PALETTE[0])
    # References are below the lines.
    layers = lines({name: curves.pop(name) for name in guide_names}, x, y, color, strokeDash=DASHES, strokeWidth=1.5)
    layers += lines(curves, x, y, color, point={"size": 40})
    return alt.layer(*layers).properties(width=PANEL_PX[0], height=PANEL_PX[1])


def chips_axis(chips: Sequence[float]) -> Encoding:
    """Returns a logarithmic axis labelled with the given numbers of chips, at most seven of them."""
    chip_counts = sorted(set(chips))
    domain = (chip_counts[0], chip_counts[-1]) if len(chip_counts) > 1 else (1, 2 * chip_counts[0])
    axis = {"values": chip_counts[:: -(-len(chip_counts) // 7)], "labelExpr": WHOLE_NUMBERS}
    return log_axis(alt.X, "x", domain, "chips", labelOverlap=False, grid=False, **axis)


def bandwidth_figure(
    chips: Sequence[int], rates: Mapping[str, Sequence[float]], *, title: str, subtitle: str = ""
) -> Figure:
    """Draws bytes per second over chips, a line per collective; collectives with equal rates share a line."""
    name_by_rates: dict[tuple[float, ...], str] = {}
    for name, values in rates.items():
        # Rates are equal if three digits are: the picture shows no more.
        rates_key = tuple(float(f"{rate:.3g}") for rate in values)
        name_by_rates[rates_key] = f"{name_by_rates[rates_key]}, {name}" if rates_key in name_by_rates else name
    if not any(name_by_rates):
        raise InputError("there is no point to draw. Give clusters of several chips.")
    chart = _panel(chips, chips_axis(chips), {name: ys for ys, name in name_by_rates.items()}, "{}/s and chip", "B")
    return themed(chart, title, subtitle, width=2 * PANEL_PX[0], height=300)


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
    min_x, max_x = min(xs), max(xs)
    ticks = {"values": sorted({*x_ticks}), "labelExpr": WHOLE_NUMBERS, "labelOverlap": True, "labelFlush": False}
    x_span, y_span = (min_x, max_x) if min_x < max_x else (min_x / 2, max_x * 2), (min(ys) / 1.5, max(ys) * 1.5)
    x, y = log_axis(alt.X, "x", x_span, x_title, **(ticks if x_ticks else {})), log_axis(alt.Y, "y", y_span, y_title)
    color = stroke_colors(curves, orient="right", symbolStrokeWidth=3)
    frame = Frame(x=x_span, y=y_span, size=CURVES_PX)
    areas = [box for points in curves.values() for box in (*frame.curve(points), *frame.dots(points, half=4))]
    overlays = [reference(line, frame, areas) for line in references]
    has_dots = max(map(len, curves.values())) <= MAX_DOTS
    layers = [*lines(curves, x, y, color, strokeWidth=2.4, point={"size": 28} if has_dots else False), *overlays]
    return themed(alt.layer(*layers), title, subtitle, width=CURVES_PX[0], height=CURVES_PX[1])


# -- heatmaps ---------------------------------------------------------------------------------------------


class HeatCell(msgspec.Struct, frozen=True):
    """One cell: the value of its colour, and its text, whose first line is a headline; None if nothing runs.

    ``fits`` is False for a value that a chip's memory does not hold.
    """

    row: str
    column: str
    value: float | None
    lines: Sequence[str]
    fits: bool = True


def _filled(cell: HeatCell, value: float, max_value: float, scale: float) -> Facts:
    headline, *lines_below = cell.lines
    return {
        "row": cell.row,
        "column": cell.column,
        "headline": headline,
        "text": "\n".join(lines_below),
        "ink": "white" if value > DARK_FROM * max_value else INK,
        "value": value / scale,
        "edge": "" if cell.fits else TOO_LARGE,
    }


def heatmap_figure(
    cells: Sequence[HeatCell],
    *,
    axes: Sequence[str],
    value_title: str,
    unit: str | None,
    title: str,
    subtitle: str = "",
) -> Figure:
    """Draws rows from top to bottom and columns from left to right, in the order of the cells; what does not fit has a
    red edge, and a legend says so.

    ``axes`` are the titles of rows and columns. Values are shares of 1 if ``unit`` is "%"; None gives them no prefix.
    """
    if not cells:
        raise InputError("there is no cell to draw. Give at least one.")
    row_names, column_names = list(dict.fromkeys(c.row for c in cells)), list(dict.fromkeys(c.column for c in cells))
    max_value = max((cell.value for cell in cells if cell.value is not None), default=1.0)
    scale, unit_name = (1.0, "") if unit in ("%", None) else si_scale(max_value, unit)
    num_lines = max(len(cell.lines) for cell in cells) - 1
    filled_cells = [_filled(cell, cell.value, max_value, scale) for cell in cells if cell.value is not None]
    empty_cells = [
        {"row": cell.row, "column": cell.column, "text": "\n".join(cell.lines)} for cell in cells if cell.value is None
    ]
    style = {"ticks": False, "domain": False}
    encodings = {
        "x": alt.X("column:N", sort=column_names, title=axes[1], axis=alt.Axis(orient="bottom", labelAngle=0, **style)),
        "y": alt.Y("row:N", sort=row_names, title=axes[0], axis=alt.Axis(labelLimit=200, **style)),
    }
    color_scale = alt.Scale(domain=[0, max_value / scale], range=SCHEME, interpolate="lab")
    legend = alt.Legend(format=".0%" if unit == "%" else ",.3~f", orient="right", gradientLength=160, tickCount=4)
    color = alt.Color(
        "value:Q", title=value_title + (f" ({unit_name})" if unit_name else ""), scale=color_scale, legend=legend
    )
    empty_marks, cell_marks = (plot(cell_rows).encode(**encodings) for cell_rows in (empty_cells, filled_cells))
    box_style = {"stroke": "white", "strokeWidth": 2}
    small_style = {"fontSize": 10, "lineBreak": "\n", "lineHeight": LINE_PX}
    ink_color = alt.Color("ink:N", scale=None)
    text_dy = -(7 * num_lines + 3)
    large_cells = [row for row in filled_cells if row["edge"]]
    legend = alt.Legend(title=None, orient="bottom", symbolType="square", symbolFillColor="white", symbolStrokeWidth=3)
    edge = alt.Stroke("edge:N", scale=alt.Scale(domain=[TOO_LARGE], range=[PALETTE[5]]), legend=legend)
    edges = plot(large_cells).mark_rect(filled=False, strokeWidth=3, strokeDash=DASHES).encode(**encodings, stroke=edge)
    chart = alt.layer(
        empty_marks.mark_rect(color=EMPTY, **box_style),
        empty_marks.mark_text(baseline="middle", fill=MUTED, **small_style).encode(text="text:N"),
        cell_marks.mark_rect(**box_style).encode(color=color),
        cell_marks.mark_text(fontSize=15, fontWeight="bold", baseline="middle", dy=text_dy + 2).encode(
            text="headline:N", color=ink_color
        ),
        cell_marks.mark_text(baseline="top", dy=text_dy + 14, **small_style).encode(text="text:N", color=ink_color),
        *([edges] if large_cells else []),
    )
    height = max(CELL_PX[1], 34 + LINE_PX * num_lines)
    chart = chart.resolve_scale(color="independent")
    return themed(chart, title, subtitle, width=CELL_PX[0] * len(column_names), height=height * len(row_names))
