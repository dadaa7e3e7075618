"""Sums the durations, rows and tokens of an engine's steps, by kind and shape of step."""

import time
from collections.abc import Callable, Sequence
from operator import add
from typing import NamedTuple

from meshwright.batching.scheduler import EngineStep

StepKey = tuple[str, int]
"""The kind of a step, "decode" or (if it also prefills) "mixed", and the rows of its compiled shape."""


class StepSums(NamedTuple):
    """Sums over steps: their number, seconds as clients see them, and tokens. ``decoded`` rows, drafts included, read
    ``cached`` tokens; ``prefilled`` tokens have ``pairs`` (query, key) in attention. A step's sequences have
    ``positions`` in the cache after it, and ``outputs`` of its rows have logits.
    """

    steps: float = 0
    seconds: float = 0.0
    decoded: float = 0
    cached: float = 0
    prefilled: float = 0
    pairs: float = 0.0
    positions: float = 0
    outputs: float = 0


HeldStep = tuple[StepKey, float, tuple[float, ...]]
"""The key of a dispatched step, when it was dispatched (s), and its values of `StepSums` from ``decoded`` on."""


def held_step(planned: Sequence[EngineStep], start_s: float, *, decoded: int, rows: int, outputs: int) -> HeldStep:
    """Returns the record of one step, which the owners of sequences ``planned`` and the engine dispatched at
    ``start_s``: ``decoded`` decode rows, ``rows`` of its compiled shape, ``outputs`` rows with logits."""
    num_new, num_cached = sum([step.prefill_tokens for step in planned]), sum([step.cached_tokens for step in planned])
    num_pairs = sum([step.prefill_tokens * (step.prefill_past + 1) for step in planned])
    positions = num_cached + decoded + sum([request.cached + num for step in planned for request, num in step.prefill])
    held_counts = decoded, num_cached, num_new, num_pairs, positions, outputs
    return ("mixed" if num_new else "decode", rows), start_s, held_counts


class SummedSteps:
    """Sums steps as they are read. Another thread may copy ``sums``, as values are replaced, never mutated."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self.sums: dict[StepKey, StepSums] = {}
        self._last_s = 0.0

    def read(self, step: HeldStep) -> None:
        """Adds a step that ends now; it began when dispatched or when the previous step ended, if that was later."""
        (key, start_s, held_counts), end_s = step, self.now()
        taken_s, self._last_s = end_s - max(start_s, self._last_s), end_s
        new_sums = 1, taken_s, *held_counts
        sums_before = self.sums.get(key)
        self.sums[key] = StepSums._make(map(add, sums_before, new_sums) if sums_before else new_sums)
