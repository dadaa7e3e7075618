"""Interleaved 1F1B: groups of as many microbatches as stages, each group chunk by chunk; backward from the last chunk.

Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters (2021), section 2.2.
"""

from collections.abc import Iterator

import numpy as np

from meshwright.algebra.schedules.definition import LockstepForms, Requirement, ScheduleDefinition, StageForms
from meshwright.algebra.schedules.one_f_one_b import alternating
from meshwright.algebra.schedules.table import StagePass


def _order(device: int, *, stages: int, microbatches: int, chunks: int) -> Iterator[StagePass]:
    groups = [range(first_m, first_m + stages) for first_m in range(0, microbatches, stages)]
    forward = [StagePass("F", m, c) for group in groups for c in range(chunks) for m in group]
    backward = [StagePass("B", m, c) for group in groups for c in reversed(range(chunks)) for m in group]
    return alternating(2 * (stages - 1 - device) + (chunks - 1) * stages, forward, backward)


SCHEDULE = ScheduleDefinition(
    name="interleaved",
    year=2021,
    order=_order,
    chunks=2,
    more_chunks=True,
    requirements=(
        Requirement(
            lambda p, m, v: v >= 2,
            lambda p, m, v: f"the interleaved schedule needs chunks=2 or more, not {v}. Use chunks=2, or 1f1b.",
        ),
        Requirement(
            lambda p, m, v: m % p == 0,
            lambda p, m, v: (
                f"the interleaved schedule needs microbatches that stages={p} divides, not {m}. "
                f"Use for example {max(p, p * round(m / p))}."
            ),
        ),
    ),
    search="usual",
    forms=StageForms(
        bubble_s=lambda p, m, v, f, b, w: np.subtract(p, 1) * (f + b + w) / v,
        stash=lambda p, m, v: np.minimum(m * v, p * (v + 1) - 1) / v,
        sends=lambda p, m, v: 2 * (p * v - 1) * (p > 1),
    ),
    lockstep=LockstepForms(
        bubble_s=lambda p, m, v, f, b, w: ((p - 1) * (f + b) + (p - 1) * w) / v,
        ticks=lambda p, m, v: v * (m + p) + p - 2,
        stash=lambda p, m, v: np.minimum(m * v, p * (v + 1) - 1),
    ),
)
