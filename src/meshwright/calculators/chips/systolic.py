"""A weight-stationary systolic array, cycle by cycle: activations move right, sums move down.

Cell (r, c) of an M x N array stores W[r, c]. Row r receives element r of each input, one cycle later than the row
above; each cell passes its activation to the right and its sum down. Weights enter from the top, each column one cycle
later than the column to its left, so both fronts are diagonals. The next weights move in while the current ones are
used (a second register in each cell). Source: How to Scale Your Model, section 2.5.2.
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
    """Cycles of a product on an array, by phase; ``total`` is their sum.

    load: until the first column has its weights. fill: inputs enter, the far cell does not work yet. stream: inputs
    enter while the far cell works. drain: the last inputs reach the far cell, none enters. ``useful_share`` is the
    share of cells x cycles that multiply numbers of the given matrices, the rest is bubble and padding;
    ``steady_share`` is its limit for many tiles.
    """

    num_tiles: int
    load: int
    fill: int
    stream: int
    drain: int
    total: int
    useful_share: float
    steady_share: float


def tile_period(num_inputs: int, *, rows: int) -> int:
    """Returns cycles from one set of weights to the next: inputs stream by, but a set takes ``rows`` to move in."""
    return max(num_inputs, rows)


def systolic_cycles(num_inputs: int, depth: int, width: int, *, rows: int, cols: int) -> SystolicCycles:
    """Returns cycles of [B, depth] x [depth, width] on M x N cells: M + (t - 1) max(B, M) + B + M + N - 2, t tiles.
    Raises InputError for a size below 1."""
    for name, size in (("inputs", num_inputs), ("rows", rows), ("columns", cols), ("depth", depth), ("width", width)):
        if size < 1:
            raise InputError(f"{name} {size} must be at least 1.")
    num_tiles = math.ceil(depth / rows) * math.ceil(width / cols)
    front_cycles = rows + cols - 2
    streaming_cycles = (num_tiles - 1) * tile_period(num_inputs, rows=rows) + num_inputs
    total_cycles = rows + streaming_cycles + front_cycles
    return SystolicCycles(
        num_tiles=num_tiles,
        load=rows,
        fill=min(front_cycles, streaming_cycles),
        stream=max(0, streaming_cycles - front_cycles),
        drain=front_cycles,
        total=total_cycles,
        useful_share=num_inputs * depth * width / (rows * cols * total_cycles),
        steady_share=num_inputs / tile_period(num_inputs, rows=rows),
    )


# -- the machine ----------------------------------------------------------------------------------------


class SystolicArray:
    """The registers of all cells, and one method that moves everything by a cycle.

    Tiles follow each other, down the depth first, then to the next columns: tile p's first input enters at cycle
    ``rows + p * period``. Matrices are padded with zeros to whole tiles.
    """

    def __init__(self, inputs: Matrix, weights: Matrix, *, rows: int, cols: int) -> None:
        (self.num_inputs, depth), (_, width) = inputs.shape, weights.shape
        self.rows, self.cols = rows, cols
        row_tiles, col_tiles = math.ceil(depth / rows), math.ceil(width / cols)
        padded = np.pad(inputs, ((0, 0), (0, row_tiles * rows - depth)))
        self._inputs = padded.reshape(self.num_inputs, row_tiles, rows)
        padded = np.pad(weights, ((0, row_tiles * rows - depth), (0, col_tiles * cols - width)))
        self._tiles = padded.reshape(row_tiles, rows, col_tiles, cols).transpose(2, 0, 1, 3).reshape(-1, rows, cols)
        self._period = tile_period(self.num_inputs, rows=rows)
        self.last_cycle = systolic_cycles(self.num_inputs, depth, width, rows=rows, cols=cols).total
        self.cycle = 0
        zero_cells = np.zeros((rows, cols), np.int64)
        self.activation = self.sums = self.held = self.moving = zero_cells
        self.tag = zero_cells - 1  # which input a cell works on, counted over all tiles; -1 for none
        self._sums_out = np.zeros((self.num_inputs, col_tiles * cols), np.int64)
        self._width = width

    @property
    def result(self) -> Matrix:
        """The product, as far as its sums have left the array."""
        return self._sums_out[:, : self._width]

    def step(self) -> int:
        """Moves everything by one cycle; returns how many cells multiplied."""
        entering_tags, entering_inputs = self.inputs_at(self.cycle)
        self.tag = np.column_stack([entering_tags, self.tag[:, :-1]])
        self.activation = np.column_stack([entering_inputs, self.activation[:, :-1]])
        # The first input of a tile makes its cell take over the weight that has just arrived.
        is_first = (self.tag >= 0) & (self.tag % self.num_inputs == 0)
        self.held = np.where(is_first, self.moving, self.held)
        sums_above = np.vstack([np.zeros(self.cols, np.int64), self.sums[:-1]])
        self.sums = np.where(self.tag >= 0, sums_above + self.activation * self.held, 0)
        # What leaves the bottom row is added to its entries of the result.
        (busy_cols,) = np.nonzero(self.tag[-1] >= 0)
        tile_ids, input_ids = np.divmod(self.tag[-1, busy_cols], self.num_inputs)
        self._sums_out[input_ids, tile_ids // self._inputs.shape[1] * self.cols + busy_cols] += self.sums[-1, busy_cols]
        # Columns that are being loaded move down by one. A row below the front stands still: it may hold a weight that
        # its cell has not taken over yet.
        rows_moved, entering_weights = self.weights_at(self.cycle)
        shifted_weights = np.vstack([entering_weights, self.moving[:-1]])
        self.moving = np.where(np.arange(self.rows)[:, None] <= rows_moved, shifted_weights, self.moving)
        self.cycle += 1
        return int((self.tag >= 0).sum())

    def inputs_at(self, cycle: int) -> tuple[Matrix, Matrix]:
        """Returns the tag (-1 for none) and the value of the input that enters each row at the left in a cycle."""
        row_indices = np.arange(self.rows)
        tile_index, input_index = np.divmod(cycle - self.rows - row_indices, self._period)
        is_entering = (tile_index >= 0) & (tile_index < len(self._tiles)) & (input_index < self.num_inputs)
        tile_row = tile_index % self._inputs.shape[1]
        inputs = self._inputs[np.minimum(input_index, self.num_inputs - 1), tile_row, row_indices]
        return np.where(is_entering, tile_index * self.num_inputs + input_index, -1), np.where(is_entering, inputs, 0)

    def weights_at(self, cycle: int) -> tuple[Matrix, Matrix]:
        """Returns for each column the cycles since it began to load (-1: no weight enters) and the weight that enters
        at the top. The weight of the bottom row enters first."""
        cols = np.arange(self.cols)
        tile_index, rows_moved = np.divmod(cycle - cols, self._period)
        is_entering = (tile_index >= 0) & (tile_index < len(self._tiles)) & (rows_moved < self.rows)
        value = self._tiles[tile_index % len(self._tiles), self.rows - 1 - np.minimum(rows_moved, self.rows - 1), cols]
        return np.where(is_entering, rows_moved, -1), value


def simulate(inputs: Matrix, weights: Matrix, *, rows: int, cols: int) -> tuple[Matrix, tuple[int, ...]]:
    """Returns the product of two integer matrices, and the number of cells that worked in each cycle.

    It is computed by moving numbers through the cells of an array.
    """
    array = SystolicArray(inputs, weights, rows=rows, cols=cols)
    if array.last_cycle * rows * cols > MAX_CELL_UPDATES:
        raise InputError(
            f"{array.last_cycle:,} cycles of {rows}x{cols} cells are too many to run. Give fewer inputs or weights."
        )
    busy_per_cycle = tuple(array.step() for _ in range(array.last_cycle))
    return array.result, busy_per_cycle
