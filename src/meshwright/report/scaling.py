"""Curves over the number of chips: throughput, step time, shares of a step, memory, collective bandwidth."""

from collections.abc import Mapping, Sequence

import msgspec

from meshwright.core.errors import InputError
from meshwright.report.figure import MUTED, PALETTE, Encoding, Figure, Layer, alt, si_scale, themed
from meshwright.report.marks import DASHES, WHOLE_NUMBERS, Points, color_by, lines, log_axis, palette_of, stroke_colors

PANEL_PX = (300, 240)
MIN_SHARE = 5e-3
"""Share of a step up to which the bubble is not drawn."""
PERFECT, LIMIT = "perfect scaling", "what a chip holds"


class ScalingPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One number of chips. Shares are of the step; ``limit_bytes`` is a chip's memory, None if not known."""

    num_chips: int
    step_s: float
    tokens_per_s: float
    mfu: float
    exposed_share: float
    bubble_share: float
    hbm_bytes: float
    limit_bytes: float | None = None


def scaling_figure(points: Sequence[ScalingPoint], *, title: str, subtitle: str = "") -> Figure:
    """Draws tokens per second with perfect scaling, time per step, shares of a step, and memory over chips."""
    if not points:
        raise InputError("There is no point to draw: nothing runs on any of the clusters.")
    first, limit = points[0], points[0].limit_bytes
    rates = {
        "best plan": [point.tokens_per_s for point in points],
        PERFECT: [first.tokens_per_s * point.num_chips / first.num_chips for point in points],
    }
    shares = {"MFU": [p.mfu for p in points], "exposed communication": [p.exposed_share for p in points]}
    if any(point.bubble_share > MIN_SHARE for point in points):
        shares["bubble"] = [point.bubble_share for point in points]
    memory = {"best plan": [point.hbm_bytes for point in points]} | ({LIMIT: [limit] * len(points)} if limit else {})
    chips = [point.num_chips for point in points]
    panels = [
        _panel(chips, rates, "tokens per second ({})", log=True),
        _panel(chips, {"time per step": [point.step_s for point in points]}, "time per step ({})", unit="s", log=True),
        _panel(chips, shares, "share", unit="%"),
        _panel(chips, memory, "memory of a chip ({})", unit="B"),
    ]
    chart = alt.concat(*panels, columns=2, spacing=28).resolve_scale(color="independent")
    return themed(chart, title, subtitle)


def _panel(
    chips: Sequence[int], series: Mapping[str, Sequence[float]], y_title: str, *, unit: str = "", log: bool = False
) -> Layer:
    """Draws a line with dots per series over chips; references are dashed and have no dots."""
    scale, unit_name = (1.0, "") if unit == "%" else si_scale(max(map(max, series.values())), unit)
    curves: dict[str, Points] = {
        name: list(zip(chips, (value / scale for value in values), strict=True)) for name, values in series.items()
    }
    ys, title = [y for points in curves.values() for _, y in points], y_title.format(unit_name or "1")
    if log:
        y = log_axis(alt.Y, "y", (min(ys) / 1.2, max(ys) * 1.2), title)
    elif unit == "%":
        y = alt.Y("y:Q", title=title, scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format=".0%", tickCount=5))
    else:
        y = alt.Y("y:Q", title=title, axis=alt.Axis(tickCount=5))
    references = [name for name in (PERFECT, LIMIT) if name in series]
    colors = palette_of(series) | dict.fromkeys(references, MUTED)
    several = color_by("name", colors, orient="top", symbolType="stroke", columns=3)
    color = several if len(curves) > 1 else alt.ColorValue(PALETTE[0])
    x = chips_axis(chips)
    # References are below the lines.
    layers = lines({name: curves.pop(name) for name in references}, x, y, color, strokeDash=DASHES, strokeWidth=1.5)
    layers += lines(curves, x, y, color, point={"size": 40})
    return alt.layer(*layers).properties(width=PANEL_PX[0], height=PANEL_PX[1])


def chips_axis(chips: Sequence[float]) -> Encoding:
    """Returns a logarithmic axis labelled with the given numbers of chips, as many as fit."""
    numbers = sorted(set(chips))
    domain = (numbers[0], numbers[-1]) if len(numbers) > 1 else (1, 2 * numbers[0])
    axis = {"values": numbers[:: -(-len(numbers) // 7)], "labelExpr": WHOLE_NUMBERS}
    return log_axis(alt.X, "x", domain, "chips", labelOverlap=False, grid=False, **axis)


def bandwidth_figure(rates: Mapping[str, Sequence[tuple[int, float]]], *, title: str, subtitle: str = "") -> Figure:
    """Draws bytes per second over chips, a line per collective; collectives with equal rates share a line."""
    merged: dict[tuple[tuple[int, float], ...], str] = {}
    for name, points in rates.items():
        # Rates are equal if three digits are: the picture shows no more.
        key = tuple((chips, float(f"{rate:.3g}")) for chips, rate in points)
        merged[key] = f"{merged[key]}, {name}" if key in merged else name
    if not any(merged):
        raise InputError("There is no point to draw. Give clusters of several chips.")
    scale, unit = si_scale(max(rate for points in merged for _, rate in points), "B")
    curves = {name: [(chips, rate / scale) for chips, rate in points] for points, name in merged.items()}
    x = chips_axis([chips for points in merged for chips, _ in points])
    y = alt.Y("y:Q", title=f"{unit}/s and chip", scale=alt.Scale(zero=True))
    color = stroke_colors(curves, orient="top", columns=2, symbolStrokeWidth=3)
    chart = alt.layer(*lines(curves, x, y, color, point={"size": 44}))
    return themed(chart, title, subtitle, width=2 * PANEL_PX[0], height=300)
