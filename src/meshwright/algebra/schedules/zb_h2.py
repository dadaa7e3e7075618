"""ZB-H2: ZB-H1 with twice the forward passes in advance: no idle time inside a device's span where B <= W.

Source: Qi et al., Zero Bubble Pipeline Parallelism (2023), section 2.2.
"""

from collections.abc import Iterator

import numpy as np

from meshwright.algebra.schedules.definition import LockstepForms, ScheduleDefinition, StageForms
from meshwright.algebra.schedules.table import StagePass
from meshwright.algebra.schedules.zb_h1 import zero_bubble_order, zero_bubble_seconds


def _order(device: int, *, stages: int, microbatches: int, chunks: int) -> Iterator[StagePass]:
    return zero_bubble_order(2 * (stages - 1 - device), microbatches, 2 * stages - 1)


SCHEDULE = ScheduleDefinition(
    name="zb-h2",
    year=2023,
    order=_order,
    forms=StageForms(
        # with fewer microbatches than stages a lower bound, less than an eighth too low for up to 24 stages
        bubble_s=lambda p, m, v, f, b, w: zero_bubble_seconds(p, np.minimum(m, 2 * p - 1) - 1, f, b, w),
        stash=lambda p, m, v: np.minimum(2 * np.asarray(p) - 1, m),
        sends=lambda p, m, v: p - 1,
        split=lambda p, m, v: m,
    ),
    lockstep=LockstepForms(
        # with more microbatches than stages and fewer than 2 p - 1 an upper bound
        bubble_s=lambda p, m, v, f, b, w: (p - 1) * (f + b) + (p - 1 - np.where(m > p, 0, m // 2)) * w,
        ticks=lambda p, m, v: m + 2 * (p - 1) + np.clip(m - p, 0, p - 1),
        handed=lambda p, m, v: np.minimum(2 * p - 1, m),
    ),
)
