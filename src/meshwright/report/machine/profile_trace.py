"""A profile as a Chrome trace: the predicted timeline as one process, every measured device as one below it.

Trace Event Format: complete events (``ph`` X) with times in microseconds, which nest by time inside one thread, and
metadata events (M) with the names of processes and threads. Perfetto and chrome://tracing open it, gzipped too.
"""

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from meshwright.core.files import write_whole
from meshwright.cost.train_step import PricedStrategy
from meshwright.profile.events import DeviceTrace, OpEvent, Window
from meshwright.profile.hlo import TracedProgram
from meshwright.profile.summary import Profile
from meshwright.report.machine.profile_timeline import predicted_timeline

PREDICTED_PID = 1
MAX_SLICES = 200_000
"""Slices of measured devices that are written; the shortest are left out beyond it."""
_US = 1e6

TraceEvent = dict[str, Any]


def trace_events(found: Profile) -> list[TraceEvent]:
    """Both timelines: one mean predicted step, and the measured steps, from the same zero."""
    count = found.plan.strategy.num_microbatches
    return [*predicted_events(found.priced, num_microbatches=count), *measured_events(found.trace, found.program)]


def save_trace(found: Profile, path: Path) -> Path:
    """The path, after the trace was written to it, gzipped."""
    document = {
        "traceEvents": trace_events(found),
        "displayTimeUnit": "ms",
        "otherData": {"model": found.plan.model.name, "cluster": found.plan.cluster.short_name},
    }
    content = gzip.compress(json.dumps(document, separators=(",", ":")).encode())
    write_whole(path, lambda part: part.write_bytes(content))
    return path


# -- predicted ----------------------------------------------------------------------------------------------

LANES = ("compute", "links")


def predicted_events(priced: PricedStrategy, *, num_microbatches: int) -> list[TraceEvent]:
    """One step as it is expected, with a thread for what a device computes and one for its links."""
    slices = predicted_timeline(priced, num_microbatches=num_microbatches)
    return [
        *_names(PREDICTED_PID, "predicted", LANES, order=0),
        *(_slice(PREDICTED_PID, 1 + LANES.index(s.lane), s.what, s.kind, s.start_s, s.seconds) for s in slices),
    ]


# -- measured -----------------------------------------------------------------------------------------------


def measured_events(trace: DeviceTrace, program: TracedProgram) -> list[TraceEvent]:
    """Every device as a process with one thread per stream or host thread, the steps as slices of their own thread."""
    zero = trace.windows[0].start_s
    end = trace.windows[-1].end_s
    inside = [event for event in trace.events if event.start_s >= zero and event.end_s <= end]
    if len(inside) > MAX_SLICES:
        inside = sorted(inside, key=lambda event: -event.seconds)[:MAX_SLICES]
    found: list[TraceEvent] = []
    for device in trace.devices:
        own = sorted(
            (event for event in inside if event.device == device), key=lambda event: (event.start_s, -event.end_s)
        )
        found += _device(device, own, trace.windows, program, zero)
    return found


def _device(
    device: int, events: Sequence[OpEvent], windows: Sequence[Window], program: TracedProgram, zero: float
) -> Iterator[TraceEvent]:
    pid = 10 + device
    lanes = _nested(events)
    yield from _names(pid, f"device {device}, measured", ["steps", *(name for name, _ in lanes)], order=pid)
    for number, window in enumerate(windows):
        yield _slice(pid, 1, f"step {number}", "step", window.start_s - zero, window.seconds)
    for tid, (_, own) in enumerate(lanes, start=2):
        for event in own:
            fact = program.fact(event.op)
            args = {"op": event.op, "bound": fact.bound}
            if event.waits:
                args["waited_us"] = f"{event.waited_s * _US:.1f}"
            name = str(fact.label) if fact.label else event.op
            kind = str(fact.kind) if program.is_work(event.op) else "control"
            yield {**_slice(pid, tid, name, kind, event.start_s - zero, event.seconds), "args": args}


def _nested(events: Iterable[OpEvent]) -> list[tuple[str, list[OpEvent]]]:
    """(name, events) of threads on which every event lies inside the open one or behind it.

    Events of one line that overlap otherwise, as asynchronous ones may, get a further thread.
    """
    found: dict[tuple[str, int], tuple[list[OpEvent], list[float]]] = {}
    for event in events:
        for number in range(1000):
            own, ends = found.setdefault((event.lane, number), ([], []))
            while ends and ends[-1] <= event.start_s:
                ends.pop()
            if not ends or event.end_s <= ends[-1]:
                own.append(event)
                ends.append(event.end_s)
                break
    return [(lane if not number else f"{lane} ({number + 1})", own) for (lane, number), (own, _) in found.items()]


def _slice(pid: int, tid: int, name: str, kind: str, start_s: float, seconds: float) -> TraceEvent:
    """One complete event; both ends are rounded, so that what nests in seconds nests in microseconds."""
    start, end = round(start_s * _US, 3), round((start_s + seconds) * _US, 3)
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": kind, "ts": start, "dur": round(end - start, 3)}


def _names(pid: int, process: str, threads: Sequence[str], *, order: int) -> Iterator[TraceEvent]:
    """Metadata: what a process and its threads are called, and where they stand."""
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": process}}
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": order}}
    for tid, name in enumerate(threads, start=1):
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
