"""Schedules that a person writes: a text file with a line per device.

    # two devices, two microbatches
    placement = looped
    0: F0 F1 B0 B1
    1: F0 B0 F1 B1

``F3/1`` is the forward pass of microbatch 3 in chunk 1. A device may go on in a further line with its number. The
placement is ``looped`` (also where it is left out), ``v`` or ``bidirectional``: see `schedule`.
"""

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap

from meshwright.algebra.schedules.check import check
from meshwright.algebra.schedules.definition import Requirement, ScheduleDefinition
from meshwright.algebra.schedules.table import PLACEMENTS, Op, PlacementName, Schedule, microbatch_routes
from meshwright.core.errors import InputError, nearest

MAX_OPS = 1_000_000
LINE_WIDTH = 100

_OP = re.compile(r"([FBW])(\d{1,6})(?:/(\d{1,3}))?")
_DEVICE = re.compile(r"(\d{1,5})\s*:\s*(.*)")
_SETTING = re.compile(r"(\w+)\s*=\s*(\S+)")


class _Lines:
    """What the lines of a file say, and the line of each op."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.placement: PlacementName = "looped"
        self.orders: list[list[Op]] = []
        self.lines: list[list[int]] = []

    def fail(self, line: int, message: str) -> InputError:
        return InputError(f"{self.path}:{line}: {message}")

    def where(self, device: int, number: int) -> str:
        return f"{self.path}:{self.lines[device][number]}"

    def read(self, line: int, text: str) -> None:
        if found := _SETTING.fullmatch(text):
            self._set(line, found[1], found[2])
        elif found := _DEVICE.fullmatch(text):
            self._device(line, int(found[1]), found[2].split())
        else:
            raise self.fail(line, f"{text!r} is no line of a schedule. Write for example 0: F0 F1 B0 B1.")

    def _set(self, line: int, key: str, value: str) -> None:
        if key != "placement":
            raise self.fail(line, f"unknown key {key!r}.{nearest(key, ['placement'])}")
        if value not in PLACEMENTS:
            raise self.fail(line, f"placement {value!r} is not known.{nearest(value, PLACEMENTS)}")
        self.placement = value

    def _device(self, line: int, device: int, words: list[str]) -> None:
        if device > len(self.orders):
            raise self.fail(line, f"device {device} comes before device {len(self.orders)}. Number them from 0.")
        if device == len(self.orders):
            self.orders.append([])
            self.lines.append([])
        for word in words:
            found = _OP.fullmatch(word)
            if found is None:
                raise self.fail(line, f"{word!r} is no op. Write F0, B0 or W0, and F0/1 for chunk 1.")
            kind, microbatch, chunk = found.groups()
            self.orders[device].append(Op(kind, int(microbatch), int(chunk or 0)))  # type: ignore[arg-type]
            self.lines[device].append(line)


def read_schedule(path: str | Path) -> Schedule:
    """The schedule of a file, checked. An InputError names the file and the line of what cannot be."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text in UTF-8"
        raise InputError(f"{path} cannot be read ({reason}).") from None
    lines = _Lines(path)
    for number, line in enumerate(text.splitlines(), start=1):
        if content := line.partition("#")[0].strip():
            lines.read(number, content)
    num_ops = sum(map(len, lines.orders))
    if not 1 <= num_ops <= MAX_OPS:
        raise InputError(f"{path}: {num_ops:,} ops; a schedule has between 1 and {MAX_OPS:,}, a line per device.")
    # of one chunk but for a looped placement, where the ops say how many
    chunks = 1 + max(op.chunk for order in lines.orders for op in order)
    routes = PLACEMENTS[lines.placement].routes(len(lines.orders), chunks)
    orders = tuple(tuple(order) for order in lines.orders)
    schedule = Schedule(name=path.stem, routes=routes, route_of=_route_of(lines, len(routes)), orders=orders)
    return check(schedule, lines.where)


def _route_of(lines: _Lines, num_routes: int) -> tuple[int, ...]:
    found = microbatch_routes(lines.orders, num_routes)
    missing = next((m for m in range(max(found) + 1) if m not in found), None)
    if missing is not None:
        raise InputError(f"{lines.path}: microbatch {missing} is missing. Number them from 0 without a gap.")
    return tuple(found[m] for m in range(max(found) + 1))


def schedule_of_file(path: str) -> ScheduleDefinition:
    """The schedule of a file for its one number of stages, microbatches and chunks."""
    return _schedule_of_file(path, Path(path).stat().st_mtime_ns)


@functools.lru_cache(maxsize=32)
def _schedule_of_file(path: str, changed_ns: int) -> ScheduleDefinition:
    """Read once for each change of the file: a search asks for it many times."""
    found = read_schedule(path)
    stages, count = found.num_devices, found.num_microbatches
    sizes = Requirement(
        lambda p, m, v: (p == stages) & (m == count),
        lambda p, m, v: (
            f"{path} is for {stages} stages and {count} microbatches, and the strategy has pipeline={p} and "
            f"num_microbatches={m}. Change one of them."
        ),
    )
    return ScheduleDefinition(
        name=found.name,
        year=0,
        order=lambda device, **sizes: found.orders[device],
        placement=_placement(found),
        chunks=found.num_virtual_stages // stages,
        requirements=(sizes,),
    )


def _placement(schedule: Schedule) -> PlacementName:
    devices, chunks = schedule.num_devices, schedule.num_chunks
    return next(name for name, one in PLACEMENTS.items() if one.routes(devices, chunks) == schedule.routes)


def format_schedule(schedule: Schedule) -> str:
    """The text that `read_schedule` reads back."""
    return "\n".join(_format_lines(schedule)) + "\n"


def _format_lines(schedule: Schedule) -> Iterator[str]:
    devices = schedule.num_devices
    yield f"# {schedule.name}: {devices} devices, {schedule.num_microbatches} microbatches"
    yield f"placement = {_placement(schedule)}"
    for device, order in enumerate(schedule.orders):
        head = f"{device}: "
        yield from wrap(" ".join(map(str, order)), LINE_WIDTH, initial_indent=head, subsequent_indent=head)
