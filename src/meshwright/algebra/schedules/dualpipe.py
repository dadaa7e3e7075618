"""DualPipe: microbatches enter at both ends of the pipeline, over two copies of the weights.

Source: DeepSeek-V3 Technical Report (2024), section 3.2.1, and the order of its published code. There a forward and a
backward pass of the long middle part overlap; here one runs after the other.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np

from meshwright.algebra.schedules import definition
from meshwright.algebra.schedules.table import StagePass
from meshwright.algebra.sizes import Number

DeviceStreams = tuple[tuple[int, int], tuple[int, int]]
"""Chunk and first microbatch of the two streams that a device serves."""


def dual_order(distance: int, depth: int, per_stream: int, streams: DeviceStreams) -> Iterator[StagePass]:
    """Yields the passes of the device ``distance`` devices from the end where stream 0 enters; after ``depth`` devices
    the streams turn back (V), or cross. A stream is the microbatches of one direction, ``per_stream`` of them."""
    num_inner, middle, is_odd = depth - 1 - distance, (distance + 1) // 2, distance % 2 == 1
    # F and B of a stream; S is a B whose weight gradients wait for the next W
    words = [
        *["F0"] * (2 * num_inner),
        *["F0", "F1"] * (distance + 1),
        *["S1", "W", "F1"] * num_inner,
        *["F0", "B1", "F1", "B0"] * (per_stream - 2 * depth + distance + 1),
        *["B1", "F1", "B0"] * num_inner,
    ]
    for turn in range(distance + 1):
        # the second half of these passes leaves its weight gradients for later idle time
        words += ["S1" if turn > middle or (turn == middle and is_odd) else "B1", "S0" if turn >= middle else "B0"]
    words += [*["W", "S0"] * num_inner, *["W"] * (distance + 1)]
    microbatch_counters = {(kind, stream): itertools.count(streams[stream][1]) for kind in "FB" for stream in (0, 1)}
    pending_passes = deque[StagePass]()
    for word in words:
        if word == "W":
            yield pending_passes.popleft()
            continue
        kind: Literal["F", "B"] = "F" if word[0] == "F" else "B"
        stream = int(word[1])
        op = StagePass(kind, next(microbatch_counters[kind, stream]), streams[stream][0])
        yield op
        if word[0] == "S":
            pending_passes.append(StagePass("W", op.microbatch, op.chunk))


def dual_bubble_seconds(hops: Number, f: Number, b: Number, w: Number) -> Number:
    """Returns the seconds of a step beyond the passes themselves, for seconds per virtual stage: ``b`` is of gradients
    of inputs only, ``w`` of weights. ``hops`` are the sends from the device where a stream of microbatches enters to
    the one where two streams cross or, in a V, it turns back."""
    longest_s = np.maximum(hops * f, hops * (f + b - w))
    longest_s = np.maximum(longest_s, hops * (2 * f - w - np.minimum(b, w)))
    return np.maximum(longest_s, hops * (b + np.maximum(b - w, 0)) - f)


def published_bubble(formula: str, hops: Callable[[Number], Number]) -> definition.PublishedBubble:
    """Returns DeepSeek-V3's bubble for ``hops`` sends each way; its F&B is one pass of F + B seconds, its B holds W."""
    return definition.PublishedBubble(
        formula=formula,
        seconds=lambda p, m, v, f, b, w: hops(p) * ((f + b + w) + (b + w) - 3 * w),
        why="its F&B is one pass, F + B long, that hands both results on together; here each is sent when it is ready",
    )


def _order(device: int, *, stages: int, microbatches: int, chunks: int) -> Iterator[StagePass]:
    per_stream = microbatches // 2
    down, up = (0, 0), (1, per_stream)
    distance = min(device, stages - 1 - device)
    return dual_order(distance, stages // 2, per_stream, (down, up) if device < stages // 2 else (up, down))


SCHEDULE = definition.ScheduleDefinition(
    name="dualpipe",
    year=2024,
    order=_order,
    placement="bidirectional",
    requirements=(
        definition.Requirement(
            lambda p, m, v: p % 2 == 0,
            lambda p, m, v: f"dualpipe needs an even number of stages, not {p}. Use {p + 1}, or dualpipe-v.",
        ),
        definition.Requirement(
            lambda p, m, v: (m % 2 == 0) & (m >= 2 * p),
            lambda p, m, v: (
                f"dualpipe needs an even number of microbatches, at least {2 * p} for {p} stages, not {m}. "
                f"Use for example {max(2 * p, m + m % 2)}."
            ),
        ),
    ),
    forms=definition.StageForms(
        bubble_s=lambda p, m, v, f, b, w: dual_bubble_seconds(np.divide(p, 2) - 1, f, b, w),
        stash=lambda p, m, v: np.add(p, 1),
        sends=lambda p, m, v: 2.5 * p - 3,
        split=lambda p, m, v: p - 1 + 0 * m,
    ),
    lockstep=definition.LockstepForms(
        bubble_s=lambda p, m, v, f, b, w: (p - 2) * (f + b) + (p - 2) * w,
        x=lambda p, m, v: 1 + (p > 2),
        stash=lambda p, m, v: p + 1,
        handed=lambda p, m, v: p // 2,
    ),
    published=published_bubble("(PP/2 - 1) (F&B + B - 3W)", lambda p: np.divide(p, 2) - 1),
)
