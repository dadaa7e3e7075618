"""Seconds of instructions where several emulated devices share the cores of one machine.

What one device computes while the others wait for it in a collective runs on all cores, and what all compute at once on
a part of them: seconds of single events say little. The step as a whole takes the time in which the machine gets
through the work of all devices, and that is what a calibration with all devices busy predicts. So the wall time of a
step is shared out, at every instant in equal parts, over the instructions that work on any device. Waiting in a
collective is no work; an instant in which nobody works belongs to nothing.
"""

from collections import defaultdict
from collections.abc import Iterator

from meshwright.profile.classes import Facts
from meshwright.profile.events import OpEvent, Trace


def shared_seconds(trace: Trace, facts: Facts) -> dict[str, float]:
    """Instruction -> seconds of a mean step that the machine spends on it, for all devices together."""
    found: dict[str, float] = defaultdict(float)
    work = [event for event in trace.events if facts.is_work(event.op)]
    for window in trace.windows:
        turns = []
        for event in work:
            for start, end in working(event):
                start, end = max(start, window.start_s), min(end, window.end_s)
                if end > start:
                    turns += [(start, 1, event.op), (end, -1, event.op)]
        _share(sorted(turns), found)
    return {op: seconds / len(trace.windows) for op, seconds in found.items()}


def _share(turns: list[tuple[float, int, str]], found: dict[str, float]) -> None:
    active: dict[str, int] = {}
    number, at = 0, 0.0
    for when, change, op in turns:
        if number and when > at:
            each = (when - at) / number
            for name, count in active.items():
                found[name] += each * count
        at = when
        number += change
        active[op] = active.get(op, 0) + change
        if not active[op]:
            del active[op]


def working(event: OpEvent) -> Iterator[tuple[float, float]]:
    """The spans of an event in which it does not wait."""
    at = event.start_s
    for start, end in event.waits:
        if start > at:
            yield at, start
        at = max(at, end)
    if event.end_s > at:
        yield at, event.end_s
