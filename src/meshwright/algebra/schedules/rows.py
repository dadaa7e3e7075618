"""The named schedules: how many passes of which kind every device runs, in which order."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, get_args

from meshwright.algebra.schedules.table import Op, Route, Schedule, bidirectional_routes, looped_route, v_route
from meshwright.core.errors import InputError, nearest

ScheduleName = Literal["naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "dualpipe", "dualpipe-v"]
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)


def build(name: str, *, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The rows of a named schedule over ``stages`` devices.

    ``chunks`` is into how many virtual stages a device's layers are cut: any number from 2 for interleaved, 2 for
    dualpipe-v, else 1. Raises InputError for sizes that the schedule does not exist for.
    """
    if name not in _BUILDERS:
        raise InputError(f"schedule {name!r} is not known.{nearest(name, SCHEDULES)}")
    for what, size in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if size < 1:
            raise InputError(f"{what}={size} must be at least 1.")
    if chunks != default_chunks(name) and name != "interleaved":
        raise InputError(
            f"chunks={chunks} is not for {name}, whose devices hold {default_chunks(name)}. "
            f"Use chunks={default_chunks(name)}, or the interleaved schedule."
        )
    return _BUILDERS[name](stages, microbatches, chunks)


def default_chunks(name: str) -> int:
    """The fewest chunks per device that a schedule exists for."""
    return 2 if name in ("interleaved", "dualpipe-v") else 1


def _one_way(name: str, route: Route, microbatches: int, orders: Iterable[Iterable[Op]]) -> Schedule:
    return Schedule(
        name=name, routes=(route,), route_of=(0,) * microbatches, orders=tuple(tuple(order) for order in orders)
    )


def _naive(stages: int, microbatches: int, chunks: int) -> Schedule:
    """One microbatch at a time, there and back."""
    order = tuple(op for m in range(microbatches) for op in (Op("F", m), Op("B", m)))
    return _one_way("naive", looped_route(stages), microbatches, [order] * stages)


def _gpipe(stages: int, microbatches: int, chunks: int) -> Schedule:
    """All forward, then all backward. Source: Huang et al., GPipe (2019)."""
    order = tuple(Op(kind, m) for kind in ("F", "B") for m in range(microbatches))
    return _one_way("gpipe", looped_route(stages), microbatches, [order] * stages)


def _alternating(warmup: int, forward: list[Op], backward: list[Op]) -> Iterator[Op]:
    """``warmup`` forward passes, one forward and one backward in turns, and the backward passes that are left."""
    warmup = min(warmup, len(forward))
    yield from forward[:warmup]
    for f, b in zip(forward[warmup:], backward, strict=False):
        yield from (f, b)
    yield from backward[len(forward) - warmup :]


def _1f1b(stages: int, microbatches: int, chunks: int) -> Schedule:
    """One forward, one backward, after as many forward passes as devices follow. Source: PipeDream-flush (2021)."""
    forward, backward = ([Op(kind, m) for m in range(microbatches)] for kind in ("F", "B"))
    orders = [_alternating(stages - 1 - device, forward, backward) for device in range(stages)]
    return _one_way("1f1b", looped_route(stages), microbatches, orders)


def _interleaved(stages: int, microbatches: int, chunks: int) -> Schedule:
    """1F1B over groups of ``stages`` microbatches, each group chunk by chunk; backward from the last chunk.

    Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters (2021), section 2.2.
    """
    if chunks < 2:
        raise InputError("the interleaved schedule needs chunks of at least 2. With chunks=1 use 1f1b.")
    if microbatches % stages:
        near = max(stages, stages * round(microbatches / stages))
        raise InputError(
            f"the interleaved schedule needs microbatches that stages={stages} divides, not {microbatches}. "
            f"Use for example {near}."
        )
    groups = [range(first, first + stages) for first in range(0, microbatches, stages)]
    forward = [Op("F", m, c) for group in groups for c in range(chunks) for m in group]
    backward = [Op("B", m, c) for group in groups for c in reversed(range(chunks)) for m in group]
    orders = [
        _alternating(2 * (stages - 1 - device) + (chunks - 1) * stages, forward, backward) for device in range(stages)
    ]
    return _one_way("interleaved", looped_route(stages, chunks), microbatches, orders)


