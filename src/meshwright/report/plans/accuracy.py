"""Measured against predicted step times: one point per measurement, on two logarithmic axes."""

from collections.abc import Sequence

from meshwright.accuracy.errors import Comparison
from meshwright.report.figure import PALETTE, Spec, headline, themed

SHAPES = ("circle", "triangle-up", "square")
SIDE = 460
BAND = 0.2
"""The shaded band: predictions within a fifth of the measurement."""


def accuracy_figure(predictions: Sequence[Comparison], *, title: str, subtitle: str) -> Spec:
    """A scatter of predictions over measurements in seconds, the diagonal, and a band of 20% around it."""
    points = [
        {"measured": one.measured_s, "predicted": one.predicted_s, "group": one.group or "no group", "id": one.id}
        for one in predictions
    ]
    seconds = [value for one in predictions for value in (one.measured_s, one.predicted_s)]
    low, high = min(seconds, default=0.1) / 1.3, max(seconds, default=10.0) * 1.3
    line = [{"x": x, "y": x, "low": x * (1 - BAND), "high": x * (1 + BAND)} for x in (low, high)]
    scale = {"type": "log", "domain": [low, high], "nice": False}
    x_axis = {"field": "x", "type": "quantitative", "scale": scale}
    layers = [
        {
            "data": {"values": line},
            "mark": {"type": "area", "color": "#DDDDDD", "opacity": 0.6, "clip": True},
            "encoding": {
                "x": x_axis,
                "y": {"field": "low", "type": "quantitative", "scale": scale},
                "y2": {"field": "high"},
            },
        },
        {
            "data": {"values": line},
            "mark": {"type": "line", "color": "#767676", "strokeWidth": 1, "clip": True},
            "encoding": {"x": x_axis, "y": {"field": "y", "type": "quantitative", "scale": scale}},
        },
        {
            "data": {"values": points},
            "mark": {"type": "point", "filled": True, "size": 32, "opacity": 0.65, "clip": True},
            "encoding": {
                "x": {
                    "field": "measured",
                    "type": "quantitative",
                    "scale": scale,
                    "title": "measured seconds of a step",
                },
                "y": {
                    "field": "predicted",
                    "type": "quantitative",
                    "scale": scale,
                    "title": "predicted seconds of a step",
                },
                **_marks(predictions),
                "tooltip": [{"field": "id"}, {"field": "measured"}, {"field": "predicted"}],
            },
        },
    ]
    return themed({"title": headline(title, subtitle), "width": SIDE, "height": SIDE, "layer": layers})


def _marks(predictions: Sequence[Comparison]) -> Spec:
    """Colour and shape of each group: with more groups than colours, a second round of colours has another shape.

    Both have the same domain, so that they share one legend.
    """
    groups = list(dict.fromkeys(one.group or "no group" for one in predictions))
    ranges = {
        "color": [PALETTE[number % len(PALETTE)] for number in range(len(groups))],
        "shape": [SHAPES[number // len(PALETTE) % len(SHAPES)] for number in range(len(groups))],
    }
    field = {"field": "group", "type": "nominal", "title": None, "sort": None}
    return {channel: {**field, "scale": {"domain": groups, "range": found}} for channel, found in ranges.items()}
