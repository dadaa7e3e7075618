"""Reads a profiler trace: when each instruction of a compiled program ran, on which device, in which step.

The profiler writes planes of lines of events (XSpace). On CPU instructions are events on the threads of the host plane,
and each event names its device. On GPU each stream of a device is a line. On TPU one line has the instructions and one
the asynchronous instructions.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from meshwright.core.errors import InputError
from meshwright.profile.classes import is_collective
from meshwright.profile.hlo import TracedProgram

TracePlatform = Literal["cpu", "gpu", "tpu"]

MOST_FOREIGN = 0.02
"""Largest share of a trace's instructions that may be missing from the program's text."""
STEP = "meshwright_step"
"""Name of the annotation around a profiled step."""
STEP_END = "meshwright_step_end"
"""Name of the mark at the end of a training step; a step is the time between two marks."""

SUFFIX = ".xplane.pb"
_DEVICE = re.compile(r"/device:(GPU|TPU):(\d+)$")
_TPU_LINES = ("XLA Ops", "Async XLA Ops")
_WAITS = ("Wait: pending_threads", "Wait for rendezvous callback")
_NS = 1e-9


class Window(NamedTuple):
    """A time span on the trace's clock, such as one step."""

    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class OpEvent(NamedTuple):
    """One execution of an instruction on one device. ``waits`` are the spans in which a collective waited for other
    devices; only CPU traces have them."""

    op: str
    device: int
    lane: str
    start_s: float
    end_s: float
    waits: tuple[Window, ...] = ()

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @property
    def waited_s(self) -> float:
        return sum(wait.seconds for wait in self.waits)


class DeviceTrace(msgspec.Struct, frozen=True, kw_only=True):
    """Events of one program, sorted by device and start, and the windows of its steps.

    ``by_thread``: events named no device, so each host thread counts as one. ``found_steps`` says how the steps were
    found: annotations, marks, runs of the program, or none (the whole trace is one). ``unnamed_s`` is the seconds of
    accelerator events that name no instruction of the program.
    """

    platform: TracePlatform
    events: tuple[OpEvent, ...]
    windows: tuple[Window, ...]
    by_thread: bool
    unnamed_s: float = 0.0
    found_steps: Literal["annotations", "marks", "runs", "none"]

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(sorted({event.device for event in self.events}))


def newest_trace(folder: Path) -> Path:
    """Returns the newest trace file under a folder. Raises InputError if there is none."""
    trace_paths = sorted(folder.rglob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime)
    if not trace_paths:
        raise InputError(f"{folder} has no trace (*{SUFFIX}). Give a folder that jax.profiler.trace wrote.")
    return trace_paths[-1]


def load_trace(path: Path, program: TracedProgram) -> DeviceTrace:
    """Reads a program's events from a trace file. Raises InputError if it cannot be read or has no such events."""
    from jax.profiler import ProfileData

    if not path.is_file():
        raise InputError(f"there is no trace {path}. Give a file *{SUFFIX} of jax.profiler.trace.")
    try:
        data = ProfileData.from_file(str(path))
        planes = list(data.planes)
    except Exception as error:
        raise InputError(
            f"{path} is not a trace of the profiler. Give a file *{SUFFIX} of jax.profiler.trace."
        ) from error
    return read_trace(planes, program, source=str(path))


def read_trace(planes: Sequence[Any], program: TracedProgram, *, source: str) -> DeviceTrace:
    """Reads a program's events from a trace's planes. Raises InputError if it has none, or is of another program."""
    device_planes = [(match, plane) for plane in planes if (match := _DEVICE.match(plane.name))]
    host_planes = [plane for plane in planes if plane.name.startswith("/host:CPU")]
    host = _Host(program)
    host.read(host_planes, ops=not device_planes)
    platform: TracePlatform = "cpu"
    events, unnamed_s = host.events, 0.0
    if device_planes:
        platform = "gpu" if device_planes[0][0][1] == "GPU" else "tpu"
        all_events = [
            e for m, p in device_planes for e in _device_events(p, int(m[2]), m[1] == "GPU", program, host.foreign)
        ]
        events = [event for event in all_events if event.op]
        unnamed_s = sum(event.seconds for event in all_events if not event.op)
    if not events:
        raise InputError(
            f"{source} has no event of the program {program.module.name!r}. Give the text of the program that was "
            f"traced."
        )
    total = len({event.op for event in events}) + len(host.foreign)
    if len(host.foreign) > MOST_FOREIGN * total:
        raise InputError(
            f"{source} is not of the program {program.module.name!r} in --hlo: {len(host.foreign):,} of its {total:,} "
            f"instructions are not in the text, such as {min(host.foreign)}. Give the text of the traced program."
        )
    windows, found_by = host.windows(events)
    return DeviceTrace(
        platform=platform,
        events=tuple(sorted(events, key=lambda event: (event.device, event.start_s, -event.end_s))),
        windows=windows,
        by_thread=host.by_thread,
        unnamed_s=unnamed_s,
        found_steps=found_by,
    )


