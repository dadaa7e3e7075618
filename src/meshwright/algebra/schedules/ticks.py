"""A fused schedule as tables of integers: what every device runs, reads, keeps and is sent in every tick.

In a tick a device runs F, then B, then W, and then messages move: a result of tick t reaches another device before
tick t + 1. Everything that waits lies in a numbered slot of a buffer, and values that are never alive at the same
time share a slot, so that the buffers are as large as the most that is alive at once on the worst device.
"""

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np

from meshwright.algebra.schedules.fused import Fused, fused
from meshwright.algebra.schedules.table import Pass, Schedule

IDLE = -1
"""In every column: nothing here. Of a slot that is read: the value does not come from that buffer."""

Column = Any
"""[ticks, devices] int32; or one device's [ticks], or one entry, where a table is being executed."""


class ForwardColumns(NamedTuple):
    """F: x comes from ``x_slot``, or from the embedding where that is idle; what B needs goes to ``stash_slot``.

    The last virtual stage (``is_last`` is 1) leaves its result in ``head_slot``, for the loss head in its B.
    """

    microbatch: Column
    chunk: Column
    x_slot: Column
    stash_slot: Column
    head_slot: Column
    is_last: Column


class BackwardColumns(NamedTuple):
    """B: dx comes from ``dx_slot``, or from the loss head, on ``head_slot``, where that is idle.

    ``is_first`` is 1 where the result goes on to the embedding. What W needs goes to ``handed_slot``; where that is
    idle, B is the whole backward pass.
    """

    microbatch: Column
    chunk: Column
    stash_slot: Column
    dx_slot: Column
    head_slot: Column
    is_first: Column
    handed_slot: Column


class WeightColumns(NamedTuple):
    """W, from what B left in ``handed_slot``."""

    microbatch: Column
    chunk: Column
    handed_slot: Column


class Columns(NamedTuple):
    """All of them; and, for each channel, the slot that the message of this tick is written to."""

    forward: ForwardColumns
    backward: BackwardColumns
    weight: WeightColumns
    x_arrivals: tuple[Column, ...]
    dx_arrivals: tuple[Column, ...]


class Channel(msgspec.Struct, frozen=True):
    """Messages that go the same way in a tick: from each first device of ``pairs`` to the second.

    ``offset`` is the way, modulo the number of devices; with 0 they stay where they are.
    """

    offset: int
    pairs: tuple[tuple[int, int], ...]


class Slots(msgspec.Struct, frozen=True, kw_only=True):
    """Slots of each buffer, on the worst device: messages both ways, what B needs, results that wait for the loss
    head, and what W needs."""

    x: int
    dx: int
    stash: int
    head: int
    handed: int


