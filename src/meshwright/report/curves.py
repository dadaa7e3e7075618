"""Curves over one number: the rate of a product against its batch, the cost of a block against the context."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from meshwright.core.errors import InputError
from meshwright.report.figure import INK, MUTED, PALETTE, Spec, headline, text_layers, themed

WIDTH_PX = 620
HEIGHT_PX = 380


class Curve(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A named line through points, x rising."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]


class Mark(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A dashed line across the picture where ``axis`` has this value, with a word at its start or its end."""

    axis: Literal["x", "y"]
    value: float
    text: str
    at: Literal["start", "end"] = "start"


def curves_figure(
    curves: Sequence[Curve],
    *,
    x_title: str,
    y_title: str,
    title: str,
    subtitle: str = "",
    marks: Sequence[Mark] = (),
) -> Spec:
    """All curves on two logarithmic axes with a legend, and dashed marks on either axis."""
    _check(curves)
    xs = [x for curve in curves for x in curve.x]
    ys = [y for curve in curves for y in curve.y] + [mark.value for mark in marks if mark.axis == "y"]
    x = _axis("x", (min(xs), max(xs)), x_title)
    y = _axis("y", (min(ys) / 1.5, max(ys) * 1.5), y_title)
    layers = [_lines(curves, x, y)]
    for mark in marks:
        layers += _mark(mark, x, y)
    return themed({"title": headline(title, subtitle), "width": WIDTH_PX, "height": HEIGHT_PX, "layer": layers})


def _check(curves: Sequence[Curve]) -> None:
    if not curves or not all(curve.x for curve in curves):
        raise InputError("There is no curve to draw. Give at least one point.")
    for curve in curves:
        if len(curve.x) != len(curve.y):
            raise InputError(f"{curve.name}: {len(curve.x)} places do not go with {len(curve.y)} values.")
        bad = [value for value in (*curve.x, *curve.y) if not (math.isfinite(value) and value > 0)]
        if bad:
            raise InputError(f"{curve.name}: {bad[0]:g} cannot be drawn on a logarithmic axis. Give positive numbers.")


def _lines(curves: Sequence[Curve], x: Spec, y: Spec) -> Spec:
    rows = [
        {"curve": curve.name, "x": across, "y": up}
        for curve in curves
        for across, up in zip(curve.x, curve.y, strict=True)
    ]
    names = [curve.name for curve in curves]
    color = {
        "field": "curve",
        "type": "nominal",
        "scale": {"domain": names, "range": [PALETTE[i % len(PALETTE)] for i in range(len(names))]},
        "legend": {"title": None, "orient": "right", "symbolType": "stroke", "symbolStrokeWidth": 3},
    }
    return {
        "data": {"values": rows},
        "mark": {"type": "line", "strokeWidth": 2.4, "point": {"size": 28}},
        "encoding": {"x": x, "y": y, "color": color},
    }


def _axis(channel: str, domain: tuple[float, float], title: str) -> Spec:
    low, high = domain if domain[0] < domain[1] else (domain[0] / 2, domain[1] * 2)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    # Short axes also carry 2 and 5 of every decade: one or two labels would not tell the scale.
    steps = (1,) if len(decades) > 4 else (1, 2, 5)
    values = [step * 10.0**power for power in decades for step in steps]
    axis = {
        "title": title,
        "values": [value for value in values if low <= value <= high],
        "labelExpr": "datum.value < 1 ? toString(datum.value) : format(datum.value, '~s')",
    }
    scale = {"type": "log", "domain": [low, high], "nice": False}
    return {"field": channel, "type": "quantitative", "scale": scale, "axis": axis}


def _mark(mark: Mark, x: Spec, y: Spec) -> list[Spec]:
    """The rule from edge to edge, and its word."""
    across, up = x["scale"]["domain"], y["scale"]["domain"]
    flat = mark.axis == "y"
    start = {"x": across[0], "y": mark.value} if flat else {"x": mark.value, "y": up[0]}
    end: Mapping[str, float] = {"x": across[1], "y": mark.value} if flat else {"x": mark.value, "y": up[1]}
    rule = {
        "data": {"values": [{**start, "x2": end["x"], "y2": end["y"]}]},
        "mark": {"type": "rule", "strokeDash": [5, 4], "color": MUTED},
        "encoding": {"x": x, "y": y, "x2": {"field": "x2"}, "y2": {"field": "y2"}},
    }
    first = mark.at == "start"
    away = 6 if first else -6
    place = {"dx": away, "dy": -7} if flat else {"angle": 270, "dx": away, "dy": 11}
    words = {"x": x, "y": y, "text": {"field": "text"}}
    row = {**(start if first else end), "text": mark.text}
    align = "left" if first else "right"
    return [rule, *text_layers([row], words, fontSize=11, fill=INK, align=align, **place)]
