"""The picture of a compiled layer: a box per node, below its inputs, and a line per edge."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from meshwright.hlo.graph import ComputationGraph
from meshwright.report.arrays.canvas import Canvas, cell
from meshwright.report.figure import INK, MUTED, Figure, Layer, alt, panel, themed
from meshwright.report.marks import color_by, plot

COLORS = {"collective": "#F4C766", "matmul": "#A9D4EF", "attention": "#CDEBDF", "loop": "#E6D5E3", "other": "#ECECEC"}
"""Kind of node -> its colour."""

BOX_PX = (202, 30)
GAP_PX = (14, 28)
BEND_PX = 26
"""Width that a line takes between two boxes."""
MAX_CHARACTERS = 34
SWEEPS = 12


def graph_figure(graphs: Sequence[ComputationGraph], *, title: str) -> Figure:
    """Draws a panel per computation, side by side, with one legend."""
    note = "an arrow leads to a user of a result; arrows that follow from others are left out"
    return themed(alt.hconcat(*map(_panel, graphs), spacing=60), title, note)


def _panel(graph: ComputationGraph) -> Layer:
    row_by_key = _rows(graph)
    lanes, paths = _with_bends(graph, row_by_key)
    _order(lanes, paths)
    node_keys = {node.key for node in graph.nodes}
    width, height = max(_width(lane, node_keys) for lane in lanes), len(lanes) * (BOX_PX[1] + GAP_PX[1])
    centre_by_key = _centres(lanes, node_keys, width)
    corners = {key: (x - BOX_PX[0] / 2, y - BOX_PX[1] / 2) for key, (x, y) in centre_by_key.items()}
    boxes = [
        cell(*corners[node.key], *BOX_PX, kind=node.kind, text=_cut(node.text, MAX_CHARACTERS)) for node in graph.nodes
    ]
    arrow_heads = [{"x": centre_by_key[key][0], "y": corners[key][1] - 4} for key in {path[-1]: None for path in paths}]
    canvas = Canvas((0, width), (0, height))
    color = color_by("kind", COLORS, orient="top", symbolSize=140)
    layers = [
        _lines(paths, centre_by_key, canvas),
        canvas.points(arrow_heads, shape="triangle-down", color=MUTED, size=30),
        canvas.boxes(boxes, cornerRadius=4, stroke="#B0B0B0", strokeWidth=0.8).encode(color=color),
        canvas.words(boxes, fontSize=11, fill=INK),
    ]
    num_instructions = sum(node.num_instructions for node in graph.nodes)
    runs_text = "once" if graph.times == 1 else f"{graph.times:,} times"
    note = f"{len(graph.nodes)} nodes of {num_instructions:,} instructions, runs {runs_text}"
    note += f" with {len(graph.alike)} alike" if graph.alike else ""
    return panel(*layers, size=(width, height), title=_cut(graph.name, 60), note=note)


def _cut(text: str, max_len: int) -> str:
    return text if len(text) <= max_len else f"{text[: max_len - 3]}..."


def _width(lane: Sequence[str], box_keys: set[str]) -> int:
    return sum(BOX_PX[0] + GAP_PX[0] if key in box_keys else BEND_PX for key in lane)


def _centres(lanes: Sequence[Sequence[str]], box_keys: set[str], width_px: int) -> dict[str, tuple[float, float]]:
    """Returns the centre of each box and bend in pixels; rows are centred."""
    centre_by_key = {}
    for row, lane in enumerate(lanes):
        left_x = (width_px - _width(lane, box_keys)) / 2
        for key in lane:
            box_width = _width([key], box_keys)
            centre_by_key[key] = (left_x + box_width / 2, (row + 0.5) * (BOX_PX[1] + GAP_PX[1]))
            left_x += box_width
    return centre_by_key


def _rows(graph: ComputationGraph) -> dict[str, int]:
    """Returns the row of each node: below all its inputs; a node without inputs is one above its uppermost user."""
    keys_before: dict[str, list[str]] = {node.key: [] for node in graph.nodes}
    keys_after: dict[str, list[str]] = {node.key: [] for node in graph.nodes}
    for source, user in graph.edges:
        keys_before[user].append(source)
        keys_after[source].append(user)
    row_by_key: dict[str, int] = {}
    for node in graph.nodes:
        row_by_key[node.key] = max((row_by_key[key] + 1 for key in keys_before[node.key]), default=0)
    for node in reversed(graph.nodes):
        if not keys_before[node.key] and keys_after[node.key]:
            row_by_key[node.key] = min(row_by_key[key] for key in keys_after[node.key]) - 1
    lowest_row = min(row_by_key.values())
    return {key: row - lowest_row for key, row in row_by_key.items()}


def _with_bends(graph: ComputationGraph, row_by_key: Mapping[str, int]) -> tuple[list[list[str]], list[list[str]]]:
    """Returns (keys of boxes and bends by row, keys along each line): a line has a bend in every row it crosses."""
    lanes: list[list[str]] = [[] for _ in range(max(row_by_key.values()) + 1)]
    for key, row in row_by_key.items():
        lanes[row].append(key)
    paths = []
    for source, user in graph.edges:
        bends = [f"{source}>{user}@{row}" for row in range(row_by_key[source] + 1, row_by_key[user])]
        for row, bend in enumerate(bends, row_by_key[source] + 1):
            lanes[row].append(bend)
        paths.append([source, *bends, user])
    return lanes, paths


def _order(lanes: list[list[str]], paths: Sequence[Sequence[str]]) -> None:
    """Sorts boxes and bends within their rows by the mean position of their neighbours, in alternating sweeps.

    Source: the barycentre heuristic of Sugiyama, Tagawa and Toda (1981).
    """
    keys_above: dict[str, list[str]] = {}
    keys_below: dict[str, list[str]] = {}
    for path in paths:
        for source, user in pairwise(path):
            keys_above.setdefault(user, []).append(source)
            keys_below.setdefault(source, []).append(user)
    for sweep in range(SWEEPS):
        is_downward = sweep % 2 == 0
        neighbours = keys_above if is_downward else keys_below
        row_order = range(1, len(lanes)) if is_downward else range(len(lanes) - 2, -1, -1)
        for row in row_order:
            next_lane = lanes[row - 1 if is_downward else row + 1]
            # Positions count from the middle of a row, as rows are centred.
            place_of = {key: index - len(next_lane) / 2 for index, key in enumerate(next_lane)}
            own_place_by_key = {key: index - len(lanes[row]) / 2 for index, key in enumerate(lanes[row])}
            places_by_key = {key: [place_of[n] for n in neighbours.get(key, []) if n in place_of] for key in lanes[row]}
            mean_place_by_key = {key: fmean(places or [own_place_by_key[key]]) for key, places in places_by_key.items()}
            lanes[row].sort(key=mean_place_by_key.__getitem__)


def _lines(paths: Sequence[Sequence[str]], centre_by_key: Mapping[str, tuple[float, float]], canvas: Canvas) -> Layer:
    """Draws lines from the bottom of a box through the bends to just above the box at the other end."""
    point_rows = []
    half_px = BOX_PX[1] / 2
    for path_index, path in enumerate(paths):
        points = [(x, y + dy) for x, y in (centre_by_key[key] for key in path) for dy in (-12, 12)]
        points[:2] = [(centre_by_key[path[0]][0], centre_by_key[path[0]][1] + half_px)]
        points[-2:] = [(centre_by_key[path[-1]][0], centre_by_key[path[-1]][1] - half_px - 5)]
        point_rows += [{"path": path_index, "step": vertex, "x": x, "y": y} for vertex, (x, y) in enumerate(points)]
    mark = plot(point_rows).mark_line(color=MUTED, strokeWidth=1.1, opacity=0.75)
    return mark.encode(**canvas.at(), detail="path:N", order="step:Q")
