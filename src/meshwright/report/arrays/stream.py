"""The picture of a tiled loop: a panel per step, with the tiles in HBM, in VMEM and in registers from above."""

from collections.abc import Mapping, Sequence

import msgspec

from meshwright.core.errors import InputError
from meshwright.report.arrays.canvas import Canvas, cell
from meshwright.report.figure import INK, MUTED, PALETTE, Figure, Layer, alt, panel, themed
from meshwright.report.marks import color_by, ink_on

STATES = {
    **{"in HBM": "#CFCFCF", "arriving": PALETTE[4], "in use": PALETTE[0], "accumulating": PALETTE[1]},
    **{"leaving": PALETTE[2], "in registers alone": PALETTE[3], "not in HBM yet": "#F2F2F2"},
}
COLUMNS, MOST_A_SIDE = 4, 16
ARRAY_PX, GAP_PX, CHIP_PX, LINE_PX = 96, 12, (46, 19), 23
EDGE_PX, HEAD_PX = 10, 20


class StreamFrame(msgspec.Struct, frozen=True, kw_only=True):
    """One step: the state of every tile of every array in HBM (rows of columns), of every tile in VMEM by name, and the
    products as (left, right, result), each a name with its state."""

    title: str
    note: str
    hbm: Mapping[str, Sequence[Sequence[str]]]
    vmem: Sequence[tuple[str, str]]
    products: Sequence[Sequence[tuple[str, str]]]


def stream_figure(frames: Sequence[StreamFrame], *, title: str, subtitle: str = "") -> Figure:
    """Draws a panel per frame, four in a row. Raises InputError for an array of more than 16 tiles a side."""
    max_side = max(max(len(tiles), len(tiles[0])) for tiles in frames[0].hbm.values())
    if max_side > MOST_A_SIDE:
        raise InputError(f"{max_side} tiles a side are too many to draw. Draw at most {MOST_A_SIDE}: a larger --block.")
    arrays_px = sum(_array_px(tiles) + GAP_PX for tiles in frames[0].hbm.values())
    chips_per_line = max(4, (arrays_px + EDGE_PX) // CHIP_PX[0])
    vmem_lines = max(-(-len(frame.vmem) // chips_per_line) for frame in frames)
    width_px = max(arrays_px, chips_per_line * CHIP_PX[0] + 7) + EDGE_PX
    panels = [_panel(frame, width_px, chips_per_line, vmem_lines) for frame in frames]
    return themed(alt.concat(*panels, columns=min(COLUMNS, len(frames)), spacing=24), title, subtitle)


def _array_px(tiles: Sequence[Sequence[str]]) -> int:
    """Width of an array: a matrix of tiles, or a column; one number a query is a thin column."""
    return (10 if len(tiles) < len(tiles[0]) else 24) if 1 in (len(tiles), len(tiles[0])) else 64


def _panel(frame: StreamFrame, width: int, per_line: int, vmem_lines: int) -> Layer:
    height_of_band = {"HBM": ARRAY_PX + 16, "VMEM": vmem_lines * LINE_PX, "registers": len(frame.products) * LINE_PX}
    band_boxes, name_cells, tops, top_px, left_px = [], [], [], 0, EDGE_PX
    for band, height_px in height_of_band.items():
        band_boxes.append(cell(0, top_px, width, height_px + HEAD_PX + 4))
        name_cells.append(cell(EDGE_PX, top_px + 10, 0, 0, text=band))
        tops.append(top_px + HEAD_PX)
        top_px += height_px + HEAD_PX + 10
    tiles, caption_cells = [], []
    for name, tile_states in frame.hbm.items():
        tile_rows = tile_states if len(tile_states) > 1 else [[state] for state in tile_states[0]]
        wide, high = _array_px(tile_states) / len(tile_rows[0]), ARRAY_PX / len(tile_rows)
        for row, row_states in enumerate(tile_rows):
            y = tops[0] + row * high
            tiles += [cell(left_px + n * wide, y, wide, high, kind=kind, text="") for n, kind in enumerate(row_states)]
        caption_cells.append(cell(left_px, tops[0] + ARRAY_PX + 9, _array_px(tile_states), 0, text=name))
        left_px += _array_px(tile_states) + GAP_PX
    places = [(EDGE_PX + n % per_line * CHIP_PX[0], tops[1] + n // per_line * LINE_PX) for n in range(len(frame.vmem))]
    placed_chips = list(zip(places, frame.vmem, strict=True))
    for product_row, operands in enumerate(frame.products):
        signs = ("x", "+=" if operands[2][1] == "accumulating" else "=", "")
        for operand_index, (operand, sign) in enumerate(zip(operands, signs, strict=True)):
            x, y = EDGE_PX + operand_index * (CHIP_PX[0] + 16), tops[2] + product_row * LINE_PX
            placed_chips.append(((x, y), operand))
            caption_cells.append(cell(x + CHIP_PX[0] - 3, y, 19, CHIP_PX[1], text=sign))
    tiles += [cell(x, y, CHIP_PX[0] - 3, CHIP_PX[1], kind=state, text=name) for (x, y), (name, state) in placed_chips]
    canvas = Canvas((0, width), (0, top_px))
    color = color_by("kind", STATES, orient="top", symbolSize=140, columns=len(STATES))
    inked_texts = [{**tile, "ink": ink_on(STATES[tile["kind"]])} for tile in tiles if tile["text"]]
    layers = [
        canvas.boxes(band_boxes, color="#FAFAFA", stroke="#DDDDDD"),
        canvas.boxes(tiles, stroke="white", strokeWidth=1).encode(color=color),
        canvas.words(name_cells, align="left", fontSize=11, fill=MUTED),
        canvas.words(caption_cells, fontSize=10, fill=INK),
        canvas.words(inked_texts, fontSize=10).encode(color=alt.Color("ink:N", scale=None)),
    ]
    return panel(*layers, size=(width, top_px), title=frame.title, note=frame.note)
