"""Where the hours of a fleet that fails go, and how much of it trains over time."""

from collections.abc import Mapping
from itertools import accumulate

from meshwright.report.figure import INK, Figure, alt, panel, themed
from meshwright.report.marks import Points, color_by, labels, palette_of, plot, span, spans

WIDTH_PX, BAR_PX, LINE_PX = 620, 40, 70


def fleet_figure(
    lost: Mapping[str, Mapping[str, float]],
    kept: Mapping[str, float],
    training: Mapping[str, Points],
    *,
    title: str,
    subtitle: str = "",
) -> Figure:
    """Draws a bar of lost time for each policy, in percent by what took it, with the share that is ``kept`` behind it.

    ``training`` has for each policy (hours, share of the fleet that makes steps), drawn as areas below.
    """
    color_of = palette_of(dict.fromkeys(word for parts in lost.values() for word, share in parts.items() if share > 0))
    totals = {policy: sum(parts.values()) for policy, parts in lost.items()}
    largest = max(totals.values()) or 1.0
    rows = [
        span(end - share, end, f"{share:.1f}%", color_of[word], WIDTH_PX / largest, policy=policy, word=word)
        for policy, parts in lost.items()
        for (word, share), end in zip(parts.items(), accumulate(parts.values()), strict=True)
        if share > 0
    ]
    y = alt.Y("policy:N", sort=list(lost), title=None, axis=alt.Axis(ticks=False))
    x = alt.X("start:Q", title="lost, % of the fleet's hours", scale=alt.Scale(domain=[0, largest], nice=False))
    ends = [{"policy": policy, "end": totals[policy], "text": f"{share:.1%} kept"} for policy, share in kept.items()]
    bars = [
        spans(rows, y=y, x=x, color=color_by("word", color_of, orient="bottom", columns=4), band=0.7),
        labels(ends, "end:Q", y, align="left", baseline="middle", dx=6, fill=INK, fontWeight="bold"),
    ]
    pieces = [panel(*bars, size=(WIDTH_PX, BAR_PX * len(lost)))]
    for policy, points in training.items():
        is_last = policy == list(training)[-1]
        area = plot({"hours": hours, "share": share} for hours, share in points).mark_area(
            interpolate="step-after", color="#56B4E9", line={"color": "#0072B2", "strokeWidth": 1}
        )
        hours = alt.X("hours:Q", title="hours" if is_last else None, scale=alt.Scale(nice=False))
        training_share = alt.Y(
            "share:Q", title=None, scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format="%", tickCount=2)
        )
        pieces.append(
            panel(
                area.encode(x=hours, y=training_share),
                size=(WIDTH_PX, LINE_PX),
                title=f"{policy}: share that makes steps",
            )
        )
    return themed(alt.vconcat(*pieces, spacing=14).resolve_scale(color="independent"), title, subtitle)
