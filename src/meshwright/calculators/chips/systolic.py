"""A systolic array, cycle by cycle: weights held in the cells, activations from the left, sums going down.

Cell (r, c) of an M x N array holds W[r, c]. Row r of the array is fed element r of each input, one cycle later than
the row above it, and every cell hands its activation to the right and its sum down. Weights come from above, each
column one cycle later than the one to its left, so both fronts are diagonals. While one set of weights works, the next
can move in behind it (a second register in each cell). Source: How to Scale Your Model, section 2.5.2.
"""

import math

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.core.errors import InputError

Matrix = NDArray[np.int64]

MAX_CELL_UPDATES = 400_000_000
"""Bound on cells x cycles that are simulated: some seconds."""


class SystolicCycles(msgspec.Struct, frozen=True, kw_only=True):
    """Cycles of a product on an array: their sum is ``total``.

    load: until the first column holds its weights. fill: inputs enter, and have not reached the far cell yet. stream:
    they enter while the far cell works. drain: none enter any more, and the last are on their way to the far cell.
    ``useful_share`` is the share of cells x cycles that multiply numbers of the given matrices, the rest is bubble and
    padding; ``steady_share`` what it tends to with many tiles.
    """

    num_tiles: int
    load: int
    fill: int
    stream: int
    drain: int
    total: int
    useful_share: float
    steady_share: float


class SystolicRun(msgspec.Struct, frozen=True, kw_only=True):
    """What the simulated array gave: the product, the cycles it took, and how many cells worked in each of them."""

    product: Matrix
    cycles: int
    busy_cells: tuple[int, ...]


def tiles_of(depth: int, width: int, *, rows: int, cols: int) -> int:
    """Sets of weights: a [depth, width] matrix cut into blocks of the array's size."""
    return math.ceil(depth / rows) * math.ceil(width / cols)


def tile_period(num_inputs: int, *, rows: int) -> int:
    """Cycles from one set of weights to the next: the inputs stream by, but a set takes ``rows`` cycles to move in."""
    return max(num_inputs, rows)


def systolic_cycles(num_inputs: int, depth: int, width: int, *, rows: int, cols: int) -> SystolicCycles:
    """Cycles of [B, depth] x [depth, width] on an M x N array: M + (t - 1) max(B, M) + B + M + N - 2 for t tiles."""
    for name, size in (("inputs", num_inputs), ("rows", rows), ("columns", cols), ("depth", depth), ("width", width)):
        if size < 1:
            raise InputError(f"{name} {size} must be at least 1.")
    tiles = tiles_of(depth, width, rows=rows, cols=cols)
    front = rows + cols - 2
    streaming = (tiles - 1) * tile_period(num_inputs, rows=rows) + num_inputs
    total = rows + streaming + front
    return SystolicCycles(
        num_tiles=tiles,
        load=rows,
        fill=min(front, streaming),
        stream=max(0, streaming - front),
        drain=front,
        total=total,
        useful_share=num_inputs * depth * width / (rows * cols * total),
        steady_share=num_inputs / tile_period(num_inputs, rows=rows),
    )


# -- the machine ----------------------------------------------------------------------------------------


