"""Frontiers: plans by step time against memory and, where a price is known, against what their chips cost."""

import math
from collections.abc import Sequence

import msgspec

from meshwright.core.errors import InputError
from meshwright.core.units import format_bytes
from meshwright.report.figure import INK, MUTED, PALETTE, Spec, headline, si_scale, text_layers, themed
from meshwright.report.scaling import log_ticks

PANEL_PX = (430, 320)
LABEL_PX = (16, 13)
LOG_FROM = 5.0
"""Ratio of the longest to the shortest step from which the axis of time is logarithmic."""


class ParetoPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One plan: its step time, the other amount, and a label (empty: a dot alone)."""

    step_s: float
    amount: float
    label: str = ""


def pareto_figure(
    memory: Sequence[ParetoPoint],
    cost: Sequence[ParetoPoint] = (),
    *,
    limit_bytes: float | None = None,
    title: str,
    subtitle: str = "",
) -> Spec:
    """Memory (bytes) against step time and, given at least two points, dollars per billion tokens against it."""
    if not memory:
        raise InputError("There is no plan to draw. Give at least one.")
    scale, unit = si_scale(max([limit_bytes or 0.0, *(point.amount for point in memory)]), "B")
    panels = [_panel(memory, scale, f"memory of a chip ({unit})", steps=True, limit=limit_bytes)]
    if len(cost) > 1:
        panels.append(_panel(cost, 1.0, "cost of a billion tokens ($)", steps=False))
    return themed({"title": headline(title, subtitle), "hconcat": panels, "spacing": 36})


def _panel(
    points: Sequence[ParetoPoint], scale: float, y_title: str, *, steps: bool, limit: float | None = None
) -> Spec:
    """Dots joined by a line; with ``steps`` by steps, since between two plans only the slower one's memory is had."""
    x_scale, x_unit = si_scale(max(point.step_s for point in points), "s")
    rows: list[Spec] = [{"x": p.step_s / x_scale, "y": p.amount / scale, "label": p.label} for p in points]
    x = _time_axis([row["x"] for row in rows], f"time per step ({x_unit})")
    most = max([0.0 if limit is None else limit / scale, *(row["y"] for row in rows)])
    y: Spec = {
        "field": "y",
        "type": "quantitative",
        "title": y_title,
        "scale": {"domain": [0, most * 1.08], "nice": False},
        "axis": {"tickCount": 6},
    }
    interpolate = "step-after" if steps else "linear"
    line = {"type": "line", "interpolate": interpolate, "strokeWidth": 1.5, "color": PALETTE[0], "opacity": 0.6}
    place = {"x": x, "y": y}
    named = [row for row in rows if row["label"]]
    told = _apart(named, x["scale"], most * 1.08)
    layers: list[Spec] = [
        {"data": {"values": rows}, "mark": line, "encoding": place},
        {
            "data": {"values": rows},
            "mark": {"type": "circle", "size": 26, "opacity": 1, "color": PALETTE[4]},
            "encoding": place,
        },
        {
            "data": {"values": named},
            "mark": {"type": "circle", "size": 60, "opacity": 1, "color": PALETTE[0]},
            "encoding": place,
        },
        *text_layers(
            told, {**place, "text": {"field": "label"}}, align="left", baseline="bottom", dx=5, dy=-4, fill=INK
        ),
    ]
    if limit is not None:
        layers = [*_limit_layers(limit, scale, y, x), *layers]
    return {"width": PANEL_PX[0], "height": PANEL_PX[1], "layer": layers}


def _apart(rows: Sequence[Spec], x_scale: Spec, top: float) -> list[Spec]:
    """The rows whose labels stay clear of those before them."""
    low, high = (math.log(v) if x_scale.get("type") == "log" else v for v in x_scale["domain"])
    kept: list[tuple[float, float, Spec]] = []
    for row in rows:
        across = ((math.log(row["x"]) if x_scale.get("type") == "log" else row["x"]) - low) / (high - low)
        spot = across * PANEL_PX[0], row["y"] / top * PANEL_PX[1]
        if all(abs(spot[0] - x) > LABEL_PX[0] or abs(spot[1] - y) > LABEL_PX[1] for x, y, _ in kept):
            kept.append((*spot, row))
    return [row for _, _, row in kept]


def _time_axis(values: Sequence[float], title: str) -> Spec:
    low, high = min(values), max(values)
    axis: Spec = {"field": "x", "type": "quantitative", "title": title}
    if high > LOG_FROM * low:
        low, high = low / 1.1, high * 1.25
        scale = {"type": "log", "domain": [low, high], "nice": False}
        return axis | {"scale": scale, "axis": {"values": log_ticks(low, high), "format": "~g", "grid": False}}
    room = 0.08 * (high - low) or 0.1 * high
    scale = {"domain": [max(0.0, low - room), high + 2 * room], "nice": False}
    return axis | {"scale": scale, "axis": {"tickCount": 6, "grid": False}}


def _limit_layers(limit: float, scale: float, y: Spec, x: Spec) -> list[Spec]:
    """What a chip holds, as a dashed line with its name at the right."""
    row = {"y": limit / scale, "text": f"what a chip holds: {format_bytes(limit)}"}
    rule = {"type": "rule", "strokeDash": [5, 4], "strokeWidth": 1.5, "color": MUTED}
    place = {"y": y, "x": {"value": PANEL_PX[0] - 4}, "text": {"field": "text"}}
    return [
        {"data": {"values": [row]}, "mark": rule, "encoding": {"y": y}},
        *text_layers([row], place, align="right", baseline="bottom", dy=-4, fill=MUTED),
    ]
