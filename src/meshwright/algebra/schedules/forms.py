"""Bubble, stash, sends and buffers of a schedule with uniform stages, as functions of its sizes; the search reads them
for a million candidates.

`stage_forms` are for a schedule with a program for each stage, which runs ahead as far as messages let it;
`lockstep_forms` are for one program on all devices, which take part in every tick (see `ticks`). There a message takes
a tick each way, so more microbatches are in flight, and bubbles may be longer. Sizes and times may be NumPy arrays;
sizes that a schedule does not exist for are masked by `is_legal`, not branched on.

Forms come from the schedule's own file: each is the longest path through its rows, so that it equals the simulator's
result (``tests/algebra/schedules/test_forms.py``). A schedule without them is simulated once for each size, and exact
for all times. The time of a step is its longest path: the largest of a few sums, each of a number of F, of B and of W.
`longest_paths` finds every sum that is the largest for some times, so that a few simulations of a size serve all
candidates.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from meshwright.algebra.schedules.check import check
from meshwright.algebra.schedules.definition import LockstepForms, ScheduleDefinition, StageForms
from meshwright.algebra.schedules.registry import definition
from meshwright.algebra.schedules.simulation import peak_stash, simulate
from meshwright.algebra.schedules.table import Schedule
from meshwright.algebra.schedules.ticks import Slots, lockstep_seconds, tick_tables
from meshwright.algebra.sizes import Number
from meshwright.core.errors import InputError

MAX_PASSES = 100_000
"""Limit on the passes (F, B and W of every stage) of a table that is priced: its simulation takes about a second."""

_BITS = 20
"""Bits for the number of passes of one kind on a path."""

PathPasses = tuple[int, int, int]
"""The numbers of F, B and W on a path."""

Size = tuple[int, int, int]
"""Stages, microbatches and chunks."""

AnyForms = TypeVar("AnyForms", StageForms, LockstepForms)


def stage_forms(name: str) -> StageForms:
    """Returns the forms of a schedule with a program for each stage. They are exact, except for zb-h2 with fewer
    microbatches than stages.

    Sends of simulated and of closed forms differ where microbatches are fewer than twice the stages.
    """
    schedule = definition(name)
    return schedule.forms or _simulated_forms(schedule, StageForms, _simulated_stages)


def lockstep_forms(name: str) -> LockstepForms:
    """Returns the forms of a schedule as one program runs it on all devices. They equal the tables of `ticks` and their
    simulated time, except for zb-h2 with p stages and more than p but fewer than 2 p - 1 microbatches."""
    schedule = definition(name)
    return schedule.lockstep or _simulated_forms(schedule, LockstepForms, _simulated_lockstep)


def is_legal(name: str, *, stages: Number, microbatches: Number, chunks: Number = 1) -> Number:
    """True where the schedule exists for these sizes, `registry.build` makes its rows, and they can be priced."""
    schedule = definition(name)
    exists = schedule.is_legal(stages, microbatches, chunks)
    if schedule.forms and schedule.lockstep:
        return exists
    return exists & (3 * np.asarray(stages) * microbatches * chunks <= MAX_PASSES)


# -- one size, simulated ------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _simulated_stages(definition: ScheduleDefinition, size: Size) -> dict[str, Number]:
    """Returns the values of `StageForms` by name, and ``paths`` [n, 3]: the F, B and W of every longest path beyond the
    passes of all microbatches, in passes over all layers of a device."""
    schedule, num_chunks = _rows(definition, size), size[2]

    def step(f: int, b: int, w: int, send: int = 0) -> int:
        return int(simulate(schedule, forward_s=f, backward_s=b, weight_s=w, send_s=send).makespan_s)

    return {
        "paths": _idle_passes(step, size),
        "stash": round(max(peak_stash(schedule)) / schedule.piece_share) / num_chunks,
        # a send takes one unit, a pass 2^20 units: the remainder counts sends on the longest path
        "sends": step(*(3 * (1 << _BITS,)), 1) % (1 << _BITS),
        "split": max(sum(op.kind == "W" for op in order) for order in schedule.orders) / num_chunks,
    }


@functools.lru_cache(maxsize=4096)
def _simulated_lockstep(definition: ScheduleDefinition, size: Size) -> dict[str, Number]:
    """Simulates one size. Returns ``ticks``, the counts of `Slots` by name, and ``paths`` [n, 3]: F, B and W of each
    longest path beyond the passes of all microbatches, in passes over all layers of a device."""
    tables = tick_tables(_rows(definition, size))

    def step(f: int, b: int, w: int) -> int:
        return int(lockstep_seconds(tables, forward_s=f, backward_s=b, weight_s=w, send_s=0))

    slots_by_name = {name: getattr(tables.slots, name) for name in Slots.__struct_fields__}
    return {"paths": _idle_passes(step, size), "ticks": tables.num_ticks, **slots_by_name}


def _rows(definition: ScheduleDefinition, size: Size) -> Schedule:
    if 3 * math.prod(size) > MAX_PASSES:
        raise InputError(too_many_passes(definition, *size))
    return check(definition.build(*size))


def too_many_passes(definition: ScheduleDefinition, stages: int, microbatches: int, chunks: int) -> str:
    """Returns the message that a size of a schedule without closed forms has too many passes to be simulated."""
    return (
        f"{definition.name} has no closed forms, and {stages} stages of {chunks} chunks x {microbatches} microbatches "
        f"are too many passes to simulate. Use at most {MAX_PASSES // (3 * stages * chunks)} microbatches."
    )


def _idle_passes(step: Callable[[int, int, int], int], size: Size) -> np.ndarray:
    _, num_microbatches, num_chunks = size
    return np.array(longest_paths(step)) / num_chunks - num_microbatches


def longest_paths(step: Callable[[int, int, int], int]) -> list[PathPasses]:
    """Returns the passes of every path that is the longest for some times; ``step`` is the time of a step for whole
    times.

    The time is convex in (f, b, w). So all paths are found as soon as there is no longer one at any times at which
    three known paths tie, or two if a time is 0: between such times the time of a step is linear.
    """
    paths: dict[PathPasses, None] = {}
    tried_times: set[PathPasses] = set()
    scale, digit_mask = 1 << (3 * _BITS), (1 << _BITS) - 1
    axis_normals: list[PathPasses] = [(1, 0, 0), (0, 1, 0), (0, 0, 1)]
    normals = axis_normals
    while True:
        num_found = len(paths)
        for one_normal, other_normal in itertools.combinations(normals, 2):
            times = _cross(one_normal, other_normal)
            if times is None or times in tried_times:
                continue
            known_times = [_time(path, times) for path in paths]
            # a tie of paths that are not the longest there says nothing
            if normals is not axis_normals and known_times.count(max(known_times)) < 2:
                continue
            tried_times.add(times)
            # each pass also takes one unit of a digit of its own, too small to change the path
            total_time = step(*(time * scale + (1 << (_BITS * kind_index)) for kind_index, time in enumerate(times)))
            path = total_time & digit_mask, (total_time >> _BITS) & digit_mask, (total_time >> 2 * _BITS) & digit_mask
            if _time(path, times) > max(known_times, default=-1):
                paths[path] = None
        if len(paths) == num_found:
            return list(paths)
        path_pairs = itertools.combinations(paths, 2)
        normals = axis_normals + [(p[0] - q[0], p[1] - q[1], p[2] - q[2]) for p, q in path_pairs]


def _cross(one: PathPasses, other: PathPasses) -> PathPasses | None:
    """Returns times of at least 0 at which both differences of paths take no time; None if there are none."""
    x = one[1] * other[2] - one[2] * other[1]
    y = one[2] * other[0] - one[0] * other[2]
    z = one[0] * other[1] - one[1] * other[0]
    if min(x, y, z) < 0:
        x, y, z = -x, -y, -z
    if min(x, y, z) < 0 or not (x or y or z):
        return None
    divisor = math.gcd(x, y, z)
    return x // divisor, y // divisor, z // divisor


def _time(path: PathPasses, times: PathPasses) -> int:
    return sum(map(operator.mul, path, times))


# -- arrays of sizes ----------------------------------------------------------------------------------------


def _simulated_forms(
    definition: ScheduleDefinition,
    form: type[AnyForms],
    simulated: Callable[[ScheduleDefinition, Size], dict[str, Number]],
) -> AnyForms:
    """Returns forms that simulate each size once; they are 0 for one stage, which waits for nothing."""

    def read(name: str, *arrays: Number) -> np.ndarray:
        """Returns the value ``name`` of each size, for "paths" the time of the longest."""
        broadcasts = np.broadcast_arrays(*arrays)
        sizes = np.stack([array.reshape(-1) for array in broadcasts[:3]], axis=-1).astype(np.int64)
        distinct_sizes, index_of_size = np.unique(sizes, axis=0, return_inverse=True)
        values = np.zeros(len(sizes))
        for size_index, (p, m, v) in enumerate(distinct_sizes.tolist()):
            if p > 1:
                is_of_size, value = index_of_size.reshape(-1) == size_index, simulated(definition, (p, m, v))[name]
                if name == "paths":
                    value = (value @ np.stack([times.reshape(-1)[is_of_size] for times in broadcasts[3:]])).max(axis=0)
                values[is_of_size] = value
        return values.reshape(broadcasts[0].shape)

    field_names = (name for name in form.__struct_fields__ if name not in ("bubble_s", "waits"))
    reader_by_name = {name: functools.partial(read, name) for name in field_names}
    return form(bubble_s=functools.partial(read, "paths"), **reader_by_name)
