"""Sums over an engine's steps of what they held and how long they took, for each kind of step."""

import time
from collections.abc import Callable, Sequence
from operator import add
from typing import NamedTuple

from meshwright.batching.scheduler import EngineStep

StepKey = tuple[str, int]
"""What steps have in common: "decode", or "mixed" if they also prefill, and the rows of their compiled shape."""


class StepSums(NamedTuple):
    """Steps, the seconds that a client saw them take, and what they held, added up.

    ``decoded`` rows, drafts included, read ``cached`` tokens; ``prefilled`` tokens attend to ``pairs`` of one and a
    token up to it. Sequences of a step have ``positions`` in the cache together, and ``outputs`` rows have logits.
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
"""The key of a dispatched step, when it was dispatched, and what it holds, as the last fields of `StepSums`."""


def held_step(planned: Sequence[EngineStep], start_s: float, *, decoded: int, rows: int, outputs: int) -> HeldStep:
    """Returns what owners of sequences have planned as a step, with the rows that decode, those of its compiled shape,
    and those with logits."""
    num_new, num_cached = sum([step.prefill_tokens for step in planned]), sum([step.cached_tokens for step in planned])
    num_pairs = sum([step.prefill_tokens * (step.prefill_past + 1) for step in planned])
    positions = num_cached + decoded + sum([request.cached + num for step in planned for request, num in step.prefill])
    held_counts = decoded, num_cached, num_new, num_pairs, positions, outputs
    return ("mixed" if num_new else "decode", rows), start_s, held_counts


class SummedSteps:
    """Adds steps up as they are read. Another thread may copy ``sums``: a value is replaced, never changed."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self.sums: dict[StepKey, StepSums] = {}
        self._last_s = 0.0

    def read(self, step: HeldStep) -> None:
        """Notes the end of a step, which began when it was dispatched or, if that was later, as the last one ended."""
        (key, start_s, held_counts), end_s = step, self.now()
        taken_s, self._last_s = end_s - max(start_s, self._last_s), end_s
        new_sums = 1, taken_s, *held_counts
        sums_before = self.sums.get(key)
        self.sums[key] = StepSums._make(map(add, sums_before, new_sums) if sums_before else new_sums)
