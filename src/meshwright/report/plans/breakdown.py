"""Where the time of a step goes: its parts as one bar, and below it the communication by itself, hidden or not."""

import math
from collections.abc import Mapping

from meshwright.core.errors import InputError
from meshwright.core.units import format_seconds
from meshwright.report.figure import INK, Spec, headline, si_scale, text_layers, themed

WIDTH_PX = 600
BAR_PX = 54
LABEL_FROM = 0.07
"""Share of the longest bar from which a part carries its own time."""

# Blues for work on the chip, warm colours for waiting, greens for the links: Okabe and Ito's hues.
COLORS: dict[str, str] = {
    "matmul": "#0072B2",
    "attention": "#56B4E9",
    "elementwise": "#A6D3F0",
    "loss head": "#332288",
    "optimizer": "#8C7AC0",
    "exposed communication": "#D55E00",
    "bubble": "#E69F00",
    "other": "#999999",
}
LINK_COLORS = ("#009E73", "#44AA99", "#7FCDB5", "#B5DFC9", "#117733", "#DDCC77", "#999933", "#CC79A7")
DARK = ("matmul", "loss head", "optimizer", "exposed communication")
STEP, LINKS = "step", "links alone"


def breakdown_figure(
    parts_s: Mapping[str, float], links_s: Mapping[str, float], *, title: str, subtitle: str = ""
) -> Spec:
    """Two bars on one axis: the parts that add up to the step, and the seconds of the collectives by themselves.

    ``links_s`` are by mesh axes. What of the second bar the first does not show as exposed is hidden behind compute.
    """
    bars = {STEP: parts_s, LINKS: links_s} if any(links_s.values()) else {STEP: parts_s}
    bad = [name for bar in bars.values() for name, value in bar.items() if not (math.isfinite(value) and value >= 0)]
    if bad or not any(parts_s.values()):
        raise InputError(f"There is no step to draw: {', '.join(bad) or 'every part'} is not a time. Give seconds > 0.")
    longest = max(sum(bar.values()) for bar in bars.values())
    scale, unit = si_scale(longest, "s")
    colors = COLORS | dict(zip(links_s, LINK_COLORS * (1 + len(links_s) // len(LINK_COLORS)), strict=False))
    rows = [row for name, bar in bars.items() for row in _segments(name, bar, scale, longest)]
    shown = [name for name in colors if any(row["part"] == name for row in rows)]
    y = {"field": "bar", "type": "nominal", "sort": list(bars), "title": None, "axis": {"ticks": False}}
    x = {"field": "start", "type": "quantitative", "title": f"time ({unit})", "axis": {"tickCount": 8}}
    color = {
        "field": "part",
        "type": "nominal",
        "scale": {"domain": shown, "range": [colors[name] for name in shown]},
        "legend": {"title": None, "orient": "bottom", "columns": 4, "symbolType": "square"},
    }
    totals = [
        {"bar": name, "middle": sum(bar.values()) / scale, "text": format_seconds(sum(bar.values()))}
        for name, bar in bars.items()
    ]
    middle = {"y": y, "x": {"field": "middle", "type": "quantitative"}, "text": {"field": "text"}}
    ink = {"field": "ink", "type": "nominal", "scale": None, "legend": None}
    return themed(
        {
            "title": headline(title, subtitle),
            "width": WIDTH_PX,
            "height": BAR_PX * len(bars),
            "layer": [
                {
                    "data": {"values": rows},
                    "mark": {"type": "bar", "height": {"band": 0.68}, "stroke": "white", "strokeWidth": 1},
                    "encoding": {"y": y, "x": x, "x2": {"field": "end"}, "color": color},
                },
                {
                    "data": {"values": [row for row in rows if row["text"]]},
                    "mark": {"type": "text", "fontSize": 11, "baseline": "middle"},
                    "encoding": {**middle, "color": ink},
                },
                *text_layers(totals, middle, align="left", baseline="middle", dx=6, fill=INK, fontWeight="bold"),
            ],
            "resolve": {"scale": {"color": "independent"}},
        }
    )


def _segments(bar: str, parts: Mapping[str, float], scale: float, longest: float) -> list[Spec]:
    """The parts of one bar from left to right, each with its time where there is room for it."""
    rows, start = [], 0.0
    for part, seconds in parts.items():
        if seconds == 0:
            continue
        end = start + seconds
        rows.append(
            {
                "bar": bar,
                "part": part,
                "start": start / scale,
                "end": end / scale,
                "middle": (start + end) / 2 / scale,
                "text": format_seconds(seconds) if seconds > LABEL_FROM * longest else "",
                "ink": "white" if part in DARK else INK,
            }
        )
        start = end
    return rows
