"""What was measured: the loss of a run, and predicted against measured step times."""

import math
from collections.abc import Sequence

from meshwright.accuracy.errors import Comparison
from meshwright.core.errors import InputError
from meshwright.report.figure import INK, MUTED, PALETTE, Figure, alt, si_scale, themed
from meshwright.report.marks import color_by, labels, lines, log_axis, plot

MEAN_FRACTION = 0.05


def loss_figure(losses: Sequence[float], tokens: Sequence[float], *, subtitle: str = "") -> Figure:
    """Draws the loss of every step over the tokens seen so far; non-finite losses leave a gap.

    From 40 steps on, single losses are pale and a centred mean over 5% of all steps is drawn above them.
    """
    if len(losses) != len(tokens) or not losses:
        raise InputError(f"there are {len(losses)} losses and {len(tokens)} token counts. Give one of each per step.")
    scale, unit = si_scale(max(tokens), "")
    xs = [num_tokens / scale for num_tokens in tokens]
    reach = int(len(losses) * MEAN_FRACTION / 2)
    token_scale, loss_scale = alt.Scale(zero=True), alt.Scale(zero=False)
    x = alt.X("x:Q", title=f"tokens ({unit})" if unit else "tokens", scale=token_scale, axis=alt.Axis(tickCount=7))
    y = alt.Y("y:Q", title="cross-entropy (nats per token)", scale=loss_scale, axis=alt.Axis(tickCount=6))
    step_key, mean_key = "loss of a step", f"mean over {2 * reach + 1} steps"
    color_by_name = {step_key: PALETTE[4], mean_key: PALETTE[0]} if reach else {step_key: PALETTE[0]}
    color = color_by("name", color_by_name, orient="top-right", symbolType="stroke", symbolStrokeWidth=3)
    # A line through a single step is invisible: it gets a point.
    bold_style = {"strokeWidth": 2.4, "point": len(losses) == 1}
    pale_style = {"strokeWidth": 1.2, "opacity": 0.8}
    layers = lines({step_key: list(zip(xs, losses, strict=True))}, x, y, color, **(pale_style if reach else bold_style))
    if reach:
        layers += lines({mean_key: list(zip(xs, _centred_mean(losses, reach), strict=True))}, x, y, color, **bold_style)
    if math.isfinite(losses[-1]):
        last_row = [{"x": xs[-1], "y": losses[-1], "text": f"{losses[-1]:.3f}"}]
        layers.append(plot(last_row).mark_circle(size=60, color=MUTED, opacity=1).encode(x="x:Q", y="y:Q"))
        layers.append(labels(last_row, "x:Q", "y:Q", align="left", baseline="middle", dx=8, fill=INK))
    return themed(alt.layer(*layers), "Training loss", subtitle, width=600, height=340)


def _centred_mean(losses: Sequence[float], reach: int) -> list[float]:
    """Returns the mean over ``reach`` steps before and after each step; windows shrink symmetrically at the ends.

    A trailing mean would be above a falling curve. Windows with a non-finite loss give NaN.
    """
    means = []
    for step in range(len(losses)):
        reach_here = min(reach, step, len(losses) - 1 - step)
        window = losses[step - reach_here : step + reach_here + 1]
        means.append(math.fsum(window) / len(window) if all(map(math.isfinite, window)) else math.nan)
    return means


SHAPES = ("circle", "triangle-up", "square")
SIDE_PX = 460
BAND = 0.2
"""Relative error up to which predictions are in the shaded band."""


def accuracy_figure(predictions: Sequence[Comparison], *, title: str, subtitle: str) -> Figure:
    """Draws predictions against measurements in seconds, the diagonal, and a band of 20% around it."""
    points = [
        {"measured": p.measured_s, "predicted": p.predicted_s, "group": p.group or "no group", "id": p.id}
        for p in predictions
    ]
    seconds = [time_s for prediction in predictions for time_s in (prediction.measured_s, prediction.predicted_s)]
    ends = min(seconds, default=0.1) / 1.3, max(seconds, default=10.0) * 1.3
    x = log_axis(alt.X, "measured", ends, "measured seconds of a step")
    y = log_axis(alt.Y, "predicted", ends, "predicted seconds of a step")
    band_plot = plot({"measured": s, "predicted": s, "low": s * (1 - BAND), "high": s * (1 + BAND)} for s in ends)
    # With more groups than colours, colours repeat with another shape. Equal domains merge both into one legend.
    groups = list(dict.fromkeys(point["group"] for point in points))
    colors = [PALETTE[group_index % len(PALETTE)] for group_index in range(len(groups))]
    shapes = [SHAPES[group_index // len(PALETTE) % len(SHAPES)] for group_index in range(len(groups))]
    chart = alt.layer(
        band_plot.mark_area(color="#DDDDDD", opacity=0.6, clip=True).encode(x=x, y="low:Q", y2="high"),
        band_plot.mark_line(color=MUTED, strokeWidth=1, clip=True).encode(x=x, y=y),
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
