"""Timelines with two lanes: what the chip computes, and below it what its links carry."""

from collections.abc import Sequence

from meshwright.core.errors import InputError
from meshwright.core.units import format_seconds
from meshwright.cost.lanes import Streams
from meshwright.report.figure import INK, Spec, headline, si_scale, text_layers, themed

WIDTH_PX = 900
LANE_PX = 26
DIGIT_PX = 6.5

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
DARK = ("backward", "reduce-scatter", "all-reduce", "optimizer")


def two_streams_figure(pairs: Sequence[Streams], *, title: str, subtitle: str = "") -> Spec:
    """A pair of lanes per way, on one axis of time; each pair's total at its end. Colours say what a box is."""
    if not pairs or not all(pair.boxes for pair in pairs):
        raise InputError("There is nothing to draw on a lane. Give at least one way with its boxes.")
    longest = max(pair.total_s for pair in pairs)
    scale, unit = si_scale(longest, "s")
    whats = {box.what for pair in pairs for box in pair.boxes}
    shown = [what for what in COLORS if what in whats]
    color = {
        "field": "what",
        "type": "nominal",
        "scale": {"domain": shown, "range": [COLORS[what] for what in shown]},
        "legend": {"title": None, "orient": "bottom", "columns": len(shown), "symbolType": "square"},
    }
    x = {
        "field": "start",
        "type": "quantitative",
        "title": f"time ({unit})",
        "scale": {"domain": [0, longest / scale * 1.08], "nice": False},
        "axis": {"grid": True, "tickCount": 10},
    }
    # A band of its own between two pairs keeps them apart.
    lanes = [lane for number in range(len(pairs)) for lane in (f"{number} compute", f"{number} links", f"{number} gap")]
    y = {"field": "lane", "type": "nominal", "sort": lanes[:-1], "scale": {"domain": lanes[:-1]}, "title": None}
    hidden = {**y, "axis": {"labels": False, "ticks": False, "domain": False, "grid": False}}
    rows = [row for number, pair in enumerate(pairs) for row in _rows(number, pair, scale, longest)]
    numbers = {"field": "ink", "type": "nominal", "scale": None, "legend": None}
    place = {"y": hidden, "x": {"field": "middle", "type": "quantitative"}, "text": {"field": "text"}}
    return themed(
        {
            "title": headline(title, subtitle),
            "width": WIDTH_PX,
            "height": {"step": LANE_PX},
            "layer": [
                {
                    "data": {"values": rows},
                    "mark": {"type": "bar", "height": {"band": 0.9}, "stroke": "white", "strokeWidth": 0.3},
                    "encoding": {"y": hidden, "x": x, "x2": {"field": "end"}, "color": color},
                },
                {
                    "data": {"values": [row for row in rows if row["text"]]},
                    "mark": {"type": "text", "fontSize": 11, "baseline": "middle"},
                    "encoding": {**place, "color": numbers},
                },
                *_names(pairs, hidden),
                *_totals(pairs, hidden, scale),
            ],
            "resolve": {"scale": {"color": "independent"}},
        }
    )


def _rows(number: int, pair: Streams, scale: float, longest: float) -> list[Spec]:
    """The boxes of one pair; passes carry their letter and layer where that fits."""
    found = []
    for box in pair.boxes:
        letter = SHORT.get(box.what)
        text = f"{letter}{box.layer + 1}" if letter else ""
        wide = box.seconds / longest * WIDTH_PX > DIGIT_PX * len(text) + 4
        found.append(
            {
                "lane": f"{number} {box.lane}",
                "what": box.what,
                "start": box.start_s / scale,
                "end": box.end_s / scale,
                "middle": (box.start_s + box.end_s) / 2 / scale,
                "text": text if wide else "",
                "ink": "white" if box.what in DARK else INK,
            }
        )
    return found


def _names(pairs: Sequence[Streams], y: Spec) -> list[Spec]:
    """The name of each pair and of its lanes, left of the axis."""
    rows = [{"lane": f"{number} compute", "text": f"{pair.name}: compute"} for number, pair in enumerate(pairs)]
    rows += [{"lane": f"{number} links", "text": "links"} for number in range(len(pairs))]
    mark = {"type": "text", "align": "right", "baseline": "middle", "dx": -8, "fontSize": 12, "fill": INK}
    return [
        {"data": {"values": rows}, "mark": mark, "encoding": {"y": y, "x": {"value": 0}, "text": {"field": "text"}}}
    ]


def _totals(pairs: Sequence[Streams], y: Spec, scale: float) -> list[Spec]:
    rows = [
        {"lane": f"{number} compute", "middle": pair.total_s / scale, "text": format_seconds(pair.total_s)}
        for number, pair in enumerate(pairs)
    ]
    place = {"y": y, "x": {"field": "middle", "type": "quantitative"}, "text": {"field": "text"}}
    return text_layers(rows, place, align="left", baseline="middle", dx=6, fill=INK, fontWeight="bold")
