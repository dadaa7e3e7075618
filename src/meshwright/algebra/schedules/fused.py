"""The fused-tick form of a schedule: in every tick each device has a slot for F, one for B and one for W.

Devices that exchange messages in every tick run in lockstep with their neighbours. With one op per tick the forward
passes of one device wait for the backward passes of the next; with all three slots in a tick every steady tick costs
the same on every device, and no time is lost to it.
"""

from collections.abc import Iterator
from itertools import pairwise

import msgspec

from meshwright.algebra.schedules.simulation import Seconds, op_seconds, peak_stash
from meshwright.algebra.schedules.table import Op, Schedule


class Slots(msgspec.Struct, frozen=True, kw_only=True):
    """What one device does in one tick, in this order; None where a slot is empty."""

    forward: Op | None = None
    backward: Op | None = None
    weight: Op | None = None

    def ops(self) -> tuple[Op, ...]:
        """The ops of the tick in the order they run."""
        return tuple(op for op in (self.forward, self.backward, self.weight) if op is not None)


class Fused(msgspec.Struct, frozen=True, kw_only=True):
    """``ticks[tick][device]``: results made in one tick reach other devices before the next one."""

    schedule: Schedule
    ticks: tuple[tuple[Slots, ...], ...]

    @property
    def num_ticks(self) -> int:
        """Length of the table."""
        return len(self.ticks)

    @property
    def in_order(self) -> Schedule:
        """The ops of every device one after the other: what lockstep does to the order of the schedule."""
        orders = tuple(
            tuple(op for tick in self.ticks for op in tick[device].ops()) for device in range(self.schedule.num_devices)
        )
        return msgspec.structs.replace(self.schedule, orders=orders)


def fused(schedule: Schedule) -> Fused:
    """The ops of a schedule in the earliest ticks that keep its character.

    On each device every kind keeps its order; B and W also wait for the forward passes that precede them (GPipe
    stays GPipe), W for the backward passes. Forward passes may run ahead, because a message now takes a tick each
    way, until a device holds twice its peak stash less one: for 1F1B 2 (stages - 1 - device) + 1 microbatches.
    """
    return Fused(schedule=schedule, ticks=tuple(_fill(schedule)))


def _fill(schedule: Schedule) -> Iterator[tuple[Slots, ...]]:
    limits = [2 * round(stash / schedule.piece_share) - 1 for stash in peak_stash(schedule)]
    queues = [_Queue(schedule, device, limit) for device, limit in enumerate(limits)]
    made: set[tuple[str, int, int]] = set()
    while any(queue.is_open for queue in queues):
        row = tuple(queue.take(made) for queue in queues)
        assert any(slots.ops() for slots in row), f"no op of {schedule.name} can run: check the schedule first"
        for device, slots in enumerate(row):
            made.update(queues[device].result(op) for op in slots.ops())
        yield row


class _Queue:
    """What a device has yet to do, kind by kind."""

    def __init__(self, schedule: Schedule, device: int, limit: int) -> None:
        self._stages = {
            (route, chunk): stage for (route, at, chunk), stage in schedule.virtual_stages().items() if at == device
        }
        self._route_of, self._last = schedule.route_of, schedule.num_virtual_stages - 1
        order = schedule.orders[device]
        self._ops = {kind: [op for op in order if op.kind == kind] for kind in ("F", "B", "W")}
        self._after = {kind: _preceding(order, kind) for kind in ("B", "W")}
        self._frees = {(op.microbatch, op.chunk): op.kind for op in order if op.kind != "F"}
        self._done = {"F": 0, "B": 0, "W": 0}
        self._alive, self._limit = 0, limit

    @property
    def is_open(self) -> bool:
        return any(self._done[kind] < len(ops) for kind, ops in self._ops.items())

    def result(self, op: Op) -> tuple[str, int, int]:
        return op.kind, self._stages[self._route_of[op.microbatch], op.chunk], op.microbatch

    def take(self, made: set[tuple[str, int, int]]) -> Slots:
        """The slots of one tick, from what others made in earlier ticks and this device up to here."""
        own: set[tuple[str, int, int]] = set()
        forward = self._next("F", made, own) if self._alive < self._limit else None
        backward = self._next("B", made, own)
        return Slots(forward=forward, backward=backward, weight=self._next("W", made, own))

    def _next(self, kind: str, made: set[tuple[str, int, int]], own: set[tuple[str, int, int]]) -> Op | None:
        count = self._done[kind]
        if count == len(self._ops[kind]):
            return None
        if kind != "F" and any(self._done[earlier] < least for earlier, least in self._after[kind][count].items()):
            return None
        op = self._ops[kind][count]
        _, stage, m = self.result(op)
        if kind == "F":
            ready = stage == 0 or ("F", stage - 1, m) in made
        elif kind == "B":
            ready = ("F", stage, m) in made | own if stage == self._last else ("B", stage + 1, m) in made
        else:
            ready = True
        if not ready:
            return None
        self._done[kind] += 1
        own.add(self.result(op))
        # The last of a microbatch's rows here decides when its stash is free.
        self._alive += (kind == "F") - (self._frees.get((m, op.chunk)) == kind)
        return op


def _preceding(order: tuple[Op, ...], kind: str) -> list[dict[str, int]]:
    """For each op of a kind, how many forward passes (and, for W, backward passes) stand before it."""
    kinds = ("F",) if kind == "B" else ("F", "B")
    seen = dict.fromkeys(kinds, 0)
    found = []
    for op in order:
        if op.kind == kind:
            found.append(dict(seen))
        if op.kind in seen:
            seen[op.kind] += 1
    return found


def fused_seconds(
    table: Fused, *, forward_s: Seconds, backward_s: Seconds, weight_s: Seconds = 0.0, send_s: float = 0.0
) -> float:
    """Seconds of a step where each tick of a device begins when its neighbours have ended the one before.

    Times as in `simulation.simulate`; every tick's messages take ``send_s``.
    """
    schedule = table.schedule
    seconds = op_seconds(schedule, forward_s=forward_s, backward_s=backward_s, weight_s=weight_s)
    neighbours = _neighbours(schedule)
    end: list[float] = [0] * schedule.num_devices
    for number, tick in enumerate(table.ticks):
        sent_s = send_s if number else 0
        end = [
            max(end[device], *(end[other] + sent_s for other in neighbours[device]))
            + sum(seconds(device, op) for op in slots.ops())
            for device, slots in enumerate(tick)
        ]
    return max(end)


def _neighbours(schedule: Schedule) -> list[set[int]]:
    """The devices that each one exchanges messages with; itself where there is no other."""
    found: list[set[int]] = [set() for _ in schedule.orders]
    for route in schedule.routes:
        for one, other in pairwise(route):
            if one.device != other.device:
                found[one.device].add(other.device)
                found[other.device].add(one.device)
    return [others or {device} for device, others in enumerate(found)]