def _zero_bubble(warmup: int, microbatches: int, most_alive: int) -> Iterator[Op]:
    """1F1B with W as late as ``most_alive`` stashes allow, one after each B once the forward passes are done."""
    done_w = 0
    warmup = min(warmup, microbatches)
    yield from (Op("F", m) for m in range(warmup))
    for m in range(microbatches):
        done_f = min(warmup + m + 1, microbatches)
        if warmup + m < microbatches:
            yield Op("F", done_f - 1)
        yield Op("B", m)
        last_forward = done_f == microbatches
        if done_w <= m and (last_forward or done_f - done_w >= most_alive):
            yield Op("W", done_w)
            done_w += 1
    yield from (Op("W", m) for m in range(done_w, microbatches))


def _zb_h1(stages: int, microbatches: int, chunks: int) -> Schedule:
    """1F1B whose weight gradients wait for idle time, with 1F1B's memory.

    Source: Qi et al., Zero Bubble Pipeline Parallelism (2023), section 2.1.
    """
    orders = [_zero_bubble(stages - 1 - device, microbatches, stages) for device in range(stages)]
    return _one_way("zb-h1", looped_route(stages), microbatches, orders)


def _zb_h2(stages: int, microbatches: int, chunks: int) -> Schedule:
    """As zb-h1 with twice the forward passes in advance: no idle time inside a device's span where B <= W.

    Source: Qi et al., Zero Bubble Pipeline Parallelism (2023), section 2.2.
    """
    orders = [_zero_bubble(2 * (stages - 1 - device), microbatches, 2 * stages - 1) for device in range(stages)]
    return _one_way("zb-h2", looped_route(stages), microbatches, orders)


Streams = tuple[tuple[int, int], tuple[int, int]]
"""Chunk and first microbatch of the two streams that a device serves."""


class _TwoWays:
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


def _dual_order(distance: int, depth: int, per_stream: int, streams: Streams) -> list[Op]:
    """Ops of the device ``distance`` steps from the end where stream 0 enters; the streams turn after ``depth``.

    Source: DeepSeek-V3 Technical Report (2024), section 3.2.1, and the order of its published code. There a forward
    and a backward pass of the long middle part run at once, chunk by chunk; here they are rows one after the other.
    """
    device, inner = _TwoWays(streams), depth - 1 - distance
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


def _dualpipe(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Microbatches from both ends at once, over two copies of the weights."""
    if stages % 2:
        raise InputError(f"dualpipe needs an even number of stages, not {stages}. Use {stages + 1}, or dualpipe-v.")
    if microbatches % 2 or microbatches < 2 * stages:
        near = max(2 * stages, microbatches + microbatches % 2)
        raise InputError(
            f"dualpipe needs an even number of microbatches, at least {2 * stages} for {stages} stages, "
            f"not {microbatches}. Use for example {near}."
        )
    half = microbatches // 2
    down, up = (0, 0), (1, half)
    orders = []
    for device in range(stages):
        nearer = device < stages // 2
        distance = min(device, stages - 1 - device)
        orders.append(tuple(_dual_order(distance, stages // 2, half, (down, up) if nearer else (up, down))))
    return Schedule(
        name="dualpipe",
        routes=bidirectional_routes(stages),
        route_of=(0,) * half + (1,) * half,
        orders=tuple(orders),
    )


def _dualpipe_v(stages: int, microbatches: int, chunks: int) -> Schedule:
    """One half of dualpipe: down the devices and up again, each holding two pieces, with one copy of the weights."""
    if microbatches < 2 * stages:
        raise InputError(
            f"dualpipe-v needs at least {2 * stages} microbatches for {stages} stages, not {microbatches}. "
            f"Use {2 * stages}."
        )
    orders = [_dual_order(device, stages, microbatches, ((0, 0), (1, 0))) for device in range(stages)]
    return _one_way("dualpipe-v", v_route(stages), microbatches, orders)


_BUILDERS: dict[str, Callable[[int, int, int], Schedule]] = {
    "naive": _naive,
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "interleaved": _interleaved,
    "zb-h1": _zb_h1,
    "zb-h2": _zb_h2,
    "dualpipe": _dualpipe,
    "dualpipe-v": _dualpipe_v,
}
