"""ZB-H1: 1F1B whose weight gradients wait for idle time, with 1F1B's memory.

Source: Qi et al., Zero Bubble Pipeline Parallelism (2023), section 2.1.
"""

from collections.abc import Iterator

import numpy as np

from meshwright.algebra.schedules.definition import LockstepForms, ScheduleDefinition, StageForms
from meshwright.algebra.schedules.table import StagePass
from meshwright.algebra.sizes import Number


def zero_bubble_order(warmup: int, microbatches: int, most_alive: int) -> Iterator[StagePass]:
    """Yields 1F1B with W as late as ``most_alive`` stashes allow, one after each B once the forward passes are done."""
    num_w = 0
    warmup = min(warmup, microbatches)
    yield from (StagePass("F", m) for m in range(warmup))
    for m in range(microbatches):
        num_f = min(warmup + m + 1, microbatches)
        if warmup + m < microbatches:
            yield StagePass("F", num_f - 1)
        yield StagePass("B", m)
        has_all_forward = num_f == microbatches
        if num_w <= m and (has_all_forward or num_f - num_w >= most_alive):
            yield StagePass("W", num_w)
            num_w += 1
    yield from (StagePass("W", m) for m in range(num_w, microbatches))


def zero_bubble_seconds(p: Number, filling: Number, f: Number, b: Number, w: Number) -> Number:
    """Returns the bubble where ``filling`` W run before the first B returns, the longest of three paths: the first F
    down the stages; down and up again, less the W that fill; or the last B up the stages."""
    hops = np.subtract(p, 1)
    longest_s = np.maximum(hops * f, hops * (f + b) - filling * w)
    return np.maximum(longest_s, (hops - filling) * f + hops * b)


def _order(device: int, *, stages: int, microbatches: int, chunks: int) -> Iterator[StagePass]:
    return zero_bubble_order(stages - 1 - device, microbatches, stages)


SCHEDULE = ScheduleDefinition(
    name="zb-h1",
    year=2023,
    order=_order,
    forms=StageForms(
        bubble_s=lambda p, m, v, f, b, w: zero_bubble_seconds(p, np.minimum(m, p) - 1, f, b, w),
        stash=lambda p, m, v: np.minimum(p, m),
        sends=lambda p, m, v: 4 * (p - 1),
        split=lambda p, m, v: m,
    ),
    lockstep=LockstepForms(
        bubble_s=lambda p, m, v, f, b, w: (p - 1) * (f + b) + np.maximum(p - m, 0) * w,
        handed=lambda p, m, v: np.minimum(p, m),
    ),
)