class TickTables(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule as one program runs it on every device. ``live`` counts each device's own slots, buffer by buffer."""

    schedule: Schedule
    columns: Columns
    x_channels: tuple[Channel, ...]
    dx_channels: tuple[Channel, ...]
    slots: Slots
    live: dict[str, tuple[int, ...]]

    @property
    def num_ticks(self) -> int:
        """Rows of the tables."""
        return len(self.columns.forward.microbatch)

    @property
    def num_permutes(self) -> int:
        """Sends between devices in every tick, both ways together."""
        return sum(channel.offset != 0 for channel in (*self.x_channels, *self.dx_channels))

    @property
    def has_backward(self) -> bool:
        """False for a table of forward passes only."""
        return bool((self.columns.backward.microbatch >= 0).any())

    @property
    def has_whole(self) -> bool:
        """Whether any B is the whole backward pass."""
        backward = self.columns.backward
        return bool(((backward.microbatch >= 0) & (backward.handed_slot < 0)).any())

    @property
    def has_split(self) -> bool:
        """Whether any weight gradients are made by a pass of their own."""
        return bool((self.columns.weight.microbatch >= 0).any())


class _Value(NamedTuple):
    """Something that waits on a device: written and read at moments, four of them in a tick."""

    device: int
    written: int
    read: int
    key: tuple[int, int]


_MOMENT: dict[Pass, int] = {"F": 0, "B": 1, "W": 2}
_ARRIVES = 3


def tick_tables(table: Fused) -> TickTables:
    """The tables of a fused schedule; its slots are the fewest that hold what is alive."""
    return _Builder(table).tables()


def forward_tables(schedule: Schedule) -> TickTables:
    """The tables of the forward passes alone, in the order in which each device has them."""
    orders = tuple(tuple(op for op in order if op.kind == "F") for order in schedule.orders)
    return tick_tables(fused(msgspec.structs.replace(schedule, orders=orders)))


class _Builder:
    def __init__(self, table: Fused) -> None:
        self.table, self.schedule = table, table.schedule
        self.shape = (table.num_ticks, self.schedule.num_devices)
        self.last = self.schedule.num_virtual_stages - 1
        stages = self.schedule.virtual_stages()
        self.at = {
            (op.kind, stages[self.schedule.route_of[op.microbatch], device, op.chunk], op.microbatch): tick
            for tick, row in enumerate(table.ticks)
            for device, slots in enumerate(row)
            for op in slots.ops()
        }

    def tables(self) -> TickTables:
        found = {name: _coloured(values) for name, values in self._values().items()}
        slot_of = {name: slots for name, (slots, _) in found.items()}
        live = {name: tuple(most.get(d, 0) for d in range(self.shape[1])) for name, (_, most) in found.items()}
        has_backward = any(kind == "B" for kind, _, _ in self.at)
        x_channels = self._channels(forwards=True)
        dx_channels = self._channels(forwards=False) if has_backward else ()
        columns = Columns(
            ForwardColumns(*self._columns("F", ForwardColumns._fields, slot_of)),
            BackwardColumns(*self._columns("B", BackwardColumns._fields, slot_of)),
            WeightColumns(*self._columns("W", WeightColumns._fields, slot_of)),
            tuple(self._arrivals("F", channel, slot_of["x"]) for channel in x_channels),
            tuple(self._arrivals("B", channel, slot_of["dx"]) for channel in dx_channels),
        )
        return TickTables(
            schedule=self.schedule,
            columns=columns,
            x_channels=x_channels,
            dx_channels=dx_channels,
            slots=Slots(**{name: max(counts) for name, counts in live.items()}),
            live=live,
        )

    def device(self, stage: int, m: int) -> int:
        return self.schedule.routes[self.schedule.route_of[m]][stage].device

    def when(self, kind: Pass, stage: int, m: int) -> int | None:
        """The moment at which a pass reads and writes."""
        tick = self.at.get((kind, stage, m))
        return None if tick is None else 4 * tick + _MOMENT[kind]

    def _values(self) -> dict[str, list[_Value]]:
        """What waits in each buffer."""
        found: dict[str, list[_Value]] = {name: [] for name in Slots.__struct_fields__}
        for m in range(self.schedule.num_microbatches):
            for stage in range(self.last + 1):
                for name, written, read in self._waits(stage, m):
                    if written is not None and read is not None:
                        found[name].append(_Value(self.device(stage, m), written, read, (stage, m)))
        return found

    def _waits(self, stage: int, m: int) -> Iterator[tuple[str, int | None, int | None]]:
        forward, backward, weight = (self.when(kind, stage, m) for kind in ("F", "B", "W"))
        if stage:
            yield "x", _arrival(self.at.get(("F", stage - 1, m))), forward
        if stage < self.last:
            yield "dx", _arrival(self.at.get(("B", stage + 1, m))), backward
        else:
            yield "head", forward, backward
        yield "stash", forward, backward
        yield "handed", backward, weight

    def _columns(
        self, kind: str, fields: tuple[str, ...], slot_of: dict[str, dict[tuple[int, int], int]]
    ) -> Iterator[np.ndarray]:
        for field in fields:
            column = np.full(self.shape, IDLE, np.int32)
            entry = self._entry(field, slot_of)
            for (found, stage, m), tick in self.at.items():
                if found == kind:
                    column[tick, self.device(stage, m)] = entry(stage, m)
            yield column

    def _entry(self, field: str, slot_of: dict[str, dict[tuple[int, int], int]]) -> Callable[[int, int], int]:
        """What a column has for a pass of a microbatch through a virtual stage."""
        if field == "microbatch":
            return lambda stage, m: m
        if field == "chunk":
            return lambda stage, m: self.schedule.routes[self.schedule.route_of[m]][stage].chunk
        if field in ("is_first", "is_last"):
            wanted = 0 if field == "is_first" else self.last
            return lambda stage, m: int(stage == wanted)
        slots = slot_of[field.removesuffix("_slot")]
        return lambda stage, m: slots.get((stage, m), IDLE)

    def _channels(self, *, forwards: bool) -> tuple[Channel, ...]:
        pairs: dict[int, set[tuple[int, int]]] = {}
        for route in self.schedule.routes:
            for one, other in pairwise(route if forwards else route[::-1]):
                offset = (other.device - one.device) % self.shape[1]
                pairs.setdefault(offset, set()).add((one.device, other.device))
        return tuple(Channel(offset, tuple(sorted(found))) for offset, found in sorted(pairs.items()))

    def _arrivals(self, kind: Pass, channel: Channel, slots: dict[tuple[int, int], int]) -> np.ndarray:
        """Where each device puts what reaches it by this channel."""
        step, column = 1 if kind == "F" else -1, np.full(self.shape, IDLE, np.int32)
        for stage, m in slots:
            source, device = self.device(stage - step, m), self.device(stage, m)
            if (device - source) % self.shape[1] == channel.offset:
                column[self.at[kind, stage - step, m], device] = slots[stage, m]
        return column


def _arrival(tick: int | None) -> int | None:
    return None if tick is None else 4 * tick + _ARRIVES


def _coloured(values: list[_Value]) -> tuple[dict[tuple[int, int], int], dict[int, int]]:
    """A slot for each value, the lowest that is free; and how many slots each device uses.

    Taken in the order in which they are written, values need as many slots as are alive at once, and no more.
    """
    slot_of: dict[tuple[int, int], int] = {}
    used: dict[int, int] = {}
    free: dict[int, list[int]] = {}
    busy: dict[int, list[tuple[int, int]]] = {}
    for value in sorted(values, key=lambda value: value.written):
        mine, waiting = free.setdefault(value.device, []), busy.setdefault(value.device, [])
        while waiting and waiting[0][0] < value.written:
            heappush(mine, heappop(waiting)[1])
        if not mine:
            heappush(mine, used.get(value.device, 0))
            used[value.device] = used.get(value.device, 0) + 1
        slot_of[value.key] = slot = heappop(mine)
        heappush(waiting, (value.read, slot))
    return slot_of, used
