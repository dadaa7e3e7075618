"""Scaling curves against the number of chips: throughput, where the time goes, memory."""

import math
from collections.abc import Mapping, Sequence

import msgspec

from meshwright.core.errors import InputError
from meshwright.report.figure import MUTED, PALETTE, Spec, headline, si_scale, themed

PANEL_PX = (300, 240)
MIN_SHARE = 5e-3
"""A bubble that never takes more of a step is not drawn."""


class ScalingPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One number of chips. Shares are of the step; ``limit_bytes`` is what a chip holds, None where not known."""

    num_chips: int
    step_s: float
    tokens_per_s: float
    mfu: float
    exposed_share: float
    bubble_share: float
    hbm_bytes: float
    limit_bytes: float | None = None


def scaling_figure(points: Sequence[ScalingPoint], *, title: str, subtitle: str = "") -> Spec:
    """Four panels over chips: tokens per second beside perfect scaling, time per step, shares of a step, memory."""
    if not points:
        raise InputError("There is no point to draw: nothing runs on any of the clusters.")
    panels = [_throughput(points), _step(points), _shares(points), _memory(points)]
    spec = {"title": headline(title, subtitle), "concat": panels, "columns": 2, "spacing": 28}
    return themed({**spec, "resolve": {"scale": {"color": "independent"}}})


def chips_axis(chips: Sequence[int], title: str = "chips") -> Spec:
    """A logarithmic axis whose labels are the numbers of chips themselves, as many as fit."""
    every = -(-len(set(chips)) // 7)
    shown = sorted(set(chips))[::every]
    axis = {"title": title, "values": shown, "format": ",d", "labelOverlap": False, "grid": False}
    scale = {"type": "log", "domain": [min(chips), max(chips)] if len(set(chips)) > 1 else [1, 2 * max(chips)]}
    return {"field": "chips", "type": "quantitative", "scale": {**scale, "nice": False}, "axis": axis}


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten between two numbers; where that is fewer than three, 2 and 5 times them too."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 2, 5)):
        ticks = [float(f"{step * 10.0**power:.3g}") for power in decades for step in steps]
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) >= 3:
            break
    return inside


def _throughput(points: Sequence[ScalingPoint]) -> Spec:
    scale, unit = si_scale(max(point.tokens_per_s for point in points), "")
    first = points[0]
    rows = [
        {"chips": point.num_chips, "line": name, "y": value / scale}
        for point in points
        for name, value in (
            ("best plan", point.tokens_per_s),
            ("perfect scaling", first.tokens_per_s * point.num_chips / first.num_chips),
        )
    ]
    return _lines(points, rows, f"tokens per second ({unit or '1'})", dashed="perfect scaling", log=True)


def _step(points: Sequence[ScalingPoint]) -> Spec:
    scale, unit = si_scale(max(point.step_s for point in points), "s")
    rows = [{"chips": point.num_chips, "line": "time per step", "y": point.step_s / scale} for point in points]
    return _lines(points, rows, f"time per step ({unit})", log=True)


def _shares(points: Sequence[ScalingPoint]) -> Spec:
    names = {"MFU": "mfu", "exposed communication": "exposed_share", "bubble": "bubble_share"}
    rows = [
        {"chips": point.num_chips, "line": name, "y": getattr(point, field)}
        for name, field in names.items()
        if name != "bubble" or any(point.bubble_share > MIN_SHARE for point in points)
        for point in points
    ]
    return _lines(points, rows, "share", percent=True)


def _memory(points: Sequence[ScalingPoint]) -> Spec:
    scale, unit = si_scale(max(max(point.hbm_bytes, point.limit_bytes or 0.0) for point in points), "B")
    rows = [{"chips": point.num_chips, "line": "best plan", "y": point.hbm_bytes / scale} for point in points]
    rows += [
        {"chips": point.num_chips, "line": "what a chip holds", "y": point.limit_bytes / scale}
        for point in points
        if point.limit_bytes is not None
    ]
    return _lines(points, rows, f"memory of a chip ({unit})", dashed="what a chip holds")


def _lines(
    points: Sequence[ScalingPoint],
    rows: list[Spec],
    y_title: str,
    *,
    dashed: str = "",
    log: bool = False,
    percent: bool = False,
) -> Spec:
    """One panel: a line with dots for every name in the rows; ``dashed`` is a reference, without dots."""
    names = list(dict.fromkeys(row["line"] for row in rows))
    colors = [MUTED if name == dashed else PALETTE[number] for number, name in enumerate(names)]
    y: Spec = {"field": "y", "type": "quantitative", "title": y_title, "axis": {"tickCount": 5}}
    if log:
        low, high = min(row["y"] for row in rows) / 1.2, max(row["y"] for row in rows) * 1.2
        scale = {"type": "log", "domain": [low, high], "nice": False}
        y |= {"scale": scale, "axis": {"values": log_ticks(low, high), "format": "~g"}}
    if percent:
        y |= {"scale": {"domain": [0, 1]}, "axis": {"format": ".0%", "tickCount": 5}}
    legend = {"title": None, "orient": "top", "symbolType": "stroke", "columns": 3} if len(names) > 1 else None
    color = {"field": "line", "type": "nominal", "scale": {"domain": names, "range": colors}, "legend": legend}
    encoding = {"x": chips_axis([point.num_chips for point in points]), "y": y, "color": color}
    solid = [row for row in rows if row["line"] != dashed]
    layers = [
        {"data": {"values": solid}, "mark": {"type": "line", "strokeWidth": 2}, "encoding": encoding},
        {"data": {"values": solid}, "mark": {"type": "circle", "size": 40, "opacity": 1}, "encoding": encoding},
    ]
    if dashed:
        mark = {"type": "line", "strokeDash": [5, 4], "strokeWidth": 1.5}
        reference = [row for row in rows if row["line"] == dashed]
        layers.insert(0, {"data": {"values": reference}, "mark": mark, "encoding": encoding})
    return {"width": PANEL_PX[0], "height": PANEL_PX[1], "layer": layers}


# -- collectives ----------------------------------------------------------------------------------------


def bandwidth_figure(lines: Mapping[str, Sequence[tuple[int, float]]], *, title: str, subtitle: str = "") -> Spec:
    """Bytes per second against chips, a line per collective; lines that coincide share one."""
    merged: dict[tuple[tuple[int, float], ...], str] = {}
    for name, points in lines.items():
        # to three digits: what cannot be told apart in the picture
        key = tuple((chips, float(f"{rate:.3g}")) for chips, rate in points)
        merged[key] = f"{merged[key]}, {name}" if key in merged else name
    if not any(merged):
        raise InputError("There is no point to draw. Give clusters of several chips.")
    scale, unit = si_scale(max(rate for points in merged for _, rate in points), "B")
    rows: list[Spec] = [
        {"chips": chips, "line": name, "y": rate / scale} for points, name in merged.items() for chips, rate in points
    ]
    names = list(merged.values())
    color = {
        "field": "line",
        "type": "nominal",
        "scale": {"domain": names, "range": list(PALETTE[: len(names)])},
        "legend": {"title": None, "orient": "top", "symbolType": "stroke", "columns": 2, "symbolStrokeWidth": 3},
    }
    encoding = {
        "x": chips_axis([row["chips"] for row in rows]),
        "y": {"field": "y", "type": "quantitative", "title": f"{unit}/s and chip", "scale": {"zero": True}},
        "color": color,
    }
    marks: list[Spec] = [{"type": "line", "strokeWidth": 2}, {"type": "circle", "size": 44, "opacity": 1}]
    layers = [{"mark": mark, "encoding": encoding} for mark in marks]
    size = {"width": 2 * PANEL_PX[0], "height": 300}
    return themed({"title": headline(title, subtitle), **size, "data": {"values": rows}, "layer": layers})
