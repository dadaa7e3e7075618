"""Whether a schedule can run: every pass exactly once, where its virtual stage lives, after what it needs."""

from collections.abc import Callable, Iterator

from meshwright.algebra.schedules.fused import Fused
from meshwright.algebra.schedules.simulation import simulate
from meshwright.algebra.schedules.table import Op, Pass, Schedule
from meshwright.core.errors import InputError

Where = Callable[[int, int], str]
"""What an op is called in messages, from its device and its place in the device's order."""

Done = tuple[Pass, int, int]
"""A pass, its virtual stage and its microbatch."""


def check(schedule: Schedule, where: Where | None = None) -> Schedule:
    """The same schedule, when it can run.

    Every F and B stands once, every W at most once, on the device that holds the virtual stage; B after its F and W
    after its B; and no devices wait for each other in a ring. One op per device at a time is what an order means.
    """
    named = where or (lambda device, number: f"device {device}, op {number + 1}")
    _require_once(schedule, named)
    for device, order in enumerate(schedule.orders):
        _require_own_order(device, order, named)
    simulate(schedule, forward_s=1.0, backward_s=1.0, weight_s=1.0)
    return schedule


def _require_once(schedule: Schedule, named: Where) -> None:
    stages, seen = schedule.virtual_stages(), dict[Done, str]()
    for device, order in enumerate(schedule.orders):
        for number, op in enumerate(order):
            at = named(device, number)
            if not 0 <= op.microbatch < schedule.num_microbatches:
                raise InputError(f"{at}: {op} is not one of {schedule.num_microbatches} microbatches.")
            stage = stages.get((schedule.route_of[op.microbatch], device, op.chunk))
            if stage is None:
                raise InputError(
                    f"{at}: {op} cannot run on device {device}: microbatch {op.microbatch} passes no chunk {op.chunk} "
                    f"there. Correct the chunk or the placement."
                )
            done = (op.kind, stage, op.microbatch)
            if done in seen:
                raise InputError(f"{at}: {op} stands there twice (first at {seen[done]}). Leave one of them out.")
            seen[done] = at
    for done in _wanted(schedule):
        if done not in seen:
            kind, stage, m = done
            place = schedule.routes[schedule.route_of[m]][stage]
            raise InputError(
                f"{Op(kind, m, place.chunk)} is missing on device {place.device}. Every microbatch needs F and B in "
                f"each of the {schedule.num_virtual_stages} virtual stages."
            )


def _wanted(schedule: Schedule) -> Iterator[Done]:
    for m in range(schedule.num_microbatches):
        for stage in range(schedule.num_virtual_stages):
            yield "F", stage, m
            yield "B", stage, m


def _require_own_order(device: int, order: tuple[Op, ...], named: Where) -> None:
    done = set()
    before: dict[Pass, Pass] = {"B": "F", "W": "B"}
    for number, op in enumerate(order):
        needs = before.get(op.kind)
        if needs and (needs, op.microbatch, op.chunk) not in done:
            first = Op(needs, op.microbatch, op.chunk)
            raise InputError(f"{named(device, number)}: {op} comes before {first}. Write {first} earlier.")
        done.add((op.kind, op.microbatch, op.chunk))


def check_fused(table: Fused) -> Fused:
    """The same fused form, when each of its ops has what it needs.

    From another device by the end of an earlier tick; from the device itself by then, or from an earlier slot of the
    same tick. The ops are those of the schedule, each once.
    """
    schedule = table.schedule
    check(table.in_order)
    for order, ops in zip(schedule.orders, table.in_order.orders, strict=True):
        if sorted(map(str, order)) != sorted(map(str, ops)):
            raise InputError(f"the fused form of {schedule.name} has other ops than the schedule.")
    at = _ticks(table)
    for (kind, stage, m), tick in at.items():
        needs = _needs(schedule, kind, stage, m)
        if needs is None:
            continue
        route = schedule.routes[schedule.route_of[m]]
        same_device = route[needs[1]].device == route[stage].device
        if at[needs] > tick - (not same_device):
            raise InputError(
                f"tick {tick}: {kind}{m} of virtual stage {stage} needs {needs[0]}{m} of {needs[1]}, "
                f"which is made in tick {at[needs]}."
            )
    return table


def _ticks(table: Fused) -> dict[Done, int]:
    stages, route_of = table.schedule.virtual_stages(), table.schedule.route_of
    return {
        (op.kind, stages[route_of[op.microbatch], device, op.chunk], op.microbatch): tick
        for tick, row in enumerate(table.ticks)
        for device, slots in enumerate(row)
        for op in slots.ops()
    }


def _needs(schedule: Schedule, kind: Pass, stage: int, m: int) -> Done | None:
    """The pass whose result a pass needs; of two, the one that is made last."""
    if kind == "F":
        return ("F", stage - 1, m) if stage else None
    if kind == "W":
        return "B", stage, m
    return ("B", stage + 1, m) if stage < schedule.num_virtual_stages - 1 else ("F", stage, m)
