"""DualPipe-V: one half of DualPipe, with one copy of the weights. Microbatches go down the devices and up again, and
each device has two pieces. Source: the published code of DualPipe (2025)."""

from collections.abc import Iterator

import numpy as np

from meshwright.algebra.schedules.definition import LockstepForms, Requirement, ScheduleDefinition, StageForms
from meshwright.algebra.schedules.dualpipe import dual_bubble_seconds, dual_order, published_bubble
from meshwright.algebra.schedules.table import StagePass


def _order(device: int, *, stages: int, microbatches: int, chunks: int) -> Iterator[StagePass]:
    return dual_order(device, stages, microbatches, ((0, 0), (1, 0)))


SCHEDULE = ScheduleDefinition(
    name="dualpipe-v",
    year=2025,
    order=_order,
    placement="v",
    chunks=2,
    requirements=(
        Requirement(
            lambda p, m, v: m >= 2 * p,
            lambda p, m, v: f"dualpipe-v needs at least {2 * p} microbatches for {p} stages, not {m}. Use {2 * p}.",
        ),
    ),
    forms=StageForms(
        bubble_s=lambda p, m, v, f, b, w: 0.5 * dual_bubble_seconds(np.subtract(p, 1), f, b, w),
        stash=lambda p, m, v: np.add(p, 0.5),
        sends=lambda p, m, v: 4 * (p - 1),
        split=lambda p, m, v: p - 0.5 + 0 * m,
    ),
    lockstep=LockstepForms(
        ticks=lambda p, m, v: 2 * m + 4 * p - 2,
        x=lambda p, m, v: 1 + (p > 0),
        stash=lambda p, m, v: 2 * p + 1,
        handed=lambda p, m, v: p + 0 * m,
    ),
    # PP = 2 p stages, each half of a device's layers
    published=published_bubble("(PP/2 - 1) (F&B + B - 3W)", lambda p: np.subtract(p, 1) / 2),
)
