"""Curves of throughput, step time, shares of a step and memory over chips or a field; curves of bandwidth."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.core.errors import InputError
from meshwright.report.figure import MUTED, PALETTE, Encoding, Figure, Layer, alt, si_scale, themed
from meshwright.report.marks import DASHES, WHOLE_NUMBERS, Points, color_by, lines, log_axis, palette_of

PANEL_PX = (300, 240)
MIN_SHARE = 5e-3
"""Largest share of a step that a bubble may have without being drawn."""
MOST_LETTERS = 36
"""Number of letters, in all labels together, for which a panel's horizontal axis has room side by side."""
LEAST_RANGE = 3
"""Ratio of the largest to the smallest value above which an axis is logarithmic: a shorter one has too few labels."""
PERFECT, LIMIT = "perfect scaling", "what a chip holds"


def scaling_figure(
    points: Sequence[Mapping[str, Any]], *, over: str, limit_bytes: float | None = None, title: str, subtitle: str = ""
) -> Figure:
    """Draws tokens per second, time per step, shares of a step, and memory over one field.

    A point is one of `sweep --json`. Over clusters of one kind of chip (``over="on"``) the axis shows numbers of chips,
    and perfect scaling is drawn beside tokens per second; else it shows every value. ``limit_bytes`` is of one chip.
    """
    xs, x = _over(points, over)
    first, by_chips = points[0], _by_chips(points, over)

    def of(name: str) -> list[float]:
        return [point[name] for point in points]

    rates = {"best plan": of("tokens_per_s")}
    if by_chips:
        rates[PERFECT] = [first["tokens_per_s"] * chips / first["num_chips"] for chips in xs]
    shares = {"MFU": of("mfu"), "exposed communication": of("exposed_share")}
    if max(of("bubble_share")) > MIN_SHARE:
        shares["bubble"] = of("bubble_share")
    memory = {"best plan": of("hbm_bytes_per_chip")} | ({LIMIT: [limit_bytes] * len(points)} if limit_bytes else {})
    panels = [
        _panel(xs, x, rates, "tokens per second ({})"),
        _panel(xs, x, {"time per step": of("step_s")}, "time per step ({})", "s"),
        _panel(xs, x, shares, "share", "%"),
        _panel(xs, x, memory, "memory of a chip ({})", "B"),
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
        dollars = of(input="usd_per_m_input", output="usd_per_m_output")
        panels.append(_panel(xs, x, dollars, "per million tokens ({})", "$"))
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
        chips = [float(point["num_chips"]) for point in points]
        return chips, chips_axis(chips)
    names = [point["values"][over] for point in points]
    return [float(number) for number in range(len(points))], _named_axis(names, "cluster" if over == "on" else over)


def _panel(
    xs: Sequence[float], x: Encoding, series: Mapping[str, Sequence[float]], y_title: str, unit: str = ""
) -> Layer:
    """Draws a line with dots per series; rates and times may have a logarithmic axis; references are dashed lines."""
    scale, unit_name = (1.0, "") if unit == "%" else si_scale(max(map(max, series.values())), unit)
    curves: dict[str, Points] = {
        name: list(zip(xs, (value / scale for value in values), strict=True)) for name, values in series.items()
    }
    ys, title = [y for points in curves.values() for _, y in points], y_title.format(unit_name or "1")
    if unit in ("", "s", "$") and max(ys) > LEAST_RANGE * min(ys):
        y = log_axis(alt.Y, "y", (min(ys) / 1.2, max(ys) * 1.2), title)
    elif unit == "%":
        y = alt.Y("y:Q", title=title, scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format=".0%", tickCount=5))
    else:
        y = alt.Y("y:Q", title=title, axis=alt.Axis(tickCount=5))
    references = [name for name in (PERFECT, LIMIT) if name in series]
    colors = palette_of(series) | dict.fromkeys(references, MUTED)
    several = color_by("name", colors, orient="top", symbolType="stroke", columns=3)
    color = several if len(curves) > 1 else alt.ColorValue(PALETTE[0])
    # References are below the lines.
    layers = lines({name: curves.pop(name) for name in references}, x, y, color, strokeDash=DASHES, strokeWidth=1.5)
    layers += lines(curves, x, y, color, point={"size": 40})
    return alt.layer(*layers).properties(width=PANEL_PX[0], height=PANEL_PX[1])


def _named_axis(names: Sequence[str], title: str) -> Encoding:
    """Returns an axis with a name at each of 0, 1, 2 and so on, slanted if the names are long."""
    angle = -35 if max(map(len, names)) * len(names) > MOST_LETTERS else 0
    return alt.X("x:O", title=title, axis=alt.Axis(labelExpr=f"{json.dumps(names)}[datum.value]", labelAngle=angle))


def chips_axis(chips: Sequence[float]) -> Encoding:
    """Returns a logarithmic axis labelled with the given numbers of chips, at most seven of them."""
    numbers = sorted(set(chips))
    domain = (numbers[0], numbers[-1]) if len(numbers) > 1 else (1, 2 * numbers[0])
    axis = {"values": numbers[:: -(-len(numbers) // 7)], "labelExpr": WHOLE_NUMBERS}
    return log_axis(alt.X, "x", domain, "chips", labelOverlap=False, grid=False, **axis)


def bandwidth_figure(
    chips: Sequence[int], rates: Mapping[str, Sequence[float]], *, title: str, subtitle: str = ""
) -> Figure:
    """Draws bytes per second over chips, a line per collective; collectives with equal rates share a line."""
    merged: dict[tuple[float, ...], str] = {}
    for name, values in rates.items():
        # Rates are equal if three digits are: the picture shows no more.
        key = tuple(float(f"{rate:.3g}") for rate in values)
        merged[key] = f"{merged[key]}, {name}" if key in merged else name
    if not any(merged):
        raise InputError("there is no point to draw. Give clusters of several chips.")
    chart = _panel(chips, chips_axis(chips), {name: values for values, name in merged.items()}, "{}/s and chip", "B")
    return themed(chart, title, subtitle, width=2 * PANEL_PX[0], height=300)
