"""A schedule in fused ticks as tables of integers: what every device runs, reads, keeps and is sent in every tick.

Devices that exchange messages in every tick run in lockstep with their neighbours. With one op per tick the forward
passes of one device wait for the backward passes of the next; with up to one F, one B and one W in a tick every steady
tick costs the same on every device, and no time is lost to it. In a tick a device runs F, then B, then W, and then
messages move: a result of tick t reaches another device before tick t + 1. A value that waits has a numbered slot of a
buffer. Values that are never alive at the same time share a slot, so that a buffer has as many slots as values are
alive at once on the worst device.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from meshwright.algebra.schedules.simulation import Seconds, most_alive, pass_times, peak_stash
from meshwright.algebra.schedules.table import PassKind, Result, Schedule, Task
from meshwright.core.errors import InputError

Tick = tuple[tuple[Task, ...], ...]
"""The tasks of each device in one tick, in the order they run; results reach other devices before the next tick."""

PASSES: tuple[PassKind, ...] = ("F", "B", "W")

MAX_CELLS = 4_000_000
"""Limit on ticks times devices: larger tables take minutes."""

IDLE = -1
"""Entry of a column where nothing runs or arrives; for a slot that is read, the value does not come from the buffer."""

Column = Any
"""[ticks, devices] int32; or one device's [ticks], or one entry, where a table is being executed."""


class ForwardColumns(NamedTuple):
    """F reads x from ``x_slot``, or from the embedding if that is `IDLE`, and writes arrays for B to ``stash_slot``.

    The last virtual stage (``is_last`` is 1) writes its result to ``head_slot``, for the loss head in its B.
    """

    microbatch: Column
    chunk: Column
    x_slot: Column
    stash_slot: Column
    head_slot: Column
    is_last: Column


class BackwardColumns(NamedTuple):
    """B reads dx from ``dx_slot``, or if that is `IDLE` runs the loss head on ``head_slot``.

    ``is_first`` is 1 where the embedding takes the result. B writes the arrays for W to ``handed_slot``; if that is
    `IDLE`, B is the whole backward pass.
    """

    microbatch: Column
    chunk: Column
    stash_slot: Column
    dx_slot: Column
    head_slot: Column
    is_first: Column
    handed_slot: Column


class WeightColumns(NamedTuple):
    """W reads the arrays that B has written to ``handed_slot``."""

    microbatch: Column
    chunk: Column
    handed_slot: Column


OfPass = TypeVar("OfPass", ForwardColumns, BackwardColumns, WeightColumns)


class Columns(NamedTuple):
    """The columns of all passes, and for each channel a column of the slots to which each tick's message is written."""

    forward: ForwardColumns
    backward: BackwardColumns
    weight: WeightColumns
    x_arrivals: tuple[Column, ...]
    dx_arrivals: tuple[Column, ...]


class MessageChannel(msgspec.Struct, frozen=True):
    """Messages of one direction in a tick: from each first device of ``pairs`` to the second.

    ``offset`` is receiver minus sender, modulo the number of devices; with 0 messages stay on their device.
    """

    offset: int
    pairs: tuple[tuple[int, int], ...]


class Slots(msgspec.Struct, frozen=True, kw_only=True):
    """Slots of each buffer on the worst device: messages in both directions, stashes that B needs, results that wait
    for the loss head, and arrays that W needs."""

    x: int
    dx: int
    stash: int
    head: int
    handed: int


