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
    most = max(max(len(tiles), len(tiles[0])) for tiles in frames[0].hbm.values())
    if most > MOST_A_SIDE:
        raise InputError(f"{most} tiles a side are too many to draw. Draw at most {MOST_A_SIDE}: a larger --block.")
    arrays_px = sum(_array_px(tiles) + GAP_PX for tiles in frames[0].hbm.values())
    a_line = max(4, (arrays_px + EDGE_PX) // CHIP_PX[0])
    lines = max(-(-len(frame.vmem) // a_line) for frame in frames)
    width = max(arrays_px, a_line * CHIP_PX[0] + 7) + EDGE_PX
    drawn = [_panel(frame, width, a_line, lines) for frame in frames]
    return themed(alt.concat(*drawn, columns=min(COLUMNS, len(frames)), spacing=24), title, subtitle)


def _array_px(tiles: Sequence[Sequence[str]]) -> int:
    """Width of an array: a matrix of tiles, or a column; one number a query is a thin column."""
    return (10 if len(tiles) < len(tiles[0]) else 24) if 1 in (len(tiles), len(tiles[0])) else 64


def _panel(frame: StreamFrame, width: int, a_line: int, vmem_lines: int) -> Layer:
    lines = {"HBM": ARRAY_PX + 16, "VMEM": vmem_lines * LINE_PX, "registers": len(frame.products) * LINE_PX}
    bands, names, tops, top, left = [], [], [], 0, EDGE_PX
    for band, height in lines.items():
        bands.append(cell(0, top, width, height + HEAD_PX + 4))
        names.append(cell(EDGE_PX, top + 10, 0, 0, text=band))
        tops.append(top + HEAD_PX)
        top += height + HEAD_PX + 10
    tiles, captions = [], []
    for name, states in frame.hbm.items():
        upright = states if len(states) > 1 else [[state] for state in states[0]]
        wide, high = _array_px(states) / len(upright[0]), ARRAY_PX / len(upright)
        for row, line in enumerate(upright):
            y = tops[0] + row * high
            tiles += [cell(left + n * wide, y, wide, high, kind=kind, text="") for n, kind in enumerate(line)]
        captions.append(cell(left, tops[0] + ARRAY_PX + 9, _array_px(states), 0, text=name))
        left += _array_px(states) + GAP_PX
    places = [(EDGE_PX + n % a_line * CHIP_PX[0], tops[1] + n // a_line * LINE_PX) for n in range(len(frame.vmem))]
    chips = list(zip(places, frame.vmem, strict=True))
    for down, operands in enumerate(frame.products):
        signs = ("x", "+=" if operands[2][1] == "accumulating" else "=", "")
        for place, (operand, sign) in enumerate(zip(operands, signs, strict=True)):
            x, y = EDGE_PX + place * (CHIP_PX[0] + 16), tops[2] + down * LINE_PX
            chips.append(((x, y), operand))
            captions.append(cell(x + CHIP_PX[0] - 3, y, 19, CHIP_PX[1], text=sign))
    tiles += [cell(x, y, CHIP_PX[0] - 3, CHIP_PX[1], kind=state, text=name) for (x, y), (name, state) in chips]
    canvas = Canvas((0, width), (0, top))
    color = color_by("kind", STATES, orient="top", symbolSize=140, columns=len(STATES))
    inks = [{**tile, "ink": ink_on(STATES[tile["kind"]])} for tile in tiles if tile["text"]]
    layers = [
        canvas.boxes(bands, color="#FAFAFA", stroke="#DDDDDD"),
        canvas.boxes(tiles, stroke="white", strokeWidth=1).encode(color=color),
        canvas.words(names, align="left", fontSize=11, fill=MUTED),
        canvas.words(captions, fontSize=10, fill=INK),
        canvas.words(inks, fontSize=10).encode(color=alt.Color("ink:N", scale=None)),
    ]
    return panel(*layers, size=(width, top), title=frame.title, note=frame.note)
