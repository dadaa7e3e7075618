"""The scatter plot of predicted against measured step times, on two logarithmic axes."""

from collections.abc import Sequence

from meshwright.accuracy.errors import Comparison
from meshwright.report.figure import MUTED, PALETTE, Figure, alt, themed
from meshwright.report.marks import log_axis, plot

SHAPES = ("circle", "triangle-up", "square")
SIDE_PX = 460
BAND = 0.2
"""Relative error up to which predictions are in the shaded band."""


def accuracy_figure(predictions: Sequence[Comparison], *, title: str, subtitle: str) -> Figure:
    """Draws predictions against measurements in seconds, the diagonal, and a band of 20% around it."""
    points = [
        {"measured": one.measured_s, "predicted": one.predicted_s, "group": one.group or "no group", "id": one.id}
        for one in predictions
    ]
    seconds = [value for one in predictions for value in (one.measured_s, one.predicted_s)]
    ends = min(seconds, default=0.1) / 1.3, max(seconds, default=10.0) * 1.3
    x = log_axis(alt.X, "measured", ends, "measured seconds of a step")
    y = log_axis(alt.Y, "predicted", ends, "predicted seconds of a step")
    equal = plot({"measured": end, "predicted": end, "low": end * (1 - BAND), "high": end * (1 + BAND)} for end in ends)
    # With more groups than colours, colours repeat with another shape. Equal domains merge both into one legend.
    groups = list(dict.fromkeys(point["group"] for point in points))
    colors = [PALETTE[number % len(PALETTE)] for number in range(len(groups))]
    shapes = [SHAPES[number // len(PALETTE) % len(SHAPES)] for number in range(len(groups))]
    chart = alt.layer(
        equal.mark_area(color="#DDDDDD", opacity=0.6, clip=True).encode(x=x, y="low:Q", y2="high"),
        equal.mark_line(color=MUTED, strokeWidth=1, clip=True).encode(x=x, y=y),
        plot(points)
        .mark_point(filled=True, size=32, opacity=0.65, clip=True)
        .encode(
            x=x,
            y=y,
            color=alt.Color("group:N", title=None, sort=None, scale=alt.Scale(domain=groups, range=colors)),
            tooltip=["id:N", "measured:Q", "predicted:Q"],
            shape=alt.Shape("group:N", title=None, sort=None, scale=alt.Scale(domain=groups, range=shapes)),
        ),
    )
    return themed(chart, title, subtitle, width=SIDE_PX, height=SIDE_PX)
