"""Stacked bars: where the time of a step goes, and what fills a device's memory."""

import math
from collections.abc import Mapping

from meshwright.core.errors import InputError
from meshwright.core.units import format_bytes, format_seconds
from meshwright.report.figure import INK, PALETTE, Spec, headline, si_scale, text_layers, themed

Bars = Mapping[str, Mapping[str, float]]
"""Bar -> part -> amount. Bars keep their order from top to bottom, parts theirs from left to right."""

WIDTH_PX = 560
BAR_PX = 44


def step_breakdown_figure(step_s: Bars, *, title: str = "Where a step goes", subtitle: str = "") -> Spec:
    """One bar per estimate or measurement, such as ``{"predicted": {"compute": 0.2}, "measured": {"step": 0.25}}``.

    Amounts are seconds; the sum of a bar stands at its end.
    """
    totals = _totals(step_s)
    scale, unit = si_scale(max(totals.values()), "s")
    ends = {name: format_seconds(total) for name, total in totals.items()}
    layers = _bar_layers(step_s, scale, f"time per step ({unit})", ends)
    return _figure(layers, step_s, headline(title, subtitle))


def memory_figure(
    memory_bytes: Bars, *, limit_bytes: float | None = None, title: str = "Memory per device", subtitle: str = ""
) -> Spec:
    """One bar per estimate or measurement of a device's memory, in bytes, and the limit as a dashed line."""
    totals = _totals(memory_bytes)
    scale, unit = si_scale(max([*totals.values(), limit_bytes or 0.0]), "B")
    ends = {name: format_bytes(total) for name, total in totals.items()}
    layers = _bar_layers(memory_bytes, scale, f"memory ({unit})", ends)
    if limit_bytes is not None:
        # Over the bars, under the totals.
        layers[1:1] = _limit_layers(limit_bytes, scale)
    return _figure(layers, memory_bytes, headline(title, subtitle))


def _totals(bars: Bars) -> dict[str, float]:
    if not bars:
        raise InputError("There is no bar to draw. Give at least one.")
    for name, parts in bars.items():
        bad = [f"{part} {amount:g}" for part, amount in parts.items() if not (math.isfinite(amount) and amount >= 0)]
        if bad:
            raise InputError(f"Bar {name!r} has amounts that cannot be drawn: {', '.join(bad)}. Give numbers >= 0.")
    return {name: sum(parts.values()) for name, parts in bars.items()}


def _figure(layers: list[Spec], bars: Bars, title: Spec) -> Spec:
    return themed({"title": title, "width": WIDTH_PX, "height": BAR_PX * len(bars), "layer": layers})


def _bar_layers(bars: Bars, scale: float, axis_title: str, ends: Mapping[str, str]) -> list[Spec]:
    # Parts that are zero everywhere would only lengthen the legend.
    parts = list(dict.fromkeys(part for row in bars.values() for part, amount in row.items() if amount > 0))
    y = {"field": "bar", "type": "nominal", "sort": list(bars), "title": None, "axis": {"ticks": False}}
    stacked = {
        "data": {"values": _segments(bars, scale)},
        "mark": {"type": "bar", "height": {"band": 0.66}, "stroke": "white", "strokeWidth": 1},
        "encoding": {
            "y": y,
            "x": {"field": "start", "type": "quantitative", "title": axis_title, "axis": {"tickCount": 6}},
            "x2": {"field": "end"},
            "color": _part_colors(parts),
        },
    }
    totals = [{"bar": name, "end": sum(row.values()) / scale, "total": ends[name]} for name, row in bars.items()]
    place = {"y": y, "x": {"field": "end", "type": "quantitative"}, "text": {"field": "total"}}
    return [stacked, *text_layers(totals, place, align="left", baseline="middle", dx=6, fill=INK)]


def _segments(bars: Bars, scale: float) -> list[Spec]:
    segments = []
    for name, parts in bars.items():
        start = 0.0
        for part, amount in parts.items():
            if amount == 0:
                continue
            end = start + amount / scale
            segments.append({"bar": name, "part": part, "amount": amount, "start": start, "end": end})
            start = end
    return segments


def _part_colors(parts: list[str]) -> Spec:
    """Colours in the order of the parts; a thirteenth part begins the palette again, as its legend shows."""
    colors = [PALETTE[index % len(PALETTE)] for index in range(len(parts))]
    legend = {"title": None, "orient": "bottom", "columns": 4, "symbolType": "square"}
    return {
        "field": "part",
        "type": "nominal",
        "scale": {"domain": parts, "range": colors},
        "legend": legend,
    }


def _limit_layers(limit_bytes: float, scale: float) -> list[Spec]:
    row = {"limit": limit_bytes / scale, "text": f"limit {format_bytes(limit_bytes)}"}
    x = {"field": "limit", "type": "quantitative"}
    rule = {
        "data": {"values": [row]},
        "mark": {"type": "rule", "strokeDash": [5, 4], "strokeWidth": 1.5, "color": PALETTE[5]},
        "encoding": {"x": x},
    }
    place = {"x": x, "y": {"value": -8}, "text": {"field": "text"}}
    return [rule, *text_layers([row], place, align="center", fill=PALETTE[5])]
