"""The picture of an attention mask: its blocks of queries and keys, and for short sequences its pairs."""

from itertools import pairwise

import numpy as np

from meshwright.masks.table import PARTIAL, CountedTable
from meshwright.report.arrays.canvas import Canvas, cell
from meshwright.report.figure import MUTED, PALETTE, Figure, alt, panel, themed
from meshwright.report.marks import Datum, color_by

MOST_BLOCKS = 64
"""Blocks along a side that are drawn; of more several are one."""
SIDE_PX = 460
COLORS = {"empty": "#F0F0F0", "partial": "#F4C766", "full": PALETTE[0]}
PAIR = "visible pair of a partial block"


def mask_figure(counted: CountedTable, *, title: str) -> Figure:
    """Draws the blocks of the first sequence and head, and the pairs within partial blocks where they are known."""
    whole_table = counted.table.of(0, 0)
    blocks_merged = -(-max(whole_table.kinds.shape[2:]) // MOST_BLOCKS)
    table = whole_table.resized(whole_table.q_block * blocks_merged, whole_table.kv_block * blocks_merged)
    row_edges, column_edges = (
        np.append(np.arange(0, length, block), length)
        for length, block in ((table.q_len, table.q_block), (table.kv_len, table.kv_block))
    )
    block_boxes = [
        cell(x, y, x2 - x, y2 - y, kind=[*COLORS][kind])
        for kinds, (y, y2) in zip(table.kinds[0, 0], pairwise(row_edges.tolist()), strict=True)
        for kind, (x, x2) in zip(kinds, pairwise(column_edges.tolist()), strict=True)
    ]
    is_partial = (table.kinds[0, 0] == PARTIAL).repeat(np.diff(row_edges), 0).repeat(np.diff(column_edges), 1)
    pair_boxes = [] if counted.points is None else _runs(counted.points & is_partial)
    tick_stride = -(-max(table.kinds.shape) // 8)
    axis_style = {"grid": False, "domain": False, "tickColor": MUTED, "format": ",d"}
    x_axis = alt.Axis(title="keys", orient="top", values=column_edges[::tick_stride].tolist(), **axis_style)
    y_axis = alt.Axis(title="queries", values=row_edges[::tick_stride].tolist(), **axis_style)
    canvas = Canvas((0, table.kv_len), (0, table.q_len), x_axis, y_axis)
    color_by_kind = COLORS | ({PAIR: PALETTE[5]} if pair_boxes else {})
    edge_px = max(0.4, min(1.5, 40 / len(block_boxes) ** 0.5))
    layers = [canvas.boxes(block_boxes).encode(color=color_by("kind", color_by_kind, orient="bottom", symbolSize=140))]
    if pair_boxes:
        layers.append(canvas.boxes(pair_boxes, color=PALETTE[5]))
    layers.append(canvas.boxes(block_boxes, filled=False, stroke="white", strokeWidth=edge_px))
    note = f"{whole_table.sparsity():.1%} of blocks of {whole_table.q_block} x {whole_table.kv_block} are empty"
    note += " in the first head" * (counted.table.kinds.shape[1] > 1)
    note += f", {blocks_merged} x {blocks_merged} of them drawn as one" * (blocks_merged > 1)
    # a pair is a whole number of pixels of a picture at scale 2, or pairs would have seams
    side_px = SIDE_PX if counted.points is None else table.kv_len * max(1, round(2 * SIDE_PX / table.kv_len)) / 2
    return themed(panel(*layers, size=(side_px, side_px * table.q_len / table.kv_len)), title, note)


def _runs(points: np.ndarray) -> list[Datum]:
    """Returns boxes that cover the pairs, each a run of keys of one query."""
    edge_steps = np.diff(np.pad(points.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    starts, ends = np.argwhere(edge_steps == 1), np.argwhere(edge_steps == -1)
    return [cell(int(x), int(y), int(x2 - x), 1, kind=PAIR) for (y, x), (_, x2) in zip(starts, ends, strict=True)]
