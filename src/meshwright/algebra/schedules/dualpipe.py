"""DualPipe: microbatches from both ends at once, over two copies of the weights.

Source: DeepSeek-V3 Technical Report (2024), section 3.2.1, and the order of its published code. There a forward and a
backward pass of the long middle part run at once, chunk by chunk; here they are rows one after the other.
"""

from collections import deque
from collections.abc import Iterable
from typing import Literal

import numpy as np

from meshwright.algebra.schedules.definition import Array, ClosedForms, LockstepForms, Requirement, ScheduleDefinition
from meshwright.algebra.schedules.table import Op

Streams = tuple[tuple[int, int], tuple[int, int]]
"""Chunk and first microbatch of the two streams that a device serves."""


class _TwoStreams:
    """Ops of one device, stream by stream, counted as they are asked for."""

    def __init__(self, streams: Streams) -> None:
        self.ops: list[Op] = []
        self._streams = streams
        self._done = {(kind, stream): 0 for kind in ("F", "B") for stream in (0, 1)}
        self._pending: deque[Op] = deque()

    def _next(self, kind: Literal["F", "B"], stream: int) -> Op:
        chunk, first = self._streams[stream]
        op = Op(kind, first + self._done[kind, stream], chunk)
        self._done[kind, stream] += 1
        self.ops.append(op)
        return op

    def forward(self, stream: int) -> None:
        self._next("F", stream)

    def backward(self, stream: int, *, split: bool = False) -> None:
        op = self._next("B", stream)
        if split:
            self._pending.append(Op("W", op.microbatch, op.chunk))

    def weight(self) -> None:
        self.ops.append(self._pending.popleft())


def dual_order(distance: int, depth: int, per_stream: int, streams: Streams) -> list[Op]:
    """Ops of the device ``distance`` steps from the end where stream 0 enters; the streams turn after ``depth``."""
    device, inner = _TwoStreams(streams), depth - 1 - distance
    for _ in range(2 * inner):
        device.forward(0)
    for _ in range(distance + 1):
        device.forward(0)
        device.forward(1)
    for _ in range(inner):
        device.backward(1, split=True)
        device.weight()
        device.forward(1)
    for _ in range(per_stream - 2 * depth + distance + 1):
        device.forward(0)
        device.backward(1)
        device.forward(1)
        device.backward(0)
    for _ in range(inner):
        device.backward(1)
        device.forward(1)
        device.backward(0)
    for turn in range(distance + 1):
        # The second half of these leaves its weight gradients for the idle time to come.
        half, odd = (distance + 1) // 2, distance % 2
        device.backward(1, split=turn > half or (turn == half and odd == 1))
        device.backward(0, split=turn >= half)
    for _ in range(inner):
        device.weight()
        device.backward(0, split=True)
    for _ in range(distance + 1):
        device.weight()
    return device.ops


def dual_bubble_seconds(hops: Array, f: Array, b: Array, w: Array) -> Array:
    """The bubble of one stream that turns after ``hops`` steps, times per virtual stage."""
    longest = np.maximum(hops * f, hops * (f + b - w))
    longest = np.maximum(longest, hops * (2 * f - w - np.minimum(b, w)))
    return np.maximum(longest, hops * (b + np.maximum(b - w, 0)) - f)


def _order(device: int, *, stages: int, microbatches: int, chunks: int) -> Iterable[Op]:
    half = microbatches // 2
    down, up = (0, 0), (1, half)
    distance = min(device, stages - 1 - device)
    return dual_order(distance, stages // 2, half, (down, up) if device < stages // 2 else (up, down))


def _even_microbatches(stages: int, microbatches: int, chunks: int) -> str:
    near = max(2 * stages, microbatches + microbatches % 2)
    return (
        f"dualpipe needs an even number of microbatches, at least {2 * stages} for {stages} stages, "
        f"not {microbatches}. Use for example {near}."
    )


SCHEDULE = ScheduleDefinition(
    name="dualpipe",
    year=2024,
    order=_order,
    placement="bidirectional",
    requirements=(
        Requirement(
            lambda p, m, v: p % 2 == 0,
            lambda p, m, v: f"dualpipe needs an even number of stages, not {p}. Use {p + 1}, or dualpipe-v.",
        ),
        Requirement(lambda p, m, v: (m % 2 == 0) & (m >= 2 * p), _even_microbatches),
    ),
    forms=ClosedForms(
        bubble_s=lambda p, m, v, f, b, w: dual_bubble_seconds(np.divide(p, 2) - 1, f, b, w),
        stash=lambda p, m, v: np.add(p, 1),
        sends=lambda p, m, v: 2.5 * p - 3,
        split=lambda p, m, v: p - 1 + 0 * m,
    ),
    lockstep=LockstepForms(
        hops=lambda p, m: p - 2,
        weight_hops=lambda p, m: p - 2,
        handed=lambda p, m: p // 2,
        two_ways_from=2,
    ),
)
