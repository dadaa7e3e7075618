"""GPipe: all forward, then all backward. Source: Huang et al., GPipe (2019)."""

from collections.abc import Iterator

import numpy as np

from meshwright.algebra.schedules.definition import LockstepForms, ScheduleDefinition, StageForms
from meshwright.algebra.schedules.table import StagePass


def _order(device: int, *, stages: int, microbatches: int, chunks: int) -> Iterator[StagePass]:
    yield from (StagePass("F", m) for m in range(microbatches))
    yield from (StagePass("B", m) for m in range(microbatches))


SCHEDULE = ScheduleDefinition(
    name="gpipe",
    year=2019,
    order=_order,
    forms=StageForms(
        bubble_s=lambda p, m, v, f, b, w: np.subtract(p, 1) * (f + b + w),
        stash=lambda p, m, v: m + 0.0 * np.asarray(p),
        sends=lambda p, m, v: 2 * (p - 1),
    ),
    lockstep=LockstepForms(
        ticks=lambda p, m, v: 2 * (m + p) - 3,
        stash=lambda p, m, v: m + 0 * p,
        head=lambda p, m, v: m,
    ),
)
