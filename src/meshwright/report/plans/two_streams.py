"""Timelines with two lanes: the computation of a chip, and below it the communication on its links."""

from collections.abc import Sequence

from meshwright.core.units import format_seconds
from meshwright.cost.lanes import LaneSlices
from meshwright.report.figure import INK, Figure, alt, si_scale, themed
from meshwright.report.marks import color_by, labels, plot, span, spans

WIDTH_PX = 900
LANE_PX = 26

# Work in the hues of the pipeline's timeline, links in Tol's muted reds and blues.
COLORS: dict[str, str] = {
    "forward": "#E69F00",
    "backward": "#009E73",
    "optimizer": "#8C7AC0",
    "all-gather": "#56B4E9",
    "reduce-scatter": "#0072B2",
    "all-reduce": "#D55E00",
    "all-to-all": "#CC79A7",
    "permute": "#999999",
}
SHORT = {"forward": "F", "backward": "B"}


def two_streams_figure(pairs: Sequence[LaneSlices], *, title: str, subtitle: str = "") -> Figure:
    """Draws a pair of lanes per data-parallel variant on one time axis, with the total time at the end of each pair."""
    longest = max(pair.total_s for pair in pairs)
    scale, unit = si_scale(longest, "s")
    rows, names, totals = [], [], []
    for number, pair in enumerate(pairs):
        for box in pair.slices:
            # Only passes are labelled: with their letter and layer.
            text = f"{SHORT[box.what]}{box.layer + 1}" if box.what in SHORT else ""
            start, end, px = box.start_s / scale, box.end_s / scale, WIDTH_PX * scale / longest
            rows.append(span(start, end, text, COLORS[box.what], px, lane=f"{number} {box.lane}", what=box.what))
        names += [{"lane": f"{number} compute", "text": f"{pair.name}: compute"}]
        names += [{"lane": f"{number} links", "text": "links"}]
        totals.append({"lane": f"{number} compute", "end": pair.total_s / scale, "text": format_seconds(pair.total_s)})
    whats = {row["what"] for row in rows}
    shown = {what: color for what, color in COLORS.items() if what in whats}
    # An empty band separates the pairs.
    lanes = [f"{number} {lane}" for number in range(len(pairs)) for lane in ("compute", "links", "gap")][:-1]
    y = alt.Y("lane:N", sort=lanes, scale=alt.Scale(domain=lanes), axis=None)
    domain = alt.Scale(domain=[0, longest / scale * 1.08], nice=False)
    x = alt.X("start:Q", title=f"time ({unit})", scale=domain, axis=alt.Axis(tickCount=10))
    color = color_by("what", shown, orient="bottom", columns=len(shown))
    beside = plot(names).mark_text(align="right", baseline="middle", dx=-8, fontSize=12, fill=INK)
    chart = alt.layer(
        spans(rows, y=y, x=x, color=color, band=0.9, edge=0.3),
        beside.encode(y=y, x=alt.XValue(0), text="text:N"),
        labels(totals, "end:Q", y, align="left", baseline="middle", dx=6, fill=INK, fontWeight="bold"),
    )
    return themed(chart, title, subtitle, width=WIDTH_PX, height=alt.Step(LANE_PX))
