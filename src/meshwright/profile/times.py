"""Where the wall time of a step goes on each device, from the events of a trace.

Every instant of a step on a device is one of five things, so that their shares sum to the whole:

- compute: an instruction runs whose FLOPs at the chip's rate take longer than its bytes through memory;
- memory-bound: none of those, and one runs whose bytes take longer;
- exposed communication: only collectives run, so that nothing hides them;
- overhead: nothing runs, before the first instruction of the step (the host prepares and launches it), in a gap of at
  most ``LAUNCH_GAP_S`` between two (launches, the turn of a loop), or behind the last one (the host reads results);
- idle: nothing runs for longer than that: the device waits.

Seconds of single instructions are counted twice over: by themselves, and as their part of the wall time, in which those
that run at the same instant share it, and a collective that something hides has none.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from meshwright.cost.breakdown import Partition
from meshwright.profile.classes import Bound, Facts
from meshwright.profile.events import OpEvent, Trace, Window

Interval = tuple[float, float]

LAUNCH_GAP_S = 50e-6
"""Gaps up to this are launches: several times what a kernel's launch takes (some 5 us), far less than a transfer."""
_ORDER: tuple[Bound, ...] = ("compute", "memory", "communication")


class OpTime(msgspec.Struct, frozen=True, kw_only=True):
    """One instruction in a mean step of a mean device: executions, seconds by themselves, their part of the wall time,
    and of a collective the seconds in which it is known to have waited for other devices."""

    name: str
    count: float
    own_s: float
    wall_s: float
    waited_s: float = 0.0


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """All that the events of the steps add up to; ``communication_s`` is that of a mean step and device, hidden or not,
    ``hidden_s`` the part of it in which the same device computes. ``num_launches`` counts instructions."""

    mean: Partition
    devices: dict[int, Partition]
    ops: tuple[OpTime, ...]
    communication_s: float
    hidden_s: float
    num_launches: float
    num_steps: int

    @property
    def waited_s(self) -> float:
        """Seconds in which collectives are known to have waited for other devices, of a mean step and device."""
        return sum(op.waited_s for op in self.ops)

    @property
    def overlap(self) -> float | None:
        """Share of communication hidden behind compute; None without any."""
        return self.hidden_s / self.communication_s if self.communication_s > 0 else None


# -- intervals --------------------------------------------------------------------------------------------


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same instants in intervals that neither touch nor overlap, in order."""
    found: list[Interval] = []
    for start, end in sorted(i for i in intervals if i[1] > i[0]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Seconds of intervals that do not overlap."""
    return sum(end - start for start, end in intervals)


