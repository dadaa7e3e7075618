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
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

from meshwright.cost.breakdown import Partition
from meshwright.profile.classes import Bound, OpClass
from meshwright.profile.events import DeviceTrace, OpEvent, TracePlatform, Window
from meshwright.profile.hlo import TracedProgram

Interval = tuple[float, float]
What = TypeVar("What")

LAUNCH_GAP_S = 50e-6
"""Gaps up to this are launches: several times what a kernel's launch takes (some 5 us), far less than a transfer."""
_ORDER: tuple[Bound, ...] = ("compute", "memory", "communication")


class OpTime(msgspec.Struct, frozen=True, kw_only=True):
    """One instruction in a mean step of a mean device: what it came from, executions, seconds by themselves, their part
    of the wall time, and of a collective the seconds in which it is known to have waited for other devices."""

    name: str
    kind: OpClass
    step: str
    count: float
    own_s: float
    wall_s: float
    waited_s: float = 0.0
    flops: float
    hbm_bytes: float


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """All that the events of the steps add up to; ``communication_s`` is that of a mean step and device, hidden or not,
    ``hidden_s`` the part of it in which the same device computes."""

    mean: Partition
    devices: dict[int, Partition]
    ops: tuple[OpTime, ...]
    communication_s: float
    hidden_s: float

    @property
    def num_launches(self) -> float:
        """Instructions of a mean step and device."""
        return sum(op.count for op in self.ops)

    @property
    def waited_s(self) -> float:
        """Seconds in which collectives are known to have waited for other devices, of a mean step and device."""
        return sum(op.waited_s for op in self.ops)

    @property
    def overlap(self) -> float | None:
        """Share of communication hidden behind compute; None without any."""
        return self.hidden_s / self.communication_s if self.communication_s > 0 else None


def segments(spans: Iterable[tuple[float, float, What]], window: Window) -> Iterator[tuple[Window, list[What]]]:
    """The whole of a window, cut where a span starts or ends, and what covers each piece; all times in order."""
    turns: list[tuple[float, bool, int]] = []
    names: list[What] = []
    for start, end, name in spans:
        start, end = max(start, window.start_s), min(end, window.end_s)
        if end > start:
            turns += [(start, True, len(names)), (end, False, len(names))]
            names.append(name)
    active: dict[int, What] = {}
    at = window.start_s
    for when, begins, number in sorted(turns):
        if when > at:
            yield Window(at, when), list(active.values())
            at = when
        if begins:
            active[number] = names[number]
        else:
            del active[number]
    if window.end_s > at:
        yield Window(at, window.end_s), []


# -- the steps of each device -----------------------------------------------------------------------------


class _Sums:
    """What the steps of all devices add up to."""

    def __init__(self, program: TracedProgram) -> None:
        self.program = program
        self.count, self.own_s, self.wall_s, self.waited_s = (defaultdict[str, float](float) for _ in range(4))
        self.communication_s = self.hidden_s = 0.0

    def step(self, window: Window, events: Sequence[OpEvent], flights: Sequence[Interval]) -> Partition:
        """One step of one device added."""
        inside = [event for event in events if event.end_s > window.start_s and event.start_s < window.end_s]
        for event in inside:
            if event.start_s >= window.start_s:  # else it counts in the step that it began in
                self.count[event.op] += 1
                self.own_s[event.op] += event.seconds
                self.waited_s[event.op] += event.waited_s
        seconds, gaps = dict.fromkeys(_ORDER, 0.0), list[Window]()
        spans: list[tuple[float, float, str]] = [(event.start_s, event.end_s, event.op) for event in inside]
        for piece, covered in segments([*spans, *((*flight, "") for flight in flights)], window):
            ops = [op for op in covered if op]
            bound = min((self.program.fact(op).bound for op in ops), key=_ORDER.index, default=None)
            if len(ops) < len(covered):
                self.communication_s += piece.seconds
                self.hidden_s += piece.seconds if bound in ("compute", "memory") else 0.0
            if bound is not None:
                seconds[bound] += piece.seconds
                sharing = [op for op in ops if self.program.fact(op).bound == bound]
                for op in sharing:
                    self.wall_s[op] += piece.seconds / len(sharing)
            elif gaps and gaps[-1].end_s == piece.start_s:
                gaps[-1] = Window(gaps[-1].start_s, piece.end_s)
            else:
                gaps.append(piece)
        overhead_s = idle_s = 0.0
        for gap in gaps:
            at_an_end = gap.start_s == window.start_s or gap.end_s == window.end_s
            # a device without any event in the step is idle all through
            if inside and (at_an_end or gap.seconds <= LAUNCH_GAP_S):
                overhead_s += gap.seconds
            else:
                idle_s += gap.seconds
        return Partition(
            compute_s=seconds["compute"],
            memory_s=seconds["memory"],
            exposed_s=seconds["communication"],
            overhead_s=overhead_s,
            idle_s=idle_s,
        )

    def ops(self, shares: int) -> tuple[OpTime, ...]:
        """Means of every instruction, those with most of the wall time first."""
        found = []
        for op in self.wall_s.keys() | self.own_s.keys():
            fact, count = self.program.fact(op), self.count[op] / shares
            one = OpTime(
                name=op,
                kind=fact.kind,
                step=fact.step,
                count=count,
                own_s=self.own_s[op] / shares,
                wall_s=self.wall_s[op] / shares,
                waited_s=self.waited_s[op] / shares,
                flops=fact.flops * count,
                hbm_bytes=fact.hbm_bytes * count,
            )
            found.append(one)
        return tuple(sorted(found, key=lambda op: (-op.wall_s, op.name)))


