"""Schedules without closed forms, priced from their rows: simulated once for each size, and exact for all times.

The time of a step is its longest path: the largest of a few sums of passes, each so many F, B and W. `longest_paths`
finds every sum that is the largest for some times, so that a size is simulated a few times for all candidates.
"""

import functools
import itertools
import math
from collections.abc import Callable

import msgspec
import numpy as np

from meshwright.algebra.schedules.check import check
from meshwright.algebra.schedules.definition import Array, ScheduleDefinition
from meshwright.algebra.schedules.fused import Fused, fused, fused_seconds
from meshwright.algebra.schedules.simulation import makespan, peak_stash
from meshwright.algebra.schedules.table import Schedule
from meshwright.algebra.schedules.ticks import Slots, tick_tables
from meshwright.core.errors import InputError

MAX_PASSES = 100_000
"""Most passes of a table that is priced, F, B and W of every stage: its simulation takes about a second."""

_BITS = 20
"""Bits of a number of passes on a path."""

Passes = tuple[int, int, int]
"""How many F, B and W a path has."""


class SimulatedSize(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule of one size, with a program for each stage.

    ``paths`` [n, 3] are the F, B and W of every longest path beyond the passes of all microbatches, in passes over all
    layers of a device.
    """

    paths: np.ndarray
    stash: float
    sends: int
    split: float


class SimulatedLockstep(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule of one size as one program runs it. ``paths`` as in `SimulatedSize`."""

    paths: np.ndarray
    ticks: int
    slots: Slots


@functools.lru_cache(maxsize=4096)
def simulated_size(definition: ScheduleDefinition, stages: int, microbatches: int, chunks: int) -> SimulatedSize:
    """The simulated schedule of one size."""
    schedule = _rows(definition, stages, microbatches, chunks)

    def step(f: int, b: int, w: int, send: int = 0) -> int:
        return int(makespan(schedule, forward_s=f, backward_s=b, weight_s=w, send_s=send))

    return SimulatedSize(
        paths=_idle_passes(step, microbatches, chunks),
        stash=round(max(peak_stash(schedule)) / schedule.piece_share) / chunks,
        # sends of one unit beside equal passes of very many: those that no path avoids
        sends=step(*(3 * (1 << _BITS,)), 1) % (1 << _BITS),
        split=max(sum(op.kind == "W" for op in order) for order in schedule.orders) / chunks,
    )


@functools.lru_cache(maxsize=4096)
def simulated_lockstep(
    definition: ScheduleDefinition, stages: int, microbatches: int, chunks: int
) -> SimulatedLockstep:
    """The simulated tick tables of one size."""
    table: Fused = fused(_rows(definition, stages, microbatches, chunks))

    def step(f: int, b: int, w: int) -> int:
        return int(fused_seconds(table, forward_s=f, backward_s=b, weight_s=w, send_s=0))

    return SimulatedLockstep(
        paths=_idle_passes(step, microbatches, chunks), ticks=table.num_ticks, slots=tick_tables(table).slots
    )


def _rows(definition: ScheduleDefinition, stages: int, microbatches: int, chunks: int) -> Schedule:
    if 3 * stages * microbatches * chunks > MAX_PASSES:
        raise InputError(too_many_passes(definition, stages, microbatches, chunks))
    return check(definition.build(stages, microbatches, chunks))


def too_many_passes(definition: ScheduleDefinition, stages: int, microbatches: int, chunks: int) -> str:
    """Why a size is not simulated."""
    return (
        f"{definition.name} has no closed forms, and {stages} stages of {chunks} chunks x {microbatches} microbatches "
        f"are too many passes to simulate. Use at most {MAX_PASSES // (3 * stages * chunks)} microbatches."
    )


def _idle_passes(step: Callable[[int, int, int], int], microbatches: int, chunks: int) -> np.ndarray:
    return np.array(longest_paths(step)) / chunks - microbatches


def longest_paths(step: Callable[[int, int, int], int]) -> list[Passes]:
    """The passes of every path that is the longest for some times; ``step`` is the time of a step for whole times.

    The time is convex in (f, b, w). So the paths found are all as soon as no longer one is found where three of them,
    or two and a time of 0, tie: between such times the time of a step is linear.
    """
    found: dict[Passes, None] = {}
    asked: set[Passes] = set()
    axes: list[Passes] = [(1, 0, 0), (0, 1, 0), (0, 0, 1)]
    normals = axes
    while True:
        num_found = len(found)
        for one, other in itertools.combinations(normals, 2):
            times = _cross(one, other)
            if times is None or times in asked:
                continue
            known = [_time(path, times) for path in found]
            # a tie of paths that are not the longest there says nothing
            if normals is not axes and known.count(max(known)) < 2:
                continue
            asked.add(times)
            path = _longest_path(step, times)
            if _time(path, times) > max(known, default=-1):
                found[path] = None
        if len(found) == num_found:
            return list(found)
        ties = itertools.combinations(found, 2)
        normals = axes + [(p[0] - q[0], p[1] - q[1], p[2] - q[2]) for p, q in ties]


def _cross(one: Passes, other: Passes) -> Passes | None:
    """Times, none below 0, at which both differences of paths take no time; None without any."""
    x = one[1] * other[2] - one[2] * other[1]
    y = one[2] * other[0] - one[0] * other[2]
    z = one[0] * other[1] - one[1] * other[0]
    if min(x, y, z) < 0:
        x, y, z = -x, -y, -z
    if min(x, y, z) < 0 or not (x or y or z):
        return None
    shared = math.gcd(x, y, z)
    return x // shared, y // shared, z // shared


def _longest_path(step: Callable[[int, int, int], int], times: Passes) -> Passes:
    """Passes of the longest path: each pass also takes one unit of a digit of its own, too small to change the path."""
    digits = [1 << (_BITS * kind) for kind in range(3)]
    scale = 1 << (3 * _BITS)
    total = step(*(time * scale + digit for time, digit in zip(times, digits, strict=True)))
    mask = (1 << _BITS) - 1
    return total & mask, (total >> _BITS) & mask, (total >> 2 * _BITS) & mask


def _time(path: Passes, times: Passes) -> int:
    return sum(count * time for count, time in zip(path, times, strict=True))


def over_sizes(read: Callable[[int, int, int], float], stages: Array, microbatches: Array, chunks: Array) -> np.ndarray:
    """``read`` of every size of arrays, once for each different one; 0 where one stage has nothing to wait for."""
    shape, sizes, which = _different(stages, microbatches, chunks)
    return np.array([0 if p == 1 else read(p, m, v) for p, m, v in sizes])[which].reshape(shape)


def longest_bubble(
    paths: Callable[[int, int, int], np.ndarray],
    stages: Array,
    microbatches: Array,
    chunks: Array,
    times: tuple[Array, Array, Array],
) -> np.ndarray:
    """Seconds of the longest path beyond all passes, for F, B and W of all layers of a device."""
    given = np.broadcast_arrays(stages, microbatches, chunks, *times)
    shape, sizes, which = _different(*given[:3])
    seconds = np.stack([array.reshape(-1) for array in given[3:]]).astype(float)
    found = np.zeros(which.shape)
    for number, (p, m, v) in enumerate(sizes):
        if p > 1:
            here = which == number
            found[here] = (paths(p, m, v) @ seconds[:, here]).max(axis=0)
    return found.reshape(shape)


def _different(*sizes: Array) -> tuple[tuple[int, ...], list[tuple[int, int, int]], np.ndarray]:
    """The shape of arrays of sizes, the different sizes, and which of them each entry is."""
    given = np.broadcast_arrays(*sizes)
    rows = np.stack([np.asarray(one).reshape(-1) for one in given], axis=-1).astype(np.int64)
    different, which = np.unique(rows, axis=0, return_inverse=True)
    return given[0].shape, [tuple(row) for row in different.tolist()], which.reshape(-1)