def both(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The instants that two unions share."""
    found, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if end > start:
            found.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def clipped(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """What of each interval lies in a window."""
    cut = ((max(start, window[0]), min(end, window[1])) for start, end in intervals)
    return [(start, end) for start, end in cut if end > start]


# -- steps ------------------------------------------------------------------------------------------------


class _Sweep:
    """One step of one device, gone through from event to event."""

    def __init__(self, window: Window, facts: Facts) -> None:
        self.window, self.facts = window, facts
        self.seconds: dict[Bound, float] = dict.fromkeys(_ORDER, 0.0)
        self.gaps: list[Interval] = []
        self.wall: dict[str, float] = defaultdict(float)

    def run(self, events: Sequence[OpEvent]) -> Partition:
        """The step's partition; what each instruction has of the wall time is added to ``wall``."""
        start, end = self.window
        turns = []
        for number, event in enumerate(events):
            turns.append((max(event.start_s, start), True, number))
            turns.append((min(event.end_s, end), False, number))
        # ends before starts, so that an instant between two events belongs to neither
        turns.sort(key=lambda turn: (turn[0], turn[1]))
        active: dict[Bound, dict[int, str]] = {bound: {} for bound in _ORDER}
        at = start
        for when, begins, number in turns:
            self._pass(at, when, active)
            at = max(at, when)
            op = events[number].op
            held = active[self.facts.of(op).bound]
            if begins:
                held[number] = op
            else:
                held.pop(number, None)
        self._pass(at, end, active)
        overhead, idle = self._nothing(bool(events))
        return Partition(
            compute_s=self.seconds["compute"],
            memory_s=self.seconds["memory"],
            exposed_s=self.seconds["communication"],
            overhead_s=overhead,
            idle_s=idle,
        )

    def _pass(self, start: float, end: float, active: dict[Bound, dict[int, str]]) -> None:
        """The instants up to the next turn."""
        if end <= start:
            return
        for bound in _ORDER:
            if active[bound]:
                self.seconds[bound] += end - start
                each = (end - start) / len(active[bound])
                for op in active[bound].values():
                    self.wall[op] += each
                return
        if self.gaps and self.gaps[-1][1] == start:
            self.gaps[-1] = (self.gaps[-1][0], end)
        else:
            self.gaps.append((start, end))

    def _nothing(self, ran: bool) -> tuple[float, float]:
        """(overhead, idle) seconds of the gaps; a device without any event in the step is idle all through."""
        overhead = idle = 0.0
        for start, end in self.gaps:
            at_an_end = start == self.window.start_s or end == self.window.end_s
            if ran and (at_an_end or end - start <= LAUNCH_GAP_S):
                overhead += end - start
            else:
                idle += end - start
        return overhead, idle


class _Sums:
    """What the steps of all devices add up to."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = defaultdict(float)
        self.own: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        self.communication = self.hidden = 0.0

    def step(self, window: Window, events: Sequence[OpEvent], flights: Sequence[Interval], facts: Facts) -> Partition:
        """One step of one device added."""
        inside = [event for event in events if event.end_s > window.start_s and event.start_s < window.end_s]
        sweep = _Sweep(window, facts)
        found = sweep.run(inside)
        for op, seconds in sweep.wall.items():
            self.wall[op] += seconds
        sent = union(clipped(flights, window))
        busy = union(clipped(((e.start_s, e.end_s) for e in inside if _hides(e, facts)), window))
        self.communication += length(sent)
        self.hidden += length(both(sent, busy))
        for event in inside:
            if event.start_s >= window.start_s:  # else it counts in the step that it began in
                sums = self.own[event.op]
                for number, value in enumerate((1, event.seconds, event.waited_s)):
                    sums[number] += value
        return found

    def ops(self, shares: int) -> tuple[OpTime, ...]:
        """Means of every instruction, those with most of the wall time first."""
        found = []
        for op in self.wall.keys() | self.own.keys():
            n, seconds, waited = (value / shares for value in self.own[op])
            wall = self.wall[op] / shares
            found.append(OpTime(name=op, count=n, own_s=seconds, wall_s=wall, waited_s=waited))
        return tuple(sorted(found, key=lambda op: (-op.wall_s, op.name)))


def measure_times(trace: Trace, facts: Facts) -> Times:
    """Everything, as means over the steps and the devices of a trace."""
    sums, partitions = _Sums(), {}
    for device in trace.devices:
        events = [event for event in trace.of_device(device) if facts.is_work(event.op)]
        flights = in_flight(events, facts, trace.platform)
        partitions[device] = mean_partition([sums.step(window, events, flights, facts) for window in trace.windows])
    shares = len(trace.windows) * len(trace.devices)
    ops = sums.ops(shares)
    return Times(
        mean=mean_partition(list(partitions.values())),
        devices=partitions,
        ops=ops,
        communication_s=sums.communication / shares,
        hidden_s=sums.hidden / shares,
        num_launches=sum(op.count for op in ops),
        num_steps=len(trace.windows),
    )


def _hides(event: OpEvent, facts: Facts) -> bool:
    return facts.of(event.op).bound != "communication"


def in_flight(events: Sequence[OpEvent], facts: Facts, platform: Literal["cpu", "gpu", "tpu"]) -> list[Interval]:
    """When bytes are on their way between devices: while a collective runs.

    On TPU the two halves of an asynchronous one are instructions of their own, and it flies from the start of the first
    to the end of the second; on GPU its kernel stands with the first half.
    """
    sent = [event for event in events if facts.of(event.op).bound == "communication"]
    if platform != "tpu":
        return [(event.start_s, event.end_s) for event in sent]
    instructions = facts.program.instructions
    begun: dict[str, float] = {}
    found = []
    for event in sorted(sent, key=lambda event: event.start_s):
        one = instructions[event.op]
        if one.opcode.endswith("-start"):
            begun[event.op] = event.start_s
        start = next((begun.pop(name) for name in one.operands if name in begun), event.start_s)
        found.append((start, event.end_s))
    return found


def mean_partition(found: Sequence[Partition]) -> Partition:
    """The mean of each part."""
    names = Partition.__struct_fields__
    return Partition(**{n: sum(getattr(p, n) for p in found) / max(len(found), 1) for n in names})
