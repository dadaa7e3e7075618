"""The loss curve of a run."""

import math
from collections.abc import Sequence

from meshwright.core.errors import InputError
from meshwright.report.figure import INK, MUTED, PALETTE, Figure, alt, si_scale, themed
from meshwright.report.marks import color_by, labels, lines, plot

MEAN_FRACTION = 0.05


def loss_figure(losses: Sequence[float], tokens: Sequence[float], *, subtitle: str = "") -> Figure:
    """Draws the loss of every step over the tokens seen so far; non-finite losses leave a gap.

    From 40 steps on, single losses are pale and a centred mean over 5% of all steps is drawn above them.
    """
    if len(losses) != len(tokens) or not losses:
        raise InputError(f"there are {len(losses)} losses and {len(tokens)} token counts. Give one of each per step.")
    scale, unit = si_scale(max(tokens), "")
    seen = [count / scale for count in tokens]
    reach = int(len(losses) * MEAN_FRACTION / 2)
    from_zero, near = alt.Scale(zero=True), alt.Scale(zero=False)
    x = alt.X("x:Q", title=f"tokens ({unit})" if unit else "tokens", scale=from_zero, axis=alt.Axis(tickCount=7))
    y = alt.Y("y:Q", title="cross-entropy (nats per token)", scale=near, axis=alt.Axis(tickCount=6))
    single, mean = "loss of a step", f"mean over {2 * reach + 1} steps"
    colors = {single: PALETTE[4], mean: PALETTE[0]} if reach else {single: PALETTE[0]}
    color = color_by("name", colors, orient="top-right", symbolType="stroke", symbolStrokeWidth=3)
    # A line through a single step is invisible: it gets a point.
    strong = {"strokeWidth": 2.4, "point": len(losses) == 1}
    pale = {"strokeWidth": 1.2, "opacity": 0.8}
    layers = lines({single: list(zip(seen, losses, strict=True))}, x, y, color, **(pale if reach else strong))
    if reach:
        layers += lines({mean: list(zip(seen, _centred_mean(losses, reach), strict=True))}, x, y, color, **strong)
    if math.isfinite(losses[-1]):
        end = [{"x": seen[-1], "y": losses[-1], "text": f"{losses[-1]:.3f}"}]
        layers.append(plot(end).mark_circle(size=60, color=MUTED, opacity=1).encode(x="x:Q", y="y:Q"))
        layers.append(labels(end, "x:Q", "y:Q", align="left", baseline="middle", dx=8, fill=INK))
    return themed(alt.layer(*layers), "Training loss", subtitle, width=600, height=340)


def _centred_mean(losses: Sequence[float], reach: int) -> list[float]:
    """Returns the mean over ``reach`` steps before and after each step; windows shrink symmetrically at the ends.

    A trailing mean would be above a falling curve. Windows with a non-finite loss give NaN.
    """
    means = []
    for step in range(len(losses)):
        near = min(reach, step, len(losses) - 1 - step)
        window = losses[step - near : step + near + 1]
        means.append(math.fsum(window) / len(window) if all(map(math.isfinite, window)) else math.nan)
    return means
