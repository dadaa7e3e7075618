"""1F1B: one forward, one backward, after as many forward passes as there are later devices. Source: Narayanan et al.,
Memory-Efficient Pipeline-Parallel DNN Training (2021), PipeDream-flush."""

from collections.abc import Iterator

import numpy as np

from meshwright.algebra.schedules.definition import LockstepForms, ScheduleDefinition, StageForms
from meshwright.algebra.schedules.table import StagePass


def alternating(warmup: int, forward: list[StagePass], backward: list[StagePass]) -> Iterator[StagePass]:
    """Yields ``warmup`` forward passes, one forward and one backward alternately, and the remaining backward passes."""
    warmup = min(warmup, len(forward))
    yield from forward[:warmup]
    for f, b in zip(forward[warmup:], backward, strict=False):
        yield from (f, b)
    yield from backward[len(forward) - warmup :]


def _order(device: int, *, stages: int, microbatches: int, chunks: int) -> Iterator[StagePass]:
    forward, backward = (
        [StagePass("F", m) for m in range(microbatches)],
        [StagePass("B", m) for m in range(microbatches)],
    )
    return alternating(stages - 1 - device, forward, backward)


SCHEDULE = ScheduleDefinition(
    name="1f1b",
    year=2021,
    order=_order,
    search="usual",
    forms=StageForms(
        bubble_s=lambda p, m, v, f, b, w: np.subtract(p, 1) * (f + b + w),
        stash=lambda p, m, v: np.minimum(p, m),
        sends=lambda p, m, v: 2 * m * (p - 1) / p + 2 * (p - 2) * (p > 1),
    ),
    lockstep=LockstepForms(),
)
