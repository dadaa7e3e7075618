"""The picture of a collective, step by step: a panel per step, a row per device, a column per block."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from meshwright.report.arrays.canvas import Canvas, cell
from meshwright.report.figure import INK, MUTED, PALETTE, Figure, Layer, alt, panel, themed
from meshwright.report.marks import Datum, plot

MAX_DEVICES = 16
"""Most devices of a picture."""
PANEL_PX = 250
COLUMNS = 4
MIN_SIDE_WITH_ARROWS_PX = 24
SHADES = ("#E8F1F8", "#0072B2")
"""Colours of a block with one addend and with all of them."""
Numbers = Literal["sources", "addends", "blocks"]
MEANINGS: dict[Numbers, str] = {
    "sources": "The number in a block is the device whose data it is.",
    "addends": "The number in a block counts its addends; {} are the whole sum.",
    "blocks": "The number in a column counts the blocks in it; {} are all of them.",
}
WHITE_FROM = 0.6
"""Share of addends above which the text of a block is white."""


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """A block that a device sends to another."""

    source: int
    target: int
    block: int


class RingFrame(msgspec.Struct, frozen=True, kw_only=True):
    """The blocks of all devices after a step, and the moves of that step; the first frame has no moves.

    ``held[device][block]`` are the devices whose data is in that block: one for a gathered block, several for a sum,
    () for an absent block.
    """

    step: int
    moves: tuple[Move, ...]
    held: tuple[tuple[tuple[int, ...], ...], ...]
    phase: Literal["start", "gather", "reduce", "exchange"]


def ring_figure(frames: Sequence[RingFrame], *, title: str, subtitle: str = "", numbers: Numbers = "sources") -> Figure:
    """Draws a panel per frame: the blocks of each device, and the moves of the step.

    A block received in this step has a dark edge and, if all moves are between neighbours, an arrow from its sender.
    Its number is its source device (``sources``) or counts its addends or blocks, and larger counts are darker; see the
    subtitle.
    """
    num_devices = len(frames[0].held)
    panels = [_panel(frame, num_devices, counts=numbers != "sources") for frame in frames]
    subtitle = f"{subtitle} {MEANINGS[numbers].format(num_devices)}".strip()
    return themed(alt.concat(*panels, columns=min(COLUMNS, len(frames)), spacing=30), title, subtitle)


def _panel(frame: RingFrame, size: int, *, counts: bool) -> Layer:
    side = max(16, min(46, PANEL_PX // size))
    has_arrows = side >= MIN_SIDE_WITH_ARROWS_PX
    is_neighbourly = frame.moves and all((m.target - m.source) % size in (1, size - 1) for m in frame.moves)
    number_texts = [str(number) for number in range(size)]
    style = {"labelFontSize": 10, "titleFontSize": 10, "titlePadding": 3}
    canvas = Canvas.named(number_texts, number_texts, ("block", "device"), **style)
    rows = [
        _block(block, device, sources, size, counts=counts)
        for device, blocks in enumerate(frame.held)
        for block, sources in enumerate(blocks)
        if sources
    ]
    shade = alt.Color("share:Q", scale=alt.Scale(domain=[1 / size, 1], range=SHADES), legend=None)
    received_boxes = [cell(move.block, move.target) for move in frame.moves]
    number_marks = canvas.words(rows, fontSize=10 if has_arrows else 8).encode(color=alt.Color("ink:N", scale=None))
    layers = [
        canvas.boxes([cell(0, 0, size, size)], filled=False, stroke="#D0D0D0", strokeWidth=1),
        canvas.boxes(rows, stroke="white", strokeWidth=1).encode(color=shade if counts else alt.ColorValue(PALETTE[4])),
        canvas.boxes(received_boxes, filled=False, stroke=INK, strokeWidth=1.8),
        *(_arrows(frame.moves, size, canvas) if has_arrows and is_neighbourly else []),
        number_marks,
    ]
    action = "added to what is there" if frame.phase == "reduce" else "passed on"
    heading, note = f"step {frame.step}", f"{len(frame.moves)} blocks {action}"
    if frame.phase == "start":
        heading, note = "start", "before anything is sent"
    return panel(*layers, size=(size * side, size * side), title=heading, note=note).resolve_scale(color="independent")


def _block(block: int, device: int, sources: tuple[int, ...], num_devices: int, *, counts: bool) -> Datum:
    """Returns the cell of a block, labelled with its source device or with the number of devices whose data it has."""
    share, text = len(sources) / num_devices, str(len(sources) if counts else sources[0])
    return cell(block, device, share=share, text=text, ink="white" if counts and share > WHITE_FROM else INK)


def _arrows(moves: Sequence[Move], num_devices: int, canvas: Canvas) -> list[Layer]:
    """Draws an arrow from each sender's row to the receiver's; one that wraps around crosses the panel's edge."""
    line_rows, head_rows = [], []
    for move in moves:
        is_wrapped = abs(move.target - move.source) > 1
        is_down = (move.target > move.source) != is_wrapped
        # Blocks sent in both directions get lines beside each other.
        x = move.block + (0.86 if is_down else 0.14)
        start_y = move.source + 0.5
        end_y = move.target + (0.2 if is_down else 0.8)
        if is_wrapped:
            line_rows.append({"x": x, "y": start_y, "y2": num_devices if is_down else 0})
            start_y = 0 if is_down else num_devices
        line_rows.append({"x": x, "y": start_y, "y2": end_y})
        head_rows.append({"x": x, "y": end_y, "angle": 180 if is_down else 0})
    line_layer = plot(line_rows).mark_rule(color=MUTED, strokeWidth=1.2).encode(**canvas.at(), y2="y2")
    head_layer = canvas.points(head_rows, shape="triangle", color=MUTED, size=26)
    return [line_layer, head_layer.encode(angle=alt.Angle("angle:Q", scale=None))]
