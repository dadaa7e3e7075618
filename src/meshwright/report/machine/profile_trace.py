"""Writes a profile as a Chrome trace: the predicted timeline is one process, every measured device another.

Trace Event Format: complete events (``ph`` X) with times in microseconds, which nest by time inside one thread, and
metadata events (M) with the names of processes and threads. Perfetto and chrome://tracing open it, gzipped too.
"""

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from meshwright.core.files import write_whole
from meshwright.cost.breakdown import label_text
from meshwright.cost.lanes import Lanes, Slice
from meshwright.cost.train_step import PricedStrategy
from meshwright.cost.work.kernels import StepCost
from meshwright.profile.classes import class_of_op
from meshwright.profile.events import DeviceTrace, OpEvent
from meshwright.profile.hlo import TracedProgram
from meshwright.profile.summary import Profile
from meshwright.report.answer import Facts

PREDICTED_PID = 1
MAX_SLICES = 50_000
"""Number of predicted slices above which one pass stands for all its layers and microbatches."""
MAX_EVENTS = 200_000
"""Number of measured events that are written; the shortest are dropped above it."""
_US = 1e6

TraceEvent = Facts


def save_trace(found: Profile, path: Path) -> Path:
    """Writes the gzipped trace of one predicted step and of the measured steps, which both start at 0.

    Returns its path. The predicted step has a thread for computation and one for the links.
    """
    slices = predicted_timeline(found.priced, num_microbatches=found.plan.strategy.num_microbatches)
    document = {
        "traceEvents": [
            *_names(PREDICTED_PID, "predicted", LANES, order=0),
            *(_slice(PREDICTED_PID, 1 + LANES.index(s.lane), s.what, s.kind, s.start_s, s.seconds) for s in slices),
            *measured_events(found.trace, found.program),
        ],
        "displayTimeUnit": "ms",
        "otherData": {"model": found.plan.model.name, "cluster": found.plan.cluster.short_name},
    }
    content = gzip.compress(json.dumps(document, separators=(",", ":")).encode())
    write_whole(path, lambda part: part.write_bytes(content))
    return path


# -- predicted ----------------------------------------------------------------------------------------------

LANES = ("compute", "links")


def predicted_timeline(priced: PricedStrategy, *, num_microbatches: int) -> list[Slice]:
    """Returns the slices of one predicted step: local steps in sequence, collectives overlapped or exposed.

    An overlapped collective starts when the links are free, and a pass ends after its collectives. Microbatches run one
    after the other, in as many layers as the busiest device of a pipeline has; the pipeline bubble comes last.
    """
    lanes = Lanes()
    for pass_name, steps in _passes(priced, num_microbatches):
        begin_s, slice_index = lanes.compute_end_s, len(lanes.slices)
        lanes.links_end_s = max(lanes.links_end_s, begin_s)
        for cost, num_times in steps:
            seconds, name, kind = float(cost.time_s) * num_times, label_text(cost.step), class_of_op(cost.step.op)
            if seconds > 0 and not cost.step.is_collective:
                lanes.compute(name, seconds, kind=kind)
            elif seconds > 0 and cost.hides and priced.rates.overlaps:
                lanes.send(name, seconds, kind=kind)
            elif seconds > 0:
                lanes.compute_end_s = lanes.send(name, seconds, kind=kind, when=lanes.compute_end_s)
        lanes.compute_end_s = max(lanes.compute_end_s, lanes.links_end_s)
        if lanes.compute_end_s > begin_s:
            pass_slice = Slice(lane="compute", what=pass_name, kind="pass", start_s=begin_s, end_s=lanes.compute_end_s)
            lanes.slices.insert(slice_index, pass_slice)
    bubble_s = float(priced.estimate.terms.get("bubble", 0.0))
    if bubble_s:
        lanes.compute("pipeline bubble", bubble_s, kind="idle")
    return lanes.slices


