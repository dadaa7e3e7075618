"""Where the hours of a fleet that fails go, and how much of it makes steps over time."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from meshwright.report.figure import INK, Figure, Layer, alt, panel, themed
from meshwright.report.marks import color_by, labels, palette_of, plot, span, spans
from meshwright.simulate.fleet.outcome import PolicyOutcome
from meshwright.simulate.fleet.run import WORDS, WORK

WIDTH_PX, BAR_PX, AREA_PX = 620, 40, 70
POINTS = 600
"""Points of an area."""


def fleet_figure(
    outcomes: Sequence[PolicyOutcome], *, duration_s: float, shown_s: float, title: str, subtitle: str = ""
) -> Figure:
    """Draws a bar of lost time for each policy, in percent of the fleet's hours by what took it, and below for each the
    share of the fleet that makes steps over the first ``shown_s``."""
    lost_words = [word for word in WORDS if word != WORDS[WORK] and any(one.seconds[word] > 0 for one in outcomes)]
    color_of = palette_of(word.replace("_", " ") for word in lost_words)
    rows, ends = [], []
    largest = max(100 * (1 - outcome.goodput.mean) for outcome in outcomes) or 1.0
    for outcome in outcomes:
        shares = [100 * outcome.seconds[word] / duration_s for word in lost_words]
        for (word, color), share, end in zip(color_of.items(), shares, accumulate(shares), strict=True):
            box = span(end - share, end, f"{share:.1f}%", color, WIDTH_PX / largest, policy=outcome.policy, word=word)
            rows += [box] if share > 0 else []
        ends.append({"policy": outcome.policy, "end": sum(shares), "text": f"{outcome.goodput.mean:.1%} kept"})
    y = alt.Y("policy:N", sort=[outcome.policy for outcome in outcomes], title=None, axis=alt.Axis(ticks=False))
    x = alt.X("start:Q", title="lost, % of the fleet's hours", scale=alt.Scale(domain=[0, largest], nice=False))
    bars = [
        spans(rows, y=y, x=x, color=color_by("word", color_of, orient="bottom", columns=4), band=0.7),
        labels(ends, "end:Q", y, align="left", baseline="middle", dx=6, fill=INK, fontWeight="bold"),
    ]
    panels = [panel(*bars, size=(WIDTH_PX, BAR_PX * len(outcomes))), *(_area(one, shown_s) for one in outcomes)]
    return themed(alt.vconcat(*panels, spacing=10).resolve_scale(color="independent"), title, subtitle)


def _area(outcome: PolicyOutcome, shown_s: float) -> Layer:
    """Draws the share of the fleet that makes steps over the first ``shown_s``."""
    edges = np.linspace(0, shown_s, POINTS + 1)
    starts, ends, shares = np.array([span for span in outcome.trained if span[0] < shown_s] or [(0.0, 0.0, 0.0)]).T
    trained_s = np.clip(edges[:, None] - starts, 0, ends - starts) @ shares
    rows = [
        {"hours": hours, "share": share}
        for hours, share in zip(
            (edges[1:] / 3600).tolist(), (np.diff(trained_s) / np.diff(edges)).tolist(), strict=True
        )
    ]
    area = plot(rows).mark_area(interpolate="step-after", color="#56B4E9", line={"color": "#0072B2", "strokeWidth": 1})
    x = alt.X("hours:Q", title=None, scale=alt.Scale(nice=False))
    y = alt.Y("share:Q", title=None, scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format="%", tickCount=2))
    return panel(
        area.encode(x=x, y=y), size=(WIDTH_PX, AREA_PX), title=f"{outcome.policy}: share that makes steps, over hours"
    )