def measure_times(trace: DeviceTrace, program: TracedProgram) -> StepTimes:
    """Everything, as means over the steps and the devices of a trace."""
    sums, partitions = _Sums(program), {}
    for device in trace.devices:
        events = [event for event in trace.events if event.device == device and program.is_work(event.op)]
        flights = in_flight(events, program, trace.platform)
        partitions[device] = _mean([sums.step(window, events, flights) for window in trace.windows])
    shares = len(trace.windows) * len(trace.devices)
    return StepTimes(
        mean=_mean(list(partitions.values())),
        devices=partitions,
        ops=sums.ops(shares),
        communication_s=sums.communication_s / shares,
        hidden_s=sums.hidden_s / shares,
    )


def _mean(found: Sequence[Partition]) -> Partition:
    names = Partition.__struct_fields__
    return Partition(**{n: sum(getattr(p, n) for p in found) / max(len(found), 1) for n in names})


def in_flight(events: Sequence[OpEvent], program: TracedProgram, platform: TracePlatform) -> list[Interval]:
    """When bytes are on their way between devices: while a collective runs.

    On TPU the two halves of an asynchronous one are instructions of their own, and it flies from the start of the first
    to the end of the second; on GPU its kernel stands with the first half.
    """
    sent = [event for event in events if program.fact(event.op).bound == "communication"]
    if platform != "tpu":
        return [(event.start_s, event.end_s) for event in sent]
    instructions = program.instructions
    begun: dict[str, float] = {}
    found = []
    for event in sorted(sent, key=lambda event: event.start_s):
        one = instructions[event.op]
        if one.opcode.endswith("-start"):
            begun[event.op] = event.start_s
        start = next((begun.pop(name) for name in one.operands if name in begun), event.start_s)
        found.append((start, event.end_s))
    return found


# -- cores that emulated devices share --------------------------------------------------------------------


def shared_seconds(trace: DeviceTrace, program: TracedProgram) -> dict[str, float]:
    """Instruction -> seconds of a mean step that the machine spends on it, where emulated devices share its cores.

    What one device computes while the others wait for it in a collective runs on all cores, and what all compute at
    once on a part of them: seconds of single events say little. The step as a whole takes the time in which the machine
    gets through the work of all devices, and that is what a calibration with all devices busy predicts. So the wall
    time of a step is shared out, at every instant in equal parts, over the instructions that work on any device.
    Waiting in a collective is no work; an instant in which nobody works belongs to nothing.
    """
    found: dict[str, float] = defaultdict(float)
    spans = [(*span, event.op) for event in trace.events if program.is_work(event.op) for span in working(event)]
    for window in trace.windows:
        for piece, ops in segments(spans, window):
            for op in ops:
                found[op] += piece.seconds / len(ops)
    return {op: seconds / len(trace.windows) for op, seconds in found.items()}


def working(event: OpEvent) -> Iterator[tuple[float, float]]:
    """The spans of an event in which it does not wait."""
    at = event.start_s
    for start, end in event.waits:
        if start > at:
            yield at, start
        at = max(at, end)
    if event.end_s > at:
        yield at, event.end_s
