"""Schedules that a person writes: a text file with a line per device.

    # two devices, two microbatches
    placement = looped
    0: F0 F1 B0 B1
    1: F0 B0 F1 B1

``F3/1`` is the forward pass of microbatch 3 in chunk 1. A device may continue on another line with its number. The
placement is ``looped`` (the default), ``v`` or ``bidirectional``: see `table.PLACEMENTS`.
"""

import functools
import re
from pathlib import Path
from textwrap import wrap

from meshwright.algebra.schedules.check import check
from meshwright.algebra.schedules.definition import Requirement, ScheduleDefinition
from meshwright.algebra.schedules.table import PLACEMENTS, PlacementName, Schedule, StagePass, microbatch_routes
from meshwright.core.errors import InputError, nearest
from meshwright.core.files import read_text

MAX_OPS = 100_000
LINE_WIDTH = 100

_OP = re.compile(r"([FBW])(\d{1,6})(?:/(\d{1,3}))?")
_DEVICE = re.compile(r"(\d{1,5})\s*:\s*(.*)")
_SETTING = re.compile(r"(\w+)\s*=\s*(\S+)")


def read_schedule(path: str | Path) -> Schedule:
    """Returns the schedule of a file, checked. Raises InputError that names the file and the line of a fault."""
    path = Path(path)
    text = read_text(path, "Give a schedule: a line for each device.")
    placement: PlacementName = "looped"
    orders: list[list[StagePass]] = []
    where_of_op: list[list[str]] = []
    for line_number, line in enumerate(text.splitlines(), start=1):
        where, content = f"{path}:{line_number}", line.partition("#")[0].strip()
        if match := _SETTING.fullmatch(content):
            key, value = match.groups()
            if key != "placement":
                raise InputError(f"{where}: unknown key {key!r}.{nearest(key, ['placement'])}")
            if value not in PLACEMENTS:
                raise InputError(f"{where}: placement {value!r} is not known.{nearest(value, PLACEMENTS)}")
            placement = value
        elif match := _DEVICE.fullmatch(content):
            device, ops = int(match[1]), [_read_op(where, word) for word in match[2].split()]
            if device > len(orders):
                raise InputError(f"{where}: device {device} comes before device {len(orders)}. Number them from 0.")
            if device == len(orders):
                orders.append([])
                where_of_op.append([])
            orders[device] += ops
            where_of_op[device] += [where] * len(ops)
        elif content:
            raise InputError(f"{where}: {content!r} is no line of a schedule. Write for example 0: F0 F1 B0 B1.")
    num_ops = sum(map(len, orders))
    if not 1 <= num_ops <= MAX_OPS:
        raise InputError(f"{path}: {num_ops:,} ops; a schedule has between 1 and {MAX_OPS:,}, a line per device.")
    # only a looped placement has more than one chunk, as many as the ops name
    routes = PLACEMENTS[placement].routes(len(orders), 1 + max(op.chunk for order in orders for op in order))
    route_of = microbatch_routes(orders, len(routes))
    missing_microbatch = next((m for m in range(max(route_of) + 1) if m not in route_of), None)
    if missing_microbatch is not None:
        raise InputError(f"{path}: microbatch {missing_microbatch} is missing. Number them from 0 without a gap.")
    schedule = Schedule(
        name=path.stem,
        routes=routes,
        route_of=tuple(route_of[m] for m in sorted(route_of)),
        orders=tuple(map(tuple, orders)),
    )
    return check(schedule, lambda device, op_index: where_of_op[device][op_index])


def _read_op(where: str, word: str) -> StagePass:
    match = _OP.fullmatch(word)
    if match is None:
        raise InputError(f"{where}: {word!r} is no op. Write F0, B0 or W0, and F0/1 for chunk 1.")
    return StagePass(match[1], int(match[2]), int(match[3] or 0))  # type: ignore[arg-type]


def schedule_of_file(path: str) -> ScheduleDefinition:
    """Returns the definition of a file's schedule, which exists for one number of stages, microbatches and chunks."""
    return _schedule_of_file(path, Path(path).stat().st_mtime_ns)


@functools.lru_cache(maxsize=32)
def _schedule_of_file(path: str, changed_ns: int) -> ScheduleDefinition:
    """Reads a file once per change (``changed_ns``), since a search needs its schedule many times."""
    schedule = read_schedule(path)
    num_stages, num_microbatches = schedule.num_devices, schedule.num_microbatches
    requirement = Requirement(
        lambda p, m, v: (p == num_stages) & (m == num_microbatches),
        lambda p, m, v: (
            f"{path} is for {num_stages} stages and {num_microbatches} microbatches, and the strategy has "
            f"pipeline={p} and num_microbatches={m}. Change one of them."
        ),
    )
    return ScheduleDefinition(
        name=schedule.name,
        year=0,
        order=lambda device, **sizes: schedule.orders[device],
        placement=_placement(schedule),
        chunks=schedule.num_virtual_stages // num_stages,
        requirements=(requirement,),
    )


def _placement(schedule: Schedule) -> PlacementName:
    devices, chunks = schedule.num_devices, schedule.num_chunks
    return next(name for name, placement in PLACEMENTS.items() if placement.routes(devices, chunks) == schedule.routes)


def format_schedule(schedule: Schedule) -> str:
    """Returns the text that `read_schedule` reads back."""
    lines = [
        f"# {schedule.name}: {schedule.num_devices} devices, {schedule.num_microbatches} microbatches",
        f"placement = {_placement(schedule)}",
    ]
    for device, order in enumerate(schedule.orders):
        prefix = f"{device}: "
        lines += wrap(" ".join(map(str, order)), LINE_WIDTH, initial_indent=prefix, subsequent_indent=prefix)
    return "\n".join(lines) + "\n"
