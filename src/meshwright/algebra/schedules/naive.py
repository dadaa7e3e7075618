"""The naive schedule: one microbatch at a time, forward and backward. Source: Dean et al., Large Scale Distributed Deep
Networks (2012), section 3."""

from collections.abc import Iterator

import numpy as np

from meshwright.algebra.schedules.definition import LockstepForms, ScheduleDefinition, StageForms
from meshwright.algebra.schedules.table import StagePass


def _order(device: int, *, stages: int, microbatches: int, chunks: int) -> Iterator[StagePass]:
    for m in range(microbatches):
        yield from (StagePass("F", m), StagePass("B", m))


SCHEDULE = ScheduleDefinition(
    name="naive",
    year=2012,
    order=_order,
    # never faster than gpipe, and needs no less memory than accumulation on fewer stages
    search="never",
    forms=StageForms(
        bubble_s=lambda p, m, v, f, b, w: np.subtract(p, 1) * m * (f + b + w),
        stash=lambda p, m, v: 1.0 + 0.0 * np.asarray(p),
        sends=lambda p, m, v: 2 * m * (p - 1),
    ),
    lockstep=LockstepForms(
        bubble_s=lambda p, m, v, f, b, w: (p - 1) * m * (f + b) + (p - 1) * m * w,
        ticks=lambda p, m, v: m * (2 * p - 1),
        stash=lambda p, m, v: 1 + 0 * p,
        # one chain of passes: a step waits for every send
        waits=lambda p, m, v: 2 * m * (p - 1),
    ),
)