class TickTables(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule as one program runs it on every device. ``live`` maps a buffer to the slots that each device needs."""

    schedule: Schedule
    ticks: tuple[Tick, ...]
    columns: Columns
    x_channels: tuple[MessageChannel, ...]
    dx_channels: tuple[MessageChannel, ...]
    live: dict[str, tuple[int, ...]]

    @property
    def num_ticks(self) -> int:
        """Rows of the tables."""
        return len(self.ticks)

    @property
    def slots(self) -> Slots:
        """The slots that all devices have, as all run one program."""
        return Slots(**{name: max(counts) for name, counts in self.live.items()})

    @property
    def peak_stash(self) -> tuple[float, ...]:
        """Most stashes of each device that are alive at once, as in `simulation.peak_stash`."""
        device_rows = zip(*self.ticks, strict=True)
        return tuple(self.schedule.piece_share * most_alive(itertools.chain(*row)) for row in device_rows)

    @property
    def has_backward(self) -> bool:
        """False for a table of forward passes only."""
        return self._has("B", "BW")

    @property
    def has_whole(self) -> bool:
        """True if any B is the whole backward pass."""
        return self._has("BW")

    @property
    def has_split(self) -> bool:
        """True if any weight gradients are made in a separate pass W."""
        return self._has("W")

    def _has(self, *takes: str) -> bool:
        return any(task.takes in takes for tasks in self.schedule.tasks for task in tasks)


def tick_tables(schedule: Schedule) -> TickTables:
    """Returns the tables of a schedule, with as few slots as the live values need."""
    return _Builder(schedule).tables()


def forward_tables(schedule: Schedule) -> TickTables:
    """Returns the tables of only the forward passes, in the order in which each device has them."""
    orders = tuple(tuple(op for op in order if op.kind == "F") for order in schedule.orders)
    return tick_tables(msgspec.structs.replace(schedule, orders=orders))


def lockstep_seconds(
    tables: TickTables, *, forward_s: Seconds, backward_s: Seconds, weight_s: Seconds = 0.0, send_s: float = 0.0
) -> float:
    """Returns the seconds of a step in which a tick of a device begins when its neighbours have ended the one before.

    Times are as in `simulation.simulate`; the messages of every tick take ``send_s``.
    """
    times_by_kind = pass_times(tables.schedule, forward_s=forward_s, backward_s=backward_s, weight_s=weight_s)
    neighbours_of = [{device} for device in range(tables.schedule.num_devices)]
    for sender, receiver in (pair for channel in tables.x_channels for pair in channel.pairs):
        neighbours_of[sender].add(receiver)
        neighbours_of[receiver].add(sender)
    awaited_by = [near_devices - {device} or near_devices for device, near_devices in enumerate(neighbours_of)]
    end_s: list[float] = [0] * len(neighbours_of)
    for tick_index, tick in enumerate(tables.ticks):
        sent_s = send_s if tick_index else 0
        end_s = [
            max(end_s[device], *(end_s[neighbour] + sent_s for neighbour in awaited_by[device]))
            + sum(times_by_kind[task.takes][task.makes.stage] for task in tasks)
            for device, tasks in enumerate(tick)
        ]
    return max(end_s)


def _fused_ticks(schedule: Schedule) -> Iterator[Tick]:
    """Yields the ops of a schedule in the earliest ticks that keep its order of passes on each device.

    On each device every kind keeps its order; B waits for the F that precede it there (GPipe stays GPipe), W for the F
    and the B. Forward passes may run ahead, because a message now takes a tick each way, until a device holds twice its
    peak stash less one: for 1F1B 2 (stages - 1 - device) + 1 microbatches.
    """
    tasks_and_stash = zip(schedule.tasks, peak_stash(schedule), strict=True)
    queues = [_Queue(tasks, 2 * round(stash / schedule.piece_share) - 1) for tasks, stash in tasks_and_stash]
    devices_needing: dict[Result | None, list[int]] = {}
    for device, tasks in enumerate(schedule.tasks):
        for task in tasks:
            devices_needing.setdefault(task.needs, []).append(device)
    made_results: set[Result] = set()
    # only a device that ran in the last tick, or is sent something, can have something new to run
    awake_devices, num_tasks_left = set(range(len(queues))), sum(map(len, schedule.tasks))
    for num_ticks in itertools.count(1):
        if not num_tasks_left:
            return
        if num_ticks * len(queues) > MAX_CELLS:
            raise InputError(f"{schedule.name}: more than {num_ticks:,} ticks of {len(queues):,} devices. Shorten it.")
        tick: list[tuple[Task, ...]] = [()] * len(queues)
        for device in awake_devices:
            tick[device] = queues[device].take(made_results)
        devices_run = {device for device in awake_devices if tick[device]}
        assert devices_run, f"no op of {schedule.name} can run: check the schedule first"
        new_results = [task.makes for device in devices_run for task in tick[device]]
        made_results.update(new_results)
        num_tasks_left -= len(new_results)
        awake_devices = devices_run.union(*(devices_needing.get(result, ()) for result in new_results))
        yield tuple(tick)


class _Queue:
    """The tasks that a device has yet to run, kind by kind."""

    def __init__(self, tasks: tuple[Task, ...], limit: int) -> None:
        self._tasks: dict[PassKind, list[Task]] = {kind: [] for kind in PASSES}
        self._after: dict[Result, tuple[int, ...]] = {}
        for task in tasks:
            # B waits for the F that precede it here, W for the F and B
            earlier_kinds = PASSES[: PASSES.index(task.makes.kind)]
            self._after[task.makes] = tuple(len(self._tasks[kind]) for kind in earlier_kinds)
            self._tasks[task.makes.kind].append(task)
        self._done: dict[PassKind, int] = dict.fromkeys(PASSES, 0)
        self._alive, self._limit = 0, limit

    def take(self, made: set[Result]) -> tuple[Task, ...]:
        """Returns the tasks of one tick, which need results of earlier ticks or of this tick's tasks on this device."""
        tasks: list[Task] = []
        for kind in PASSES:
            task = self._next(kind, made, tasks)
            if task:
                tasks.append(task)
                self._done[kind] += 1
                # W, or a B that is the whole backward pass, frees a stash
                self._alive += (kind == "F") - (task.takes in ("W", "BW"))
        return tuple(tasks)

    def _next(self, kind: PassKind, made: set[Result], tasks: list[Task]) -> Task | None:
        num_done = self._done[kind]
        if num_done == len(self._tasks[kind]) or (kind == "F" and self._alive >= self._limit):
            return None
        task = self._tasks[kind][num_done]
        if any(self._done[earlier] < least for earlier, least in zip(PASSES, self._after[task.makes], strict=False)):
            return None
        is_ready = task.needs is None or task.needs in made or any(task.needs == prior.makes for prior in tasks)
        return task if is_ready else None


class _Value(NamedTuple):
    """A value that waits on a device, with the virtual stage and microbatch as ``key``. A tick has four moments; those
    at which it is written and read are given."""

    device: int
    written: int
    read: int
    key: tuple[int, int]


_MOMENT: dict[PassKind, int] = {"F": 0, "B": 1, "W": 2}
_ARRIVES = 3


class _Builder:
    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.ticks = schedule, tuple(_fused_ticks(schedule))
        self.shape = (len(self.ticks), schedule.num_devices)
        self.last = schedule.num_virtual_stages - 1
        self.at = {task.makes: n for n, tick in enumerate(self.ticks) for tasks in tick for task in tasks}

    def tables(self) -> TickTables:
        colouring_of = {name: _coloured(values) for name, values in self._values().items()}
        slots_of = {name: slots for name, (slots, _) in colouring_of.items()}
        has_backward = any(result.kind == "B" for result in self.at)
        x_channels = self._channels(forwards=True)
        dx_channels = self._channels(forwards=False) if has_backward else ()
        columns = Columns(
            self._columns("F", ForwardColumns, slots_of),
            self._columns("B", BackwardColumns, slots_of),
            self._columns("W", WeightColumns, slots_of),
            tuple(self._arrivals("F", channel, slots_of["x"]) for channel in x_channels),
            tuple(self._arrivals("B", channel, slots_of["dx"]) for channel in dx_channels),
        )
        return TickTables(
            schedule=self.schedule,
            ticks=self.ticks,
            columns=columns,
            x_channels=x_channels,
            dx_channels=dx_channels,
            live={name: tuple(counts[d] for d in range(self.shape[1])) for name, (_, counts) in colouring_of.items()},
        )

    def _values(self) -> dict[str, list[_Value]]:
        """Returns the values of each buffer, each live from the pass that makes it to the pass that needs it."""
        values_by_buffer: dict[str, list[_Value]] = {name: [] for name in Slots.__struct_fields__}
        for m, stage in itertools.product(range(self.schedule.num_microbatches), range(self.last + 1)):
            forward, backward, weight = (Result(kind, stage, m) for kind in PASSES)
            passes_by_buffer = {
                "x": (Result("F", stage - 1, m), forward),
                "dx": (Result("B", stage + 1, m), backward),
                "stash": (forward, backward),
                "handed": (backward, weight),
                **({"head": (forward, backward)} if stage == self.last else {}),
            }
            for name, (writer, reader) in passes_by_buffer.items():
                if writer in self.at and reader in self.at:
                    written_at = 4 * self.at[writer] + (_ARRIVES if name in ("x", "dx") else _MOMENT[writer.kind])
                    read_at, device = 4 * self.at[reader] + _MOMENT[reader.kind], self.schedule.place(stage, m).device
                    values_by_buffer[name].append(_Value(device, written_at, read_at, (stage, m)))
        return values_by_buffer

    def _columns(self, kind: PassKind, form: type[OfPass], slots_of: dict[str, dict[tuple[int, int], int]]) -> OfPass:
        column_of = {field: np.full(self.shape, IDLE, np.int32) for field in form._fields}
        for (result_kind, stage, m), tick in self.at.items():
            if result_kind == kind:
                place = self.schedule.place(stage, m)
                entry_of = {f"{name}_slot": slots.get((stage, m), IDLE) for name, slots in slots_of.items()}
                entry_of |= {"microbatch": m, "chunk": place.chunk}
                entry_of |= {"is_first": int(stage == 0), "is_last": int(stage == self.last)}
                for field, column in column_of.items():
                    column[tick, place.device] = entry_of[field]
        return form(**column_of)

    def _channels(self, *, forwards: bool) -> tuple[MessageChannel, ...]:
        pairs_by_offset: dict[int, set[tuple[int, int]]] = {}
        for route in self.schedule.routes:
            for sender, receiver in itertools.pairwise(route if forwards else route[::-1]):
                offset = (receiver.device - sender.device) % self.shape[1]
                pairs_by_offset.setdefault(offset, set()).add((sender.device, receiver.device))
        return tuple(MessageChannel(offset, tuple(sorted(pairs))) for offset, pairs in sorted(pairs_by_offset.items()))

    def _arrivals(self, kind: PassKind, channel: MessageChannel, slot_of: dict[tuple[int, int], int]) -> np.ndarray:
        """Returns the slot to which each device writes the message of this channel, for each tick."""
        stage_step, column = 1 if kind == "F" else -1, np.full(self.shape, IDLE, np.int32)
        for (stage, m), slot in slot_of.items():
            sender, receiver = self.schedule.place(stage - stage_step, m).device, self.schedule.place(stage, m).device
            if (receiver - sender) % self.shape[1] == channel.offset:
                column[self.at[Result(kind, stage - stage_step, m)], receiver] = slot
        return column


def _coloured(values: list[_Value]) -> tuple[dict[tuple[int, int], int], Counter[int]]:
    """Returns a slot for each value, the lowest that is free, and how many slots each device uses.

    Taken in the order in which they are written, values need as many slots as are alive at once, and no more.
    """
    slot_of: dict[tuple[int, int], int] = {}
    num_slots_of = Counter[int]()
    sorted_values = sorted(values, key=lambda value: (value.device, value.written))
    for device, device_values in itertools.groupby(sorted_values, key=lambda value: value.device):
        free_slots, busy_slots = list[int](), list[tuple[int, int]]()
        for value in device_values:
            while busy_slots and busy_slots[0][0] < value.written:
                heappush(free_slots, heappop(busy_slots)[1])
            if not free_slots:
                free_slots.append(num_slots_of[device])
                num_slots_of[device] += 1
            slot_of[value.key] = slot = heappop(free_slots)
            heappush(busy_slots, (value.read, slot))
    return slot_of, num_slots_of