def _device_events(plane: Any, device: int, gpu: bool, program: TracedProgram, foreign: set[str]) -> Iterator[OpEvent]:
    """Yields the events of one accelerator; ``op`` is "" if neither statistics, event name nor kernel name matches an
    instruction. Instructions that statistics attribute to the program, but its text lacks, are added to ``foreign``."""
    stream_lines = [line for line in plane.lines if line.name in _TPU_LINES or line.name.startswith("Stream")]
    if gpu:
        stream_lines = [line for line in stream_lines if line.name.startswith("Stream")] or stream_lines
    for line in stream_lines:
        for event in line.events:
            stat_by_name = dict(event.stats)
            hlo_op = str(stat_by_name.get("hlo_op", ""))
            if hlo_op and stat_by_name.get("hlo_module") == program.module.name and hlo_op not in program.instructions:
                foreign.add(hlo_op)
            name, start_s = event.name.split(" = ")[0].strip().lstrip("%"), event.start_ns * _NS
            op_names = (op for op in (hlo_op, name, program.by_kernel.get(name, "")) if op in program.instructions)
            yield OpEvent(next(op_names, ""), device, line.name, start_s, start_s + event.duration_ns * _NS)


class _Host:
    """Collects from the host's threads the windows of steps and, on CPU, the events of instructions."""

    def __init__(self, program: TracedProgram) -> None:
        self.program = program
        self.events: list[OpEvent] = []
        self.by_thread = False
        self.foreign: set[str] = set()
        self.steps: list[Window] = []
        self.marks: list[float] = []
        self.runs: dict[int, list[float]] = {}

    def read(self, planes: Iterable[Any], *, ops: bool) -> None:
        """Reads every line of the planes; instructions only if ``ops``."""
        for line_index, line in enumerate(line for plane in planes for line in plane.lines):
            events: list[tuple[OpEvent, bool]] = []
            waits: list[Window] = []
            for event in line.events:
                name, start_s = event.name, event.start_ns * _NS
                window = Window(start_s, start_s + event.duration_ns * _NS)
                if name == STEP:
                    self.steps.append(window)
                elif name == STEP_END:
                    self.marks.append(window.end_s)
                elif name.startswith(_WAITS):
                    waits.append(window)
                elif ops:
                    self._add(event, window, f"{line.name.split('/')[0]} {line_index}", line_index, events)
            self.events += _with_waits(events, waits)

    def _add(self, event: Any, window: Window, lane: str, line_index: int, events: list[tuple[OpEvent, bool]]) -> None:
        """Adds the event of an instruction; ignores other programs', and adds to ``foreign`` what the text lacks."""
        stat_by_name = dict(event.stats)
        module = self.program.module.name
        if "hlo_op" not in stat_by_name or stat_by_name.get("hlo_module", module) != module:
            return
        if event.name not in self.program.instructions:
            self.foreign.add(event.name)
            return
        device, run_id = (
            value if isinstance(value := stat_by_name.get(name), int) else None for name in ("device_ordinal", "run_id")
        )
        self.by_thread |= device is None
        op_event = OpEvent(event.name, line_index if device is None else device, lane, *window)
        events.append((op_event, is_collective(self.program.instructions[event.name])))
        if run_id is not None:
            run_span = self.runs.setdefault(run_id, [op_event.start_s, op_event.end_s])
            run_span[:] = [min(run_span[0], op_event.start_s), max(run_span[1], op_event.end_s)]

    def windows(
        self, events: Sequence[OpEvent]
    ) -> tuple[tuple[Window, ...], Literal["annotations", "marks", "runs", "none"]]:
        """Returns the windows of the steps, and how they were found."""
        if self.steps:
            return tuple(sorted(self.steps)), "annotations"
        mark_ends_s = sorted(self.marks)
        if len(mark_ends_s) > 1:
            return tuple(Window(start_s, end_s) for start_s, end_s in pairwise(mark_ends_s)), "marks"
        if self.runs:
            return tuple(sorted(Window(*ends) for ends in self.runs.values())), "runs"
        return (Window(min(e.start_s for e in events), max(e.end_s for e in events)),), "none"


def _with_waits(flagged_events: Sequence[tuple[OpEvent, bool]], waits: Sequence[Window]) -> list[OpEvent]:
    """Returns the events of a thread; collectives get the waits that lie inside them."""
    waits = sorted(waits)
    starts_s, waited_events = [wait.start_s for wait in waits], []
    for event, can_wait in flagged_events:
        first_index = end_index = bisect_left(starts_s, event.start_s)
        while can_wait and end_index < len(waits) and waits[end_index].end_s <= event.end_s + _NS:
            end_index += 1
        waited_events.append(event._replace(waits=tuple(waits[first_index:end_index])))
    return waited_events
