"""The picture of a collective along a ring: one panel per step, a row per device, a column per block."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from meshwright.core.errors import InputError
from meshwright.report.figure import INK, MUTED, PALETTE, Spec, headline, themed

MAX_DEVICES = 16
PANEL_PX = 250
MIN_SIDE_WITH_ARROWS_PX = 24
SHADES = ("#E8F1F8", "#0072B2")
"""Of a block that holds one device's data, and of one that holds all of it."""


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """One block on its way from a device to its neighbour."""

    source: int
    target: int
    block: int


class RingFrame(msgspec.Struct, frozen=True, kw_only=True):
    """What all devices hold after a step, and the moves of that step; the first frame has none.

    ``held[device][block]`` are the devices whose data is in that block there: itself for a gathered block, several
    for a sum, () for nothing.
    """

    step: int
    moves: tuple[Move, ...]
    held: tuple[tuple[tuple[int, ...], ...], ...]
    phase: Literal["start", "gather", "reduce"]


def ring_figure(
    frames: Sequence[RingFrame], *, title: str, subtitle: str = "", sums: bool = False, columns: int = 4
) -> Spec:
    """One panel per frame: which device holds which block, how much of a sum it is, and what has just come.

    A block that came in this step has a dark edge and an arrow from its sender; the words say whose data it is. With
    ``sums`` a block is the darker the more of its addends are in it.
    """
    if not frames:
        raise InputError("There is no step to draw. Give at least one.")
    size = len(frames[0].held)
    if size > MAX_DEVICES:
        raise InputError(f"a picture of {size} devices shows nothing. Draw an axis of at most {MAX_DEVICES}.")
    return themed(
        {
            "title": headline(title, subtitle),
            "columns": min(columns, len(frames)),
            "spacing": 30,
            "concat": [_panel(frame, size, sums=sums) for frame in frames],
        }
    )


def _panel(frame: RingFrame, size: int, *, sums: bool) -> Spec:
    side = max(16, min(46, PANEL_PX // size))
    x, y = _axis("x", size, "block"), _axis("y", size, "device")
    spans = {"x": x, "x2": {"field": "x2"}, "y": y, "y2": {"field": "y2"}}
    shade = {
        "field": "share",
        "type": "quantitative",
        "scale": {"domain": [1 / size, 1], "range": list(SHADES)},
        "legend": None,
    }
    cells = {
        "data": {"values": _cells(frame, size)},
        "mark": {"type": "rect", "stroke": "white", "strokeWidth": 1},
        "encoding": {**spans, "color": shade if sums else {"value": PALETTE[4]}},
    }
    grid = {
        "data": {"values": [{"x": 0, "x2": size, "y": 0, "y2": size}]},
        "mark": {"type": "rect", "filled": False, "stroke": "#D0D0D0", "strokeWidth": 1},
        "encoding": spans,
    }
    came = {
        "data": {"values": [_box(move.block, move.target) for move in frame.moves]},
        "mark": {"type": "rect", "filled": False, "stroke": INK, "strokeWidth": 1.8},
        "encoding": spans,
    }
    place = {"x": {**x, "field": "centre_x"}, "y": {**y, "field": "centre_y"}, "text": {"field": "text"}}
    light = {"condition": {"test": "datum.share > 0.6", "value": "white"}, "value": INK}
    words = {
        "data": {"values": _cells(frame, size)},
        "mark": {"type": "text", "fontSize": 10 if side >= MIN_SIDE_WITH_ARROWS_PX else 8, "baseline": "middle"},
        "encoding": {**place, "color": light if sums else {"value": INK}},
    }
    arrows = _arrows(frame.moves, size, x, y) if side >= MIN_SIDE_WITH_ARROWS_PX else []
    return {
        "title": {**headline(_name(frame), _count(frame)), "fontSize": 13, "subtitleFontSize": 11, "offset": 6},
        "width": size * side,
        "height": size * side,
        "layer": [grid, cells, came, *arrows, words],
    }


def _name(frame: RingFrame) -> str:
    return "start" if frame.phase == "start" else f"step {frame.step}"


def _count(frame: RingFrame) -> str:
    if frame.phase == "start":
        return "before anything is sent"
    done = "added to what is there" if frame.phase == "reduce" else "passed on"
    return f"{len(frame.moves)} blocks {done}"


def _cells(frame: RingFrame, size: int) -> list[Spec]:
    """A rectangle for every block that is somewhere, with its words."""
    return [
        {
            **_box(block, device),
            "centre_x": block + 0.5,
            "centre_y": device + 0.5,
            "share": len(held) / size,
            "text": _words(held, size),
        }
        for device, row in enumerate(frame.held)
        for block, held in enumerate(row)
        if held
    ]


def _words(held: tuple[int, ...], size: int) -> str:
    """Whose data it is: its number, "sum" for that of all, else how many there are in it."""
    if len(held) == 1:
        return str(held[0])
    return "sum" if len(held) == size else f"{len(held)} of {size}" if size <= 6 else str(len(held))


def _box(block: int, device: int) -> Spec:
    return {"x": block, "x2": block + 1, "y": device, "y2": device + 1}


def _arrows(moves: Sequence[Move], size: int, x: Spec, y: Spec) -> list[Spec]:
    """A line from each sender's row to the receiver's, with a head; round the ring it leaves by the edge."""
    rows, heads = [], []
    for move in moves:
        wraps = abs(move.target - move.source) > 1
        down = (move.target > move.source) != wraps
        # Blocks that go both ways from one device would else lie on one line.
        across = move.block + (0.86 if down else 0.14)
        start = move.source + 0.5
        end = move.target + (0.2 if down else 0.8)
        if wraps:
            rows.append({"x": across, "y": start, "y2": size if down else 0})
            start = 0 if down else size
        rows.append({"x": across, "y": start, "y2": end})
        heads.append({"x": across, "y": end, "angle": 180 if down else 0})
    line = {
        "data": {"values": rows},
        "mark": {"type": "rule", "color": MUTED, "strokeWidth": 1.2},
        "encoding": {"x": x, "y": y, "y2": {"field": "y2"}},
    }
    head = {
        "data": {"values": heads},
        "mark": {"type": "point", "shape": "triangle", "filled": True, "color": MUTED, "size": 26, "opacity": 1},
        "encoding": {"x": x, "y": y, "angle": {"field": "angle", "type": "quantitative", "scale": None}},
    }
    return [line, head] if moves else []


def _axis(channel: str, size: int, title: str) -> Spec:
    axis: Spec = {
        "title": title,
        "values": [at + 0.5 for at in range(size)],
        "labelExpr": "floor(datum.value)",
        "labelOverlap": False,
        "labelFontSize": 10,
        "titleFontSize": 10,
        "titlePadding": 3,
        "grid": False,
        "domain": False,
        "ticks": False,
    }
    if channel == "x":
        axis |= {"orient": "top", "labelAngle": 0}
    scale = {"domain": [0, size], "nice": False, "reverse": channel == "y", "zero": False}
    return {"field": channel, "type": "quantitative", "scale": scale, "axis": axis}
