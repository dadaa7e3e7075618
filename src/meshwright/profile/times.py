"""Partitions the wall time of a step on each device, from the events of a trace.

Every instant of a step on a device belongs to one of five parts, which sum to the whole:

- compute: an instruction runs whose FLOPs at the chip's rate take longer than its bytes through memory;
- memory-bound: no such instruction runs, and one whose bytes take longer does;
- exposed communication: only collectives run, so that nothing hides them;
- overhead: nothing runs, before the first instruction of the step (the host prepares and launches it), in a gap of at
  most ``LAUNCH_GAP_S`` between two (launches, the end of a loop's iteration), or after the last one (the host reads
  results);
- idle: nothing runs in a longer gap, or in all of the step: the device waits.

Each instruction has two times: its duration, and its part of the wall time. Running instructions of the part that an
instant belongs to share the instant equally; other ones (a collective during compute) get nothing of it.
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
"""Longest gap that counts as a launch: several times a kernel's launch (about 5 us), far less than a transfer."""
_ORDER: tuple[Bound, ...] = ("compute", "memory", "communication")


class OpTime(msgspec.Struct, frozen=True, kw_only=True):
    """One instruction, averaged over steps and devices: ``count`` executions, ``own_s`` the sum of their durations,
    ``wall_s`` its part of the wall time, ``waited_s`` the seconds in which a collective waited for other devices."""

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
    """Times of a trace; ``communication_s`` is the mean per step and device, hidden or not, and ``hidden_s`` the part
    of it in which the same device computes or moves memory."""

    mean: Partition
    devices: dict[int, Partition]
    ops: tuple[OpTime, ...]
    communication_s: float
    hidden_s: float

    @property
    def waited_s(self) -> float:
        """Seconds in which collectives waited for other devices, mean per step and device."""
        return sum(op.waited_s for op in self.ops)

    @property
    def overlap(self) -> float | None:
        """Share of communication hidden behind other instructions; None without communication."""
        return self.hidden_s / self.communication_s if self.communication_s > 0 else None


def segments(spans: Iterable[tuple[float, float, What]], window: Window) -> Iterator[tuple[Window, list[What]]]:
    """Splits a window at every start and end of a span; yields each segment in order with the names of its spans."""
    edges: list[tuple[float, bool, int]] = []
    span_names: list[What] = []
    for start_s, end_s, name in spans:
        start_s, end_s = max(start_s, window.start_s), min(end_s, window.end_s)
        if end_s > start_s:
            edges += [(start_s, True, len(span_names)), (end_s, False, len(span_names))]
            span_names.append(name)
    active_names: dict[int, What] = {}
    begin_s = window.start_s
    for time_s, is_start, span_index in sorted(edges):
        if time_s > begin_s:
            yield Window(begin_s, time_s), list(active_names.values())
            begin_s = time_s
        if is_start:
            active_names[span_index] = span_names[span_index]
        else:
            del active_names[span_index]
    if window.end_s > begin_s:
        yield Window(begin_s, window.end_s), []


# -- the steps of each device -----------------------------------------------------------------------------


class _Sums:
    """Running sums of times over the steps of all devices."""

    def __init__(self, program: TracedProgram) -> None:
        self.program = program
        self.count, self.own_s, self.wall_s, self.waited_s = (defaultdict[str, float](float) for _ in range(4))
        self.communication_s = self.hidden_s = 0.0

    def step(self, window: Window, events: Sequence[OpEvent], flights: Sequence[Interval]) -> Partition:
        """Adds one step of one device, and returns its partition."""
        events_inside = [event for event in events if event.end_s > window.start_s and event.start_s < window.end_s]
        for event in events_inside:
            if event.start_s >= window.start_s:  # else it counts in the step that it began in
                self.count[event.op] += 1
                self.own_s[event.op] += event.seconds
                self.waited_s[event.op] += event.waited_s
        seconds_by_bound, gaps = dict.fromkeys(_ORDER, 0.0), list[Window]()
        spans: list[tuple[float, float, str]] = [(event.start_s, event.end_s, event.op) for event in events_inside]
        for segment, covering_ops in segments([*spans, *((*flight, "") for flight in flights)], window):
            ops = [op for op in covering_ops if op]
            bound = min((self.program.fact(op).bound for op in ops), key=_ORDER.index, default=None)
            if len(ops) < len(covering_ops):
                self.communication_s += segment.seconds
                self.hidden_s += segment.seconds if bound in ("compute", "memory") else 0.0
            if bound is not None:
                seconds_by_bound[bound] += segment.seconds
                sharing_ops = [op for op in ops if self.program.fact(op).bound == bound]
                for op in sharing_ops:
                    self.wall_s[op] += segment.seconds / len(sharing_ops)
            elif gaps and gaps[-1].end_s == segment.start_s:
                gaps[-1] = Window(gaps[-1].start_s, segment.end_s)
            else:
                gaps.append(segment)
        overhead_s = idle_s = 0.0
        for gap in gaps:
            is_at_end = gap.start_s == window.start_s or gap.end_s == window.end_s
            # a device without any event in the step is idle all through
            if events_inside and (is_at_end or gap.seconds <= LAUNCH_GAP_S):
                overhead_s += gap.seconds
            else:
                idle_s += gap.seconds
        return Partition(
            compute_s=seconds_by_bound["compute"],
            memory_s=seconds_by_bound["memory"],
            exposed_s=seconds_by_bound["communication"],
            overhead_s=overhead_s,
            idle_s=idle_s,
        )

    def ops(self, shares: int) -> tuple[OpTime, ...]:
        """Returns each instruction's mean times and count per step and device, the most wall time first. ``shares`` is
        the number of steps times that of devices, by which sums are divided."""
        op_times = []
        for op in self.wall_s.keys() | self.own_s.keys():
            op_fact, mean_count = self.program.fact(op), self.count[op] / shares
            op_time = OpTime(
                name=op,
                kind=op_fact.kind,
                step=op_fact.step,
                count=mean_count,
                own_s=self.own_s[op] / shares,
                wall_s=self.wall_s[op] / shares,
                waited_s=self.waited_s[op] / shares,
                flops=op_fact.flops * mean_count,
                hbm_bytes=op_fact.hbm_bytes * mean_count,
            )
            op_times.append(op_time)
        return tuple(sorted(op_times, key=lambda op: (-op.wall_s, op.name)))


