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
    first = counted.table.of(0, 0)
    merged = -(-max(first.kinds.shape[2:]) // MOST_BLOCKS)
    shown = first.resized(first.q_block * merged, first.kv_block * merged)
    rows, columns = (
        np.append(np.arange(0, length, block), length)
        for length, block in ((shown.q_len, shown.q_block), (shown.kv_len, shown.kv_block))
    )
    blocks = [
        cell(x, y, x2 - x, y2 - y, kind=[*COLORS][kind])
        for kinds, (y, y2) in zip(shown.kinds[0, 0], pairwise(rows.tolist()), strict=True)
        for kind, (x, x2) in zip(kinds, pairwise(columns.tolist()), strict=True)
    ]
    partial = (shown.kinds[0, 0] == PARTIAL).repeat(np.diff(rows), 0).repeat(np.diff(columns), 1)
    pairs = [] if counted.points is None else _runs(counted.points & partial)
    every = -(-max(shown.kinds.shape) // 8)
    style = {"grid": False, "domain": False, "tickColor": MUTED, "format": ",d"}
    across = alt.Axis(title="keys", orient="top", values=columns[::every].tolist(), **style)
    down = alt.Axis(title="queries", values=rows[::every].tolist(), **style)
    canvas = Canvas((0, shown.kv_len), (0, shown.q_len), across, down)
    colors = COLORS | ({PAIR: PALETTE[5]} if pairs else {})
    edge = max(0.4, min(1.5, 40 / len(blocks) ** 0.5))
    layers = [canvas.boxes(blocks).encode(color=color_by("kind", colors, orient="bottom", symbolSize=140))]
    if pairs:
        layers.append(canvas.boxes(pairs, color=PALETTE[5]))
    layers.append(canvas.boxes(blocks, filled=False, stroke="white", strokeWidth=edge))
    note = f"{first.sparsity():.1%} of blocks of {first.q_block} x {first.kv_block} are empty"
    note += " in the first head" * (counted.table.kinds.shape[1] > 1)
    note += f", {merged} x {merged} of them drawn as one" * (merged > 1)
    # a pair is a whole number of pixels of a picture at scale 2, or pairs would have seams
    side = SIDE_PX if counted.points is None else shown.kv_len * max(1, round(2 * SIDE_PX / shown.kv_len)) / 2
    return themed(panel(*layers, size=(side, side * shown.q_len / shown.kv_len)), title, note)


def _runs(points: np.ndarray) -> list[Datum]:
    """Returns boxes that cover the pairs, each a run of keys of one query."""
    steps = np.diff(np.pad(points.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    starts, ends = np.argwhere(steps == 1), np.argwhere(steps == -1)
    return [cell(int(x), int(y), int(x2 - x), 1, kind=PAIR) for (y, x), (_, x2) in zip(starts, ends, strict=True)]
