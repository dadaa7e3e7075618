"""The picture of a systolic array, a panel per cycle: weights enter from above, inputs from the left."""

from collections.abc import Sequence

import msgspec

from meshwright.core.errors import InputError
from meshwright.report.arrays.canvas import Canvas, cell
from meshwright.report.figure import MUTED, Figure, Layer, alt, panel, themed
from meshwright.report.marks import Datum, color_by

MAX_CELLS_A_SIDE = 32
MAX_SIDE_WITH_NUMBERS = 12
PANEL_PX = 300
COLUMNS = 3

KINDS: dict[str, str] = {
    "weight": "#A9D4EF",
    "weight comes": "#DCEDF8",
    "multiplies": "#4DB894",
    "input waits": "#CDEBDF",
    "result leaves": "#F4C766",
    "empty": "#F0F0F0",
}
"""State of a cell -> its colour."""

REACH = 2
"""Width of the border around the array in which entering and leaving numbers are shown, in cells."""


class BoundaryValue(msgspec.Struct, frozen=True, kw_only=True):
    """A number outside the array: its row or column, and its distance from the edge in cells (1 is adjacent)."""

    lane: int
    distance: int
    value: int


class SystolicFrame(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the array in one cycle.

    ``weights[r][c]`` is None before a weight arrives, ``activations[r][c]`` while the cell does not multiply.
    ``inputs`` are left of the array (lane = row), ``coming`` weights above and ``results`` below (lane = column).
    """

    cycle: int
    weights: tuple[tuple[int | None, ...], ...]
    activations: tuple[tuple[int | None, ...], ...]
    inputs: tuple[BoundaryValue, ...]
    coming: tuple[BoundaryValue, ...]
    results: tuple[BoundaryValue, ...]

    @property
    def num_busy(self) -> int:
        """Number of cells that multiply in this cycle."""
        return sum(value is not None for row in self.activations for value in row)


def systolic_figure(frames: Sequence[SystolicFrame], *, title: str, subtitle: str = "") -> Figure:
    """Draws a panel per frame; cells of small arrays carry their numbers, "3·2" for a cell that multiplies.

    Raises InputError for an array of more than 32 rows or columns.
    """
    num_rows, cols = len(frames[0].weights), len(frames[0].weights[0])
    if max(num_rows, cols) > MAX_CELLS_A_SIDE:
        raise InputError(f"{num_rows}x{cols} cells are too many for a picture. Draw at most {MAX_CELLS_A_SIDE} a side.")
    panels = [_panel(frame, num_rows, cols) for frame in frames]
    return themed(alt.concat(*panels, columns=min(COLUMNS, len(frames)), spacing=26), title, subtitle)


def _panel(frame: SystolicFrame, num_rows: int, num_cols: int) -> Layer:
    side_px = max(8, min(36, PANEL_PX // (max(num_rows, num_cols) + REACH)))
    canvas = Canvas((-REACH, num_cols), (-REACH, num_rows + REACH))
    cells = _cells(frame, num_rows)
    color = color_by("kind", KINDS, orient="top", symbolSize=140)
    layers = [
        canvas.boxes(cells, stroke="white", strokeWidth=1.5).encode(color=color),
        canvas.boxes([cell(0, 0, num_cols, num_rows)], filled=False, stroke=MUTED, strokeWidth=1.5),
        *([canvas.words(cells, fontSize=10)] if max(num_rows, num_cols) <= MAX_SIDE_WITH_NUMBERS else []),
    ]
    note = f"{frame.num_busy} of {num_rows * num_cols} cells multiply"
    size = (num_cols + REACH) * side_px, (num_rows + 2 * REACH) * side_px
    return panel(*layers, size=size, title=f"cycle {frame.cycle + 1}", note=note)


def _cells(frame: SystolicFrame, num_rows: int) -> list[Datum]:
    cells = []
    for row, (weights, activations) in enumerate(zip(frame.weights, frame.activations, strict=True)):
        for col, (weight, activation) in enumerate(zip(weights, activations, strict=True)):
            if activation is not None:
                cells.append(cell(col, row, kind="multiplies", text=f"{activation}·{weight}"))
            elif weight is not None:
                cells.append(cell(col, row, kind="weight", text=str(weight)))
            else:
                cells.append(cell(col, row, kind="empty", text=""))
    cells += [cell(-entry.distance, entry.lane, kind="input waits", text=str(entry.value)) for entry in frame.inputs]
    cells += [cell(entry.lane, -entry.distance, kind="weight comes", text=str(entry.value)) for entry in frame.coming]
    result_places = [(entry.lane, num_rows - 1 + entry.distance, entry.value) for entry in frame.results]
    return cells + [cell(x, y, kind="result leaves", text=str(value)) for x, y, value in result_places]