def _passes(priced: PricedStrategy, num_micro: int) -> Iterator[tuple[str, list[tuple[StepCost, float]]]]:
    """Yields (name, [(cost, times)]) of every pass in order: forward and backward per microbatch, then the update."""
    block_runs = []
    for block in priced.costs.blocks:
        runs_here = max((float(cost.here) for cost in block.forward), default=0.0)
        block_runs.append((block, max(1, round(runs_here / num_micro)) if runs_here else 0))
    num_slices = num_micro * sum(repeats * (len(block.forward) + len(block.backward)) for block, repeats in block_runs)
    is_one_by_one = num_slices <= MAX_SLICES
    # layers that run again for later ones, on average
    runs_by_id = {
        id(cost): float(block.steps.times_again(priced.pipeline.runs) / block.steps.repeat)
        for block, _ in block_runs
        for cost in block.again
    }
    for microbatch in range(num_micro) if is_one_by_one else [num_micro - 1]:
        microbatch_text = f", microbatch {microbatch}" if num_micro > 1 else ""
        forward_passes = [(block.name, "forward", repeats, block.forward) for block, repeats in block_runs]
        backward_passes = [(block.name, "backward", repeats, block.backward) for block, repeats in reversed(block_runs)]
        for name, phase, repeats, costs in forward_passes + backward_passes:
            if phase == "backward" and microbatch < num_micro - 1:
                costs = tuple(cost for cost in costs if cost.step.scope != "step")
            if not is_one_by_one:
                run_counts = [
                    repeats * (1.0 if c.step.scope == "step" else num_micro * runs_by_id.get(id(c), 1.0)) for c in costs
                ]
                yield f"{name} {phase}, {repeats} x {num_micro} microbatches", list(zip(costs, run_counts, strict=True))
                continue
            for layer_index in range(repeats) if phase == "forward" else reversed(range(repeats)):
                suffix = f" {layer_index}" if repeats > 1 else ""
                yield f"{name}{suffix} {phase}{microbatch_text}", [(c, runs_by_id.get(id(c), 1.0)) for c in costs]
    yield "update", [(cost, float(cost.here)) for cost in priced.costs.once]


# -- measured -----------------------------------------------------------------------------------------------


def measured_events(trace: DeviceTrace, program: TracedProgram) -> Iterator[TraceEvent]:
    """Yields a process per device with a thread per stream or host thread, and one thread for the steps."""
    zero_s = trace.windows[0].start_s
    end_s = trace.windows[-1].end_s
    kept_events = [event for event in trace.events if event.start_s >= zero_s and event.end_s <= end_s]
    if len(kept_events) > MAX_EVENTS:
        kept_events = sorted(kept_events, key=lambda event: -event.seconds)[:MAX_EVENTS]
    for device in trace.devices:
        device_events = sorted(
            (event for event in kept_events if event.device == device), key=lambda event: (event.start_s, -event.end_s)
        )
        named_lanes, pid = _nested(device_events), 10 + device
        yield from _names(pid, f"device {device}, measured", ["steps", *(name for name, _ in named_lanes)], order=pid)
        for step_index, window in enumerate(trace.windows):
            yield _slice(pid, 1, f"step {step_index}", "step", window.start_s - zero_s, window.seconds)
        for tid, (_, events) in enumerate(named_lanes, start=2):
            for event in events:
                fact = program.fact(event.op)
                slice_args = {"op": event.op, "bound": fact.bound}
                if event.waits:
                    slice_args["waited_us"] = f"{event.waited_s * _US:.1f}"
                name = str(fact.label) if fact.label else event.op
                kind = str(fact.kind) if program.is_work(event.op) else "control"
                yield {**_slice(pid, tid, name, kind, event.start_s - zero_s, event.seconds), "args": slice_args}


def _nested(events: Iterable[OpEvent]) -> list[tuple[str, list[OpEvent]]]:
    """Returns (name, events) of threads on which events are nested or disjoint.

    Events of a stream that overlap in another way, such as asynchronous ones, move to a further thread.
    """
    lanes: dict[tuple[str, int], tuple[list[OpEvent], list[float]]] = {}
    for event in events:
        for depth in range(1000):
            group, open_ends_s = lanes.setdefault((event.lane, depth), ([], []))
            while open_ends_s and open_ends_s[-1] <= event.start_s:
                open_ends_s.pop()
            if not open_ends_s or event.end_s <= open_ends_s[-1]:
                group.append(event)
                open_ends_s.append(event.end_s)
                break
    return [(lane if not depth else f"{lane} ({depth + 1})", group) for (lane, depth), (group, _) in lanes.items()]


def _slice(pid: int, tid: int, name: str, kind: str, start_s: float, seconds: float) -> TraceEvent:
    """Returns a complete event; both ends are rounded, so that nested slices stay nested in microseconds."""
    start, end_us = round(start_s * _US, 3), round((start_s + seconds) * _US, 3)
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": kind, "ts": start, "dur": round(end_us - start, 3)}


def _names(pid: int, process: str, threads: Sequence[str], *, order: int) -> Iterator[TraceEvent]:
    """Yields the metadata events: names and order of a process and its threads."""
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": process}}
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": order}}
    for tid, name in enumerate(threads, start=1):
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
