"""Checks that a schedule can run: every pass once, on the device of its virtual stage, after the results it needs."""

import itertools
from collections.abc import Callable

import msgspec

from meshwright.algebra.schedules.simulation import simulate
from meshwright.algebra.schedules.table import PassKind, Result, Schedule, StagePass
from meshwright.core.errors import InputError

Where = Callable[[int, int], str]
"""Returns the name of an op in messages, from its device and its index in the device's order."""


def check(schedule: Schedule, where: Where | None = None) -> Schedule:
    """Returns the schedule if it can run. Raises InputError if it cannot.

    Every F and B must occur once and every W at most once, on the device of its virtual stage, B after its F and W
    after its B. Devices must not wait for each other in a cycle.
    """
    where_of = where or (lambda device, op_index: f"device {device}, op {op_index + 1}")
    _require_once(schedule, where_of)
    _require_own_order(schedule, where_of)
    simulate(schedule, forward_s=1.0, backward_s=1.0, weight_s=1.0)
    return schedule


def _require_once(schedule: Schedule, text_of: Where) -> None:
    stage_of, where_of = schedule.virtual_stages(), dict[Result, str]()
    for device, order in enumerate(schedule.orders):
        for op_index, op in enumerate(order):
            where, m = text_of(device, op_index), op.microbatch
            if not 0 <= m < schedule.num_microbatches:
                raise InputError(f"{where}: {op} is not one of {schedule.num_microbatches} microbatches.")
            stage = stage_of.get((schedule.route_of[m], device, op.chunk))
            if stage is None:
                raise InputError(
                    f"{where}: {op} cannot run on device {device}: microbatch {m} does not pass chunk {op.chunk} "
                    f"there. Correct the chunk or the placement."
                )
            if first_where := where_of.get(Result(op.kind, stage, m)):
                raise InputError(f"{where}: {op} occurs twice (first at {first_where}). Leave one of them out.")
            where_of[Result(op.kind, stage, m)] = where
    num_stages = schedule.num_virtual_stages
    kinds: tuple[PassKind, ...] = ("F", "B")
    for m, stage, kind in itertools.product(range(schedule.num_microbatches), range(num_stages), kinds):
        if Result(kind, stage, m) not in where_of:
            place = schedule.place(stage, m)
            raise InputError(
                f"{StagePass(kind, m, place.chunk)} is missing on device {place.device}. Every microbatch needs "
                f"F and B in each of the {num_stages} virtual stages."
            )


def _require_own_order(schedule: Schedule, text_of: Where) -> None:
    kind_before: dict[PassKind, PassKind] = {"B": "F", "W": "B"}
    for device, order in enumerate(schedule.orders):
        done_ops = set[StagePass]()
        for index, op in enumerate(order):
            needed_op = msgspec.structs.replace(op, kind=kind_before[op.kind]) if op.kind in kind_before else None
            if needed_op and needed_op not in done_ops:
                raise InputError(f"{text_of(device, index)}: {op} comes before {needed_op}. Write {needed_op} earlier.")
            done_ops.add(op)