class SystolicArray:
    """The registers of all cells, and one method that moves everything by a cycle.

    Tiles follow each other: tile p's first input enters at cycle ``rows + p * period``.
    """

    def __init__(self, inputs: Matrix, weights: Matrix, *, rows: int, cols: int) -> None:
        self.rows, self.cols, self.num_inputs = rows, cols, inputs.shape[0]
        self.depth, self.width = weights.shape
        self.inputs, self.tiles = _cut(inputs, weights, rows, cols)
        self.period = tile_period(self.num_inputs, rows=rows)
        self.cycle = 0
        zeros = np.zeros((rows, cols), np.int64)
        self.activation, self.sums, self.held, self.moving = (zeros.copy() for _ in range(4))
        self.tag = zeros - 1  # which input a cell works on, counted over all tiles; -1 for none
        self.blocks_deep = math.ceil(self.depth / rows)
        self.result = np.zeros((self.num_inputs, len(self.tiles) // self.blocks_deep * cols), np.int64)

    @property
    def last_cycle(self) -> int:
        """Cycles until the last sum has left the array."""
        return systolic_cycles(self.num_inputs, self.depth, self.width, rows=self.rows, cols=self.cols).total

    def step(self) -> int:
        """Move everything by one cycle; returns how many cells multiplied."""
        tag, activation = self._enter()
        starts = (tag >= 0) & (tag % self.num_inputs == 0)
        # The first input of a tile makes its cell take over the weight that has just arrived.
        self.held = np.where(starts, self.moving, self.held)
        above = np.vstack([np.zeros((1, self.cols), np.int64), self.sums[:-1]])
        self.sums = np.where(tag >= 0, above + activation * self.held, 0)
        self.tag, self.activation = tag, activation
        self._collect()
        self._move_weights()
        self.cycle += 1
        return int((tag >= 0).sum())

    def input_at(self, cycle: int, row: int) -> int | None:
        """What enters a row at the left in a cycle; None for nothing."""
        entering = self._entering(cycle, row)
        return None if entering is None else self._input(*entering, row)

    def weight_at(self, cycle: int, col: int) -> int | None:
        """The weight that enters a column from above in a cycle; None for nothing."""
        tile, since = divmod(cycle - col, self.period)
        if not 0 <= tile < len(self.tiles) or since >= self.rows:
            return None
        return int(self.tiles[tile][self.rows - 1 - since, col])

    def _enter(self) -> tuple[Matrix, Matrix]:
        """Activations one cell to the right, and the next ones at the left edge."""
        tag, activation = np.roll(self.tag, 1, axis=1), np.roll(self.activation, 1, axis=1)
        for row in range(self.rows):
            entering = self._entering(self.cycle, row)
            tag[row, 0] = -1 if entering is None else entering[0] * self.num_inputs + entering[1]
            activation[row, 0] = 0 if entering is None else self._input(*entering, row)
        return tag, activation

    def _entering(self, cycle: int, row: int) -> tuple[int, int] | None:
        """Tile and number of the input that enters a row in a cycle."""
        tile, index = divmod(cycle - self.rows - row, self.period)
        return (tile, index) if 0 <= tile < len(self.tiles) and index < self.num_inputs else None

    def _input(self, tile: int, index: int, row: int) -> int:
        """Tiles run down the depth first, then to the next columns."""
        return int(self.inputs[tile % self.blocks_deep][index, row])

    def _collect(self) -> None:
        for col in range(self.cols):
            tag = self.tag[-1, col]
            if tag >= 0:
                tile, index = divmod(int(tag), self.num_inputs)
                self.result[index, tile // self.blocks_deep * self.cols + col] += self.sums[-1, col]

    def _move_weights(self) -> None:
        """Columns that are being loaded move down by one; the bottom row's weight comes first.

        A row below the front stands still: it may hold a weight that its cell has not taken over yet.
        """
        for col in range(self.cols):
            weight = self.weight_at(self.cycle, col)
            if weight is not None:
                since = (self.cycle - col) % self.period
                self.moving[1 : since + 1, col] = self.moving[:since, col].copy()
                self.moving[0, col] = weight


def simulate(inputs: Matrix, weights: Matrix, *, rows: int, cols: int) -> SystolicRun:
    """The product of two integer matrices, computed by moving numbers through the cells of an array."""
    array = SystolicArray(inputs, weights, rows=rows, cols=cols)
    if array.last_cycle * rows * cols > MAX_CELL_UPDATES:
        raise InputError(
            f"{array.last_cycle:,} cycles of {rows}x{cols} cells are too many to run. Give fewer inputs or weights."
        )
    busy = [array.step() for _ in range(array.last_cycle)]
    return SystolicRun(product=array.result[:, : array.width], cycles=array.cycle, busy_cells=tuple(busy))


def _cut(inputs: Matrix, weights: Matrix, rows: int, cols: int) -> tuple[list[Matrix], list[Matrix]]:
    """Inputs by block of depth, weights by tile in the order in which they run, padded with zeros."""
    depth, width = weights.shape
    deep, wide = math.ceil(depth / rows) * rows, math.ceil(width / cols) * cols
    padded_x = np.pad(inputs, ((0, 0), (0, deep - depth)))
    padded_w = np.pad(weights, ((0, deep - depth), (0, wide - width)))
    tiles = [padded_w[r : r + rows, c : c + cols] for c in range(0, wide, cols) for r in range(0, deep, rows)]
    return [padded_x[:, r : r + rows] for r in range(0, deep, rows)], tiles
