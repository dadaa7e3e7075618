"""The seconds of a step: the interface of a simulation to a cost model, and an interpolation table for slow ones."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.algebra.sizes import Number
from meshwright.core.errors import InputError


class Clock(Protocol):
    """Interface to the seconds of an engine's steps. Inherit from it for the default `steps_s`."""

    def step_s(self, num_decode: Number, cached_tokens: Number, prefill_tokens: Number, prefill_past: Number) -> Number:
        """Returns the seconds of a step.

        ``num_decode`` requests decode a token each and read ``cached_tokens`` in total (their new tokens not
        counted). ``prefill_tokens`` are prefilled, over all requests; ``prefill_past`` is the mean number of tokens
        before a prefilled token in its text (`EngineStep`), 0 without prefill. Arguments may be arrays that broadcast.
        """

    def steps_s(self, num_steps: int, num_decode: int, cached_tokens: int) -> NDArray[np.float64]:
        """Returns the seconds of each of ``num_steps`` steps that only decode; each step caches ``num_decode`` tokens.

        Every entry must be bit-equal to `step_s` of that step, so that jumps equal single steps.
        """
        cached_by_step = cached_tokens + num_decode * np.arange(num_steps)
        return np.add(np.zeros(num_steps), self.step_s(num_decode, cached_by_step, 0, 0.0))


def _grid(max_value: int, ratio: float) -> list[int]:
    """Returns 0, 1 and whole numbers up to ``max_value``, each ``ratio`` times the previous, or one more."""
    grid_values = [0, 1]
    while grid_values[-1] < max_value:
        grid_values.append(max(grid_values[-1] + 1, int(grid_values[-1] * ratio)))
    return [*grid_values[:-1], max(max_value, 1)]


class TabledClock(Clock):
    """A clock that evaluates another clock once on a grid of steps, and interpolates linearly between them.

    ``most`` are the largest ``num_decode``, ``cached_tokens``, ``prefill_tokens`` and ``prefill_past``; beyond them it
    raises InputError. Grid values of the first and third, in which step time is not linear, grow by 30%, values of the
    other two by a factor of two.
    """

    def __init__(self, clock: Clock, most: tuple[int, int, int, int]) -> None:
        self._most = most
        self._grids = [_grid(max_value, ratio) for max_value, ratio in zip(most, (1.3, 2, 1.3, 2), strict=True)]
        mesh = np.meshgrid(*(np.asarray(grid) for grid in self._grids), indexing="ij", sparse=True)
        seconds_table = np.broadcast_to(clock.step_s(*mesh), tuple(map(len, self._grids)))
        self._table = np.ascontiguousarray(seconds_table, dtype=float)
        self._cached = np.asarray(self._grids[1], float)
        self._rows: dict[int, NDArray[np.float64]] = {}

    def step_s(self, num_decode: Number, cached_tokens: Number, prefill_tokens: Number, prefill_past: Number) -> Number:
        """Returns the seconds of one step, see `Clock`; takes numbers, not arrays."""
        if prefill_tokens:
            return float(self._blend((num_decode, cached_tokens, prefill_tokens, prefill_past)))
        return self.steps_s(1, num_decode, cached_tokens)[0]

    def steps_s(self, num_steps: int, num_decode: int, cached_tokens: int) -> NDArray[np.float64]:
        """Returns the seconds of each of ``num_steps`` steps, see `Clock`. Raises InputError beyond the table."""
        if num_decode not in self._rows:
            self._rows[num_decode] = self._blend((num_decode,))[:, 0, 0]
        max_cached_tokens = cached_tokens + num_decode * (num_steps - 1)
        if max_cached_tokens > self._most[1]:
            raise InputError(f"{max_cached_tokens:,} cached tokens are beyond the table's {self._most[1]:,}.")
        cached_by_step = cached_tokens + num_decode * np.arange(num_steps)
        return np.interp(cached_by_step, self._cached, self._rows[num_decode])

    def _blend(self, point: Sequence[float]) -> Number:
        """Interpolates the table in its first ``len(point)`` dims. Raises InputError for a point beyond the table."""
        slices, fractions = [], []
        for coord, grid, max_value in zip(point, self._grids, self._most, strict=False):
            if coord > max_value:
                limits = ", ".join(f"{largest:,}" for largest in self._most)
                raise InputError(f"a step of {coord:,} is beyond the table's {limits} (decode, cached, prefill, past).")
            low_index = min(bisect_right(grid, coord), len(grid) - 1) - 1
            slices.append(slice(low_index, low_index + 2))
            fractions.append((coord - grid[low_index]) / (grid[low_index + 1] - grid[low_index]))
        corner_block = self._table[tuple(slices)]
        for fraction in fractions:
            corner_block = corner_block[0] + (corner_block[1] - corner_block[0]) * fraction
        return corner_block
