"""Communication against compute by batch size: times with their crossings, and the ratio of the two.

After figures 15 and 16 of "How to Scale Your Model".
"""

from collections.abc import Mapping, Sequence

import msgspec

from meshwright.core.errors import InputError
from meshwright.report.figure import INK, MUTED, PALETTE, Spec, headline, si_scale, text_layers, themed
from meshwright.report.scaling import log_ticks

PANEL_PX = (420, 320)
MIN_SHARE = 1e-3
"""Curves that stay below this share of the largest are not drawn: they would stretch the axis."""


class CommsCurve(msgspec.Struct, frozen=True, kw_only=True):
    """One line: seconds of communication at every batch, and of the compute beside it, which can differ by mesh.

    ``crossing`` is the batch from which compute takes longer, where there is one.
    """

    name: str
    seconds: tuple[float, ...]
    compute_s: tuple[float, ...]
    crossing: float | None = None
    strong: bool = False


def comm_compute_figure(
    tokens: Sequence[float], curves: Sequence[CommsCurve], *, title: str, subtitle: str = ""
) -> Spec:
    """Left, times over batch, the last curve's compute dashed; right, compute over communication, crossings marked."""
    drawn = [curve for curve in curves if max(curve.seconds, default=0.0) > 0]
    if not drawn:
        raise InputError("There is no communication to draw: the mesh has one device.")
    colors = {curve.name: INK if curve.strong else PALETTE[number % 8] for number, curve in enumerate(drawn)}
    spec = {
        "title": headline(title, subtitle),
        "hconcat": [_times(tokens, drawn, colors), _ratios(tokens, drawn, colors)],
        "spacing": 36,
    }
    return themed({**spec, "resolve": {"scale": {"color": "shared"}}})


def _times(tokens: Sequence[float], curves: Sequence[CommsCurve], colors: Mapping[str, str]) -> Spec:
    compute_s = curves[-1].compute_s
    largest = max(max(compute_s), *(max(curve.seconds) for curve in curves))
    floor = max(MIN_SHARE * max(max(c.seconds) for c in curves), min(s for c in curves for s in c.seconds if s > 0))
    scale, unit = si_scale(largest, "s")
    low, high = min(floor, max(compute_s)) / scale / 1.3, largest / scale * 1.3
    rows = [
        {"tokens": batch, "y": value / scale, "line": curve.name}
        for curve in curves
        for batch, value in zip(tokens, curve.seconds, strict=True)
        if value / scale >= low
    ]
    work = [{"tokens": b, "y": s / scale} for b, s in zip(tokens, compute_s, strict=True) if s / scale >= low]
    place = {"x": tokens_axis(tokens), "y": _log_y(low, high, f"time ({unit})")}
    dashed = {"type": "line", "strokeDash": [6, 4], "strokeWidth": 2, "color": "black"}
    label = {"tokens": work[-1]["tokens"], "y": work[-1]["y"], "text": "compute"}
    return {
        "width": PANEL_PX[0],
        "height": PANEL_PX[1],
        "layer": [
            *_curves(rows, curves, place, colors),
            {"data": {"values": work}, "mark": dashed, "encoding": place},
            *text_layers([label], {**place, "text": {"field": "text"}}, align="right", dx=-8, dy=-8, fill="black"),
        ],
    }


def _ratios(tokens: Sequence[float], curves: Sequence[CommsCurve], colors: Mapping[str, str]) -> Spec:
    rows: list[Spec] = [
        {"tokens": batch, "y": work / value, "line": curve.name}
        for curve in curves
        for batch, work, value in zip(tokens, curve.compute_s, curve.seconds, strict=True)
        if value > 0
    ]
    low, high = max(1e-2, min(row["y"] for row in rows)) / 1.2, min(1e2, max(row["y"] for row in rows)) * 1.2
    kept = [row for row in rows if low <= row["y"] <= high]
    place = {"x": tokens_axis(tokens), "y": _log_y(low, high, "compute / communication")}
    rule = {"type": "rule", "strokeDash": [4, 4], "color": MUTED, "strokeWidth": 1.5}
    words = [{"tokens": tokens[0], "y": 1.0, "text": "above: compute-bound"}]
    return {
        "width": PANEL_PX[0],
        "height": PANEL_PX[1],
        "layer": [
            {"data": {"values": [{"y": 1.0}]}, "mark": rule, "encoding": {"y": place["y"]}},
            *_curves(kept, curves, place, colors),
            *text_layers(words, {**place, "text": {"field": "text"}}, align="left", dx=4, dy=-8, fill=MUTED),
            {
                "data": {"values": [{"tokens": curve.crossing, "y": 1.0} for curve in curves if curve.crossing]},
                "mark": {"type": "point", "size": 60, "filled": False, "color": "black", "opacity": 1},
                "encoding": place,
            },
        ],
    }


def _curves(rows: Sequence[Spec], curves: Sequence[CommsCurve], place: Spec, colors: Mapping[str, str]) -> list[Spec]:
    """All lines in their colours; the strong ones wide."""
    names = [curve.name for curve in curves]
    color = {
        "field": "line",
        "type": "nominal",
        "scale": {"domain": names, "range": [colors[name] for name in names]},
        "legend": {"title": "communication", "orient": "right", "symbolType": "stroke", "symbolStrokeWidth": 3},
    }
    strong = {curve.name for curve in curves if curve.strong}
    layers = []
    for wanted, stroke in ((False, 1.8), (True, 3.2)):
        chosen = [row for row in rows if (row["line"] in strong) is wanted]
        if chosen:
            mark = {"type": "line", "strokeWidth": stroke, "clip": True}
            layers.append({"data": {"values": chosen}, "mark": mark, "encoding": {**place, "color": color}})
    return layers


def tokens_axis(tokens: Sequence[float]) -> Spec:
    """A logarithmic axis of tokens, labelled 1M, 2M, 5M."""
    low, high = min(tokens), max(tokens)
    axis = {"values": log_ticks(low, high), "format": "~s", "grid": False}
    scale = {"type": "log", "domain": [low, high], "nice": False}
    return {"field": "tokens", "type": "quantitative", "title": "batch (tokens)", "scale": scale, "axis": axis}


def _log_y(low: float, high: float, title: str) -> Spec:
    axis = {"values": log_ticks(low, high), "format": "~g"}
    scale = {"type": "log", "domain": [low, high], "nice": False}
    return {"field": "y", "type": "quantitative", "title": title, "scale": scale, "axis": axis}
