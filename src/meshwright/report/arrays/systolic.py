"""The picture of a systolic array at work: one panel per cycle, weights from above, inputs from the left."""

from collections.abc import Sequence
from typing import Any

import msgspec

from meshwright.core.errors import InputError
from meshwright.report.figure import MUTED, Spec, headline, themed

MAX_CELLS_A_SIDE = 32
MAX_SIDE_WITH_NUMBERS = 12
PANEL_PX = 300

KINDS: dict[str, str] = {
    "weight": "#A9D4EF",
    "weight comes": "#DCEDF8",
    "multiplies": "#4DB894",
    "input waits": "#CDEBDF",
    "result leaves": "#F4C766",
    "empty": "#F0F0F0",
}
"""What a cell may be, and its colour."""


REACH = 2
"""Cells around the array in which numbers that come and go are shown."""


class Passing(msgspec.Struct, frozen=True, kw_only=True):
    """A number outside the array: in which row or column, and how many cells from its edge (1 is next to it)."""

    lane: int
    distance: int
    value: int


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """The array in one cycle.

    ``weights[r][c]`` is None before a weight is there, ``activations[r][c]`` where the cell does not multiply.
    ``inputs`` wait at the left (lane = row), ``coming`` weights above and ``results`` below (lane = column).
    """

    cycle: int
    weights: tuple[tuple[int | None, ...], ...]
    activations: tuple[tuple[int | None, ...], ...]
    inputs: tuple[Passing, ...]
    coming: tuple[Passing, ...]
    results: tuple[Passing, ...]

    @property
    def num_busy(self) -> int:
        """Cells that multiply in this cycle."""
        return sum(value is not None for row in self.activations for value in row)


def systolic_figure(frames: Sequence[Frame], *, title: str, subtitle: str = "", columns: int = 3) -> Spec:
    """One panel per frame; numbers are written into the cells of small arrays, "3·2" where a cell multiplies.

    Raises InputError for an array of more than 32 rows or columns.
    """
    if not frames:
        raise InputError("There is no cycle to draw. Give at least one.")
    rows, cols = len(frames[0].weights), len(frames[0].weights[0])
    if max(rows, cols) > MAX_CELLS_A_SIDE:
        raise InputError(f"a picture of {rows}x{cols} cells shows nothing. Draw at most {MAX_CELLS_A_SIDE} a side.")
    return themed(
        {
            "title": headline(title, subtitle),
            "columns": min(columns, len(frames)),
            "spacing": 26,
            "concat": [_panel(frame, rows, cols) for frame in frames],
        }
    )


def _panel(frame: Frame, rows: int, cols: int) -> Spec:
    side = max(8, min(36, PANEL_PX // (max(rows, cols) + REACH)))
    x = _axis("x", [-REACH, cols])
    y = _axis("y", [-REACH, rows + REACH], reverse=True)
    cells = {
        "mark": {"type": "rect", "stroke": "white", "strokeWidth": 1.5},
        "encoding": {
            "x": x,
            "x2": {"field": "x2"},
            "y": y,
            "y2": {"field": "y2"},
            "color": {
                "field": "kind",
                "type": "nominal",
                "scale": {"domain": list(KINDS), "range": list(KINDS.values())},
                "legend": {"orient": "top", "title": None, "symbolType": "square", "symbolSize": 140},
            },
        },
    }
    edge = {"x": 0, "x2": cols, "y": 0, "y2": rows}
    outline = {
        "data": {"values": [edge]},
        "mark": {"type": "rect", "filled": False, "stroke": MUTED, "strokeWidth": 1.5},
        "encoding": {"x": x, "x2": {"field": "x2"}, "y": y, "y2": {"field": "y2"}},
    }
    layers: list[Spec] = [cells, outline]
    if max(rows, cols) <= MAX_SIDE_WITH_NUMBERS:
        at = {"x": {**x, "field": "centre_x"}, "y": {**y, "field": "centre_y"}}
        layers.append({"mark": {"type": "text", "fontSize": 10}, "encoding": {**at, "text": {"field": "text"}}})
    return {
        "title": {**headline(f"cycle {frame.cycle + 1}", _words(frame, rows * cols)), "fontSize": 13, "offset": 4},
        "width": (cols + REACH) * side,
        "height": (rows + 2 * REACH) * side,
        "data": {"values": _cells(frame, rows, cols)},
        "layer": layers,
    }


def _words(frame: Frame, num_cells: int) -> str:
    return f"{frame.num_busy} of {num_cells} cells multiply"


def _cells(frame: Frame, rows: int, cols: int) -> list[dict[str, Any]]:
    """One row of data per cell inside and around the array."""
    found = []
    for row in range(rows):
        for col in range(cols):
            weight, activation = frame.weights[row][col], frame.activations[row][col]
            if activation is not None:
                found.append(_cell(col, row, "multiplies", f"{activation}·{weight}"))
            else:
                found.append(_cell(col, row, "empty" if weight is None else "weight", _text(weight)))
    found += [_cell(-one.distance, one.lane, "input waits", str(one.value)) for one in frame.inputs]
    found += [_cell(one.lane, -one.distance, "weight comes", str(one.value)) for one in frame.coming]
    found += [_cell(one.lane, rows - 1 + one.distance, "result leaves", str(one.value)) for one in frame.results]
    return found


def _text(value: int | None) -> str:
    return "" if value is None else str(value)


def _cell(x: int, y: int, kind: str, text: str) -> dict[str, Any]:
    return {
        "x": x, "x2": x + 1, "y": y, "y2": y + 1, "centre_x": x + 0.5, "centre_y": y + 0.5, "kind": kind, "text": text,
    }  # fmt: skip


def _axis(channel: str, domain: list[int], *, reverse: bool = False) -> Spec:
    scale = {"domain": domain, "nice": False, "reverse": reverse}
    return {"field": channel, "type": "quantitative", "axis": None, "scale": scale}