def measure_times(trace: DeviceTrace, program: TracedProgram) -> StepTimes:
    """Returns the times of a trace, as means over its steps and devices."""
    running_sums, partition_by_device = _Sums(program), {}
    for device in trace.devices:
        events = [event for event in trace.events if event.device == device and program.is_work(event.op)]
        flights = in_flight(events, program, trace.platform)
        partition_by_device[device] = _mean([running_sums.step(window, events, flights) for window in trace.windows])
    num_device_steps = len(trace.windows) * len(trace.devices)
    return StepTimes(
        mean=_mean(list(partition_by_device.values())),
        devices=partition_by_device,
        ops=running_sums.ops(num_device_steps),
        communication_s=running_sums.communication_s / num_device_steps,
        hidden_s=running_sums.hidden_s / num_device_steps,
    )


def _mean(partitions: Sequence[Partition]) -> Partition:
    names = Partition.__struct_fields__
    return Partition(**{field: sum(getattr(p, field) for p in partitions) / max(len(partitions), 1) for field in names})


def in_flight(events: Sequence[OpEvent], program: TracedProgram, platform: TracePlatform) -> list[Interval]:
    """Returns the spans in which collectives are in flight.

    On TPU the two halves of an asynchronous collective are separate instructions; it is in flight from the start of the
    first to the end of the second. On GPU its kernel belongs to the first half.
    """
    collective_events = [event for event in events if program.fact(event.op).bound == "communication"]
    if platform != "tpu":
        return [(event.start_s, event.end_s) for event in collective_events]
    instructions = program.instructions
    start_by_op: dict[str, float] = {}
    spans = []
    for event in sorted(collective_events, key=lambda event: event.start_s):
        instruction = instructions[event.op]
        if instruction.opcode.endswith("-start"):
            start_by_op[event.op] = event.start_s
        start_s = next((start_by_op.pop(name) for name in instruction.operands if name in start_by_op), event.start_s)
        spans.append((start_s, event.end_s))
    return spans


# -- cores that emulated devices share --------------------------------------------------------------------


def shared_seconds(trace: DeviceTrace, program: TracedProgram) -> dict[str, float]:
    """Returns the machine's seconds per step for each instruction, if emulated devices share its cores.

    A device that computes while all other devices wait uses all cores, and devices that compute together a part each,
    so the durations of single events say little. A step takes as long as the machine needs for the work of all devices,
    and a calibration with all devices busy predicts that. Therefore every instant of a step is divided equally among
    the instructions that work on any device. Waiting in a collective is not work; instants without work count for no
    instruction.
    """
    seconds_by_op: dict[str, float] = defaultdict(float)
    spans = [(*span, event.op) for event in trace.events if program.is_work(event.op) for span in working(event)]
    for window in trace.windows:
        for segment, ops in segments(spans, window):
            for op in ops:
                seconds_by_op[op] += segment.seconds / len(ops)
    return {op: seconds / len(trace.windows) for op, seconds in seconds_by_op.items()}


def working(event: OpEvent) -> Iterator[tuple[float, float]]:
    """Yields the spans (start, end) of an event in which it does not wait for other devices."""
    begin_s = event.start_s
    for start_s, end_s in event.waits:
        if start_s > begin_s:
            yield begin_s, start_s
        begin_s = max(begin_s, end_s)
    if event.end_s > begin_s:
        yield begin_s, event.end_s
