"""The picture of a compiled layer: boxes from the first to the last that runs, lines for what feeds what."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from meshwright.hlo.graph import ComputationGraph
from meshwright.report.figure import INK, MUTED, Spec, headline, themed

COLORS = {
    "collective": "#F4C766",
    "matmul": "#A9D4EF",
    "attention": "#CDEBDF",
    "loop": "#E6D5E3",
    "other": "#ECECEC",
}
"""Kind of node -> its colour."""

BOX_PX = (202, 30)
GAP_PX = (14, 28)
BEND_PX = 26
"""Width that a line takes where it passes between boxes."""
MAX_CHARACTERS = 34
SWEEPS = 12


def graph_figure(graphs: Sequence[ComputationGraph], *, title: str) -> Spec:
    """A panel per computation, side by side, under one legend."""
    panels = [_panel(graph, legend=number == 0) for number, graph in enumerate(graphs)]
    told = "arrows lead to what needs a result; those that follow from others are left out"
    return themed({"title": headline(title, told), "hconcat": panels, "spacing": 60})


def _panel(graph: ComputationGraph, *, legend: bool) -> Spec:
    rows = _rows(graph)
    lanes, ways = _with_bends(graph, rows)
    _order(lanes, ways)
    boxes = {node.key for node in graph.nodes}
    size = (max(_width(lane, boxes) for lane in lanes), len(lanes) * (BOX_PX[1] + GAP_PX[1]))
    centre = _centres(lanes, boxes, size[0])
    scale = {
        "x": {"field": "x", "type": "quantitative", "axis": None, "scale": {"domain": [0, size[0]], "nice": False}},
        "y": {
            "field": "y",
            "type": "quantitative",
            "axis": None,
            "scale": {"domain": [0, size[1]], "nice": False, "reverse": True},
        },
    }
    steps = sum(node.num_instructions for node in graph.nodes)
    often = "once" if graph.times == 1 else f"{graph.times:,} times"
    told = f"{len(graph.nodes)} nodes of {steps:,} instructions, runs {often}"
    told += f" with {len(graph.alike)} alike" if graph.alike else ""
    name = graph.name if len(graph.name) <= 60 else f"{graph.name[:57]}..."
    return {
        "title": {**headline(name, told), "fontSize": 13, "offset": 8},
        "width": size[0],
        "height": size[1],
        "layer": [
            _lines(ways, centre, scale),
            _heads(graph, ways, centre, scale),
            *_boxes(graph, centre, scale, legend),
        ],
    }


def _width(lane: Sequence[str], boxes: set[str]) -> int:
    return sum(BOX_PX[0] + GAP_PX[0] if key in boxes else BEND_PX for key in lane)


def _centres(lanes: Sequence[Sequence[str]], boxes: set[str], width: int) -> dict[str, tuple[float, float]]:
    """Pixels of the middle of each box and bend; narrower rows are centred."""
    found = {}
    for row, lane in enumerate(lanes):
        x = (width - _width(lane, boxes)) / 2
        for key in lane:
            own = _width([key], boxes)
            found[key] = (x + own / 2, (row + 0.5) * (BOX_PX[1] + GAP_PX[1]))
            x += own
    return found


def _rows(graph: ComputationGraph) -> dict[str, int]:
    """The row of each node: below all that feed it, and one that nothing feeds just above what it feeds."""
    before: dict[str, list[str]] = {node.key: [] for node in graph.nodes}
    after: dict[str, list[str]] = {node.key: [] for node in graph.nodes}
    for a, b in graph.edges:
        before[b].append(a)
        after[a].append(b)
    rows: dict[str, int] = {}
    for node in graph.nodes:
        rows[node.key] = max((rows[one] + 1 for one in before[node.key]), default=0)
    for node in reversed(graph.nodes):
        if not before[node.key] and after[node.key]:
            rows[node.key] = min(rows[one] for one in after[node.key]) - 1
    lowest = min(rows.values())
    return {key: row - lowest for key, row in rows.items()}


def _with_bends(graph: ComputationGraph, rows: Mapping[str, int]) -> tuple[list[list[str]], list[list[str]]]:
    """(boxes and bends of each row, the way of each line): a line has a bend in every row that it crosses."""
    lanes: list[list[str]] = [[] for _ in range(max(rows.values()) + 1)]
    for key, row in rows.items():
        lanes[row].append(key)
    ways = []
    for a, b in graph.edges:
        bends = [f"{a}>{b}@{row}" for row in range(rows[a] + 1, rows[b])]
        for row, bend in enumerate(bends, rows[a] + 1):
            lanes[row].append(bend)
        ways.append([a, *bends, b])
    return lanes, ways


def _order(lanes: list[list[str]], ways: Sequence[Sequence[str]]) -> None:
    """Order boxes and bends within their rows by the mean place of their neighbours, down and up a few times.

    Source: the barycentre heuristic of Sugiyama, Tagawa and Toda (1981).
    """
    above: dict[str, list[str]] = {}
    below: dict[str, list[str]] = {}
    for way in ways:
        for a, b in pairwise(way):
            above.setdefault(b, []).append(a)
            below.setdefault(a, []).append(b)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        neighbours = above if down else below
        order = range(1, len(lanes)) if down else range(len(lanes) - 2, -1, -1)
        for row in order:
            beside = lanes[row - 1 if down else row + 1]
            # Places count from the middle of a row, as rows are drawn.
            at = {key: number - len(beside) / 2 for number, key in enumerate(beside)}
            own = {key: number - len(lanes[row]) / 2 for number, key in enumerate(lanes[row])}
            lanes[row].sort(key=lambda key: _mean([at[one] for one in neighbours.get(key, []) if one in at], own[key]))


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _lines(ways: Sequence[Sequence[str]], centre: Mapping[str, tuple[float, float]], scale: Spec) -> Spec:
    rows = []
    for number, way in enumerate(ways):
        for step, key in enumerate(way):
            x, y = centre[key]
            ends = (
                [y + BOX_PX[1] / 2]
                if step == 0
                else [y - BOX_PX[1] / 2 - 5]
                if step == len(way) - 1
                else [y - 12, y + 12]
            )
            rows += [{"way": number, "step": 2 * step + n, "x": x, "y": end} for n, end in enumerate(ends)]
    mark = {"type": "line", "color": MUTED, "strokeWidth": 1.1, "opacity": 0.75, "interpolate": "linear"}
    order = {"field": "step", "type": "quantitative"}
    return {
        "data": {"values": rows},
        "mark": mark,
        "encoding": {**scale, "detail": {"field": "way", "type": "nominal"}, "order": order},
    }


def _heads(
    graph: ComputationGraph, ways: Sequence[Sequence[str]], centre: Mapping[str, tuple[float, float]], scale: Spec
) -> Spec:
    fed = {way[-1] for way in ways}
    rows = [
        {"x": centre[node.key][0], "y": centre[node.key][1] - BOX_PX[1] / 2 - 4}
        for node in graph.nodes
        if node.key in fed
    ]
    mark = {"type": "point", "shape": "triangle-down", "filled": True, "color": MUTED, "size": 30, "opacity": 1}
    return {"data": {"values": rows}, "mark": mark, "encoding": scale}


def _boxes(graph: ComputationGraph, centre: Mapping[str, tuple[float, float]], scale: Spec, legend: bool) -> list[Spec]:
    rows = [
        {
            "x": centre[node.key][0] - BOX_PX[0] / 2,
            "x2": centre[node.key][0] + BOX_PX[0] / 2,
            "y": centre[node.key][1] - BOX_PX[1] / 2,
            "y2": centre[node.key][1] + BOX_PX[1] / 2,
            "mid_x": centre[node.key][0],
            "mid_y": centre[node.key][1],
            "kind": node.kind,
            "text": node.text if len(node.text) <= MAX_CHARACTERS else f"{node.text[: MAX_CHARACTERS - 2]}...",
        }
        for node in graph.nodes
    ]
    color = {
        "field": "kind",
        "type": "nominal",
        "scale": {"domain": list(COLORS), "range": list(COLORS.values())},
        "legend": {"orient": "top", "title": None, "symbolType": "square", "symbolSize": 140} if legend else None,
    }
    spans = {**scale, "x2": {"field": "x2"}, "y2": {"field": "y2"}}
    middle = {"x": {**scale["x"], "field": "mid_x"}, "y": {**scale["y"], "field": "mid_y"}}
    text = {"type": "text", "fontSize": 11, "baseline": "middle", "fill": INK}
    return [
        {
            "data": {"values": rows},
            "mark": {"type": "rect", "cornerRadius": 4, "stroke": "#B0B0B0", "strokeWidth": 0.8},
            "encoding": {**spans, "color": color},
        },
        {"data": {"values": rows}, "mark": text, "encoding": {**middle, "text": {"field": "text"}}},
    ]
