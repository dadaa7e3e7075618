"""`meshwright schedule`: a pipeline schedule as a table: its time, its idle devices, its memory, its timeline."""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from meshwright.algebra.schedules.file import MAX_OPS, format_schedule, read_schedule
from meshwright.algebra.schedules.registry import build, default_chunks, definition, definitions, schedule_names
from meshwright.algebra.schedules.simulation import Simulation, simulate
from meshwright.algebra.schedules.table import Schedule
from meshwright.algebra.schedules.ticks import lockstep_seconds, tick_tables
from meshwright.cli.output import say, width
from meshwright.cli.verb import Count, Options, argument, option, verb
from meshwright.core.errors import InputError
from meshwright.core.fields import LARGEST
from meshwright.core.files import write_text_whole
from meshwright.core.units import counted, format_seconds
from meshwright.report.answer import (
    Answer,
    Condition,
    Detail,
    Fact,
    Facts,
    Heading,
    Paragraph,
    Piece,
    PlainPiece,
    Table,
)
from meshwright.report.plans.timeline import timeline_figure, timeline_text

MAX_SWEPT_STAGES = 64
MAX_DEVICES_SHOWN = 16
DEVICES_SHOWN = 8

*_FIRST, _LAST = schedule_names()
HELP = f"""Time, idle devices and memory of the schedule NAME, such as 1f1b, or of one of your own.

NAME is {", ".join(_FIRST)} or {_LAST}. Times are of one microbatch; where
they carry no unit the answer is in units too.
"""


class Given(Options):
    name: str | None = argument()
    stages: Count | None = option("Devices of the pipeline.")
    microbatches: Count | None = option("Microbatches of a step.")
    chunks: Count | None = option("Virtual stages per device of the interleaved schedule.  [default: 2]")
    forward: str = option("A device's forward pass, such as 1.2ms, or one for each virtual stage.", default="1")
    backward: str | None = option("The whole backward pass.  [default: twice the forward pass]")
    weight: str | None = option("The part of it that makes gradients of weights.  [default: half of it]")
    send: str = option("A send from one stage to the next.", default="0")
    table: Path | None = option("A schedule of your own: a line per device, 0: F0 B0.")
    out: Path | None = option("Write the schedule as such a file.", "-o", "--out")
    compare: bool = option("All named schedules beside each other.")
    sweep_stages: bool = option("More stages and fewer replicas on the same chips.")
    png: Path | None = option("Draw the timeline to this file (.png or .svg).")


@verb(Given, help=HELP)
def command(given: Given) -> Answer:
    times = read_times(forward=given.forward, backward=given.backward, weight=given.weight, send=given.send)
    if not (given.name or given.table or given.compare):
        raise InputError(f"no schedule is named. Give one of {', '.join(schedule_names())}, or --table FILE.")
    result: Facts = {"unit": times.unit}
    pieces: list[Piece] = []
    pictures: dict[Path | None, Callable[[], Any]] = {}
    if schedule := _schedule(given):
        simulation = times.simulate(schedule)
        result |= _result(schedule, simulation, times)
        pieces += _schedule_text(schedule, simulation, result, times)
        pictures[given.png] = lambda: _figure(schedule, simulation, times)
    step_columns: Facts = {"step": ("step", times.cell), "idle": ("bubble_share", "{:.1%}".format)}
    stash_columns = {"peak stash": ("peak_stash", "{:.4g}".format)}
    if given.compare:
        sizes = _sizes(given, "--compare")
        result["compare"] = [_compared(name, sizes, given.chunks, times) for name in schedule_names()]
        columns = {
            "schedule": "schedule",
            "chunks": "chunks",
            **step_columns,
            "bubble, no barrier": ("bubble_without_barrier", times.cell),
            **stash_columns,
            "weights": "weight_copies",
            "tick by tick": ("fused_step", times.cell),
        }
        pieces += _rows_text("All schedules, same work per device:", result["compare"], columns)
    if given.sweep_stages:
        result["sweep"] = _sweep(given, times)
        rows = [{**row, "name": f"{counted(row['stages'], 'stage')}"} for row in result["sweep"]]
        columns = {"stages": "stages", "microbatches per replica": "microbatches", **step_columns, **stash_columns}
        columns["stash / stages"] = ("peak_stash_of_model", "{:.3g}".format)
        pieces += _rows_text("More stages on the same chips, the same batch:", rows, columns)
    if not schedule and (given.out or given.png):
        raise InputError("--png and --out take one schedule. Name it, such as 1f1b, beside --compare.")
    if schedule and given.out:
        write_text_whole(given.out, format_schedule(schedule))
        say(f"wrote {given.out}")
    figures_by_name = {name: result[name] for name in ("busy", "idle", "peak_stash") if schedule}
    device_rows = [dict(zip(figures_by_name, row, strict=True)) for row in zip(*figures_by_name.values(), strict=True)]
    row_tables = (device_rows, result.get("compare", ()), result.get("sweep", ()), [result])
    raw = [[{**row, "unit": times.unit} for row in rows] for rows in row_tables]
    return Answer(result, pieces, pictures, raw)


UNITS = "units"
"""The unit of times that are written without one."""

_TIME = re.compile(r"((?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*(s|ms|us|ns|)")
PASSES = ("forward", "backward", "weight")
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "": 1.0}


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Times of a device's passes over one microbatch, or of each virtual stage where several are given.

    ``backward`` is the whole backward pass, ``weight`` the part of it that makes gradients of weights.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    send: float
    unit: str

    @property
    def per_device(self) -> bool:
        """True if each time is given once, for all devices."""
        return len(self.forward) == len(self.backward) == len(self.weight) == 1

    def simulate(self, schedule: Schedule) -> Simulation:
        """Returns one simulated step with these times."""
        return simulate(schedule, **self._seconds(schedule))

    def in_lockstep(self, schedule: Schedule) -> Facts:
        """Returns ticks, step time and peak stash if a device starts each tick when its neighbours have finished the
        last one."""
        tables = tick_tables(schedule)
        step_time = lockstep_seconds(tables, **self._seconds(schedule))
        return {"ticks": tables.num_ticks, "step": step_time, "peak_stash": max(tables.peak_stash)}

    def scaled(self, ratio: float) -> "Times":
        """Returns the times of passes over ``ratio`` times as many layers."""
        times_by_pass = {name: tuple(ratio * time for time in getattr(self, name)) for name in PASSES}
        return msgspec.structs.replace(self, **times_by_pass)

    def _seconds(self, schedule: Schedule) -> Facts:
        """Returns times by virtual stage: forward, backward without weight gradients, weight gradients; and a send."""
        forward, backward_with_weight, weight = (_spread(name, getattr(self, name), schedule) for name in PASSES)
        backward = [total - weight_part for total, weight_part in zip(backward_with_weight, weight, strict=True)]
        return {"forward_s": forward, "backward_s": backward, "weight_s": weight, "send_s": self.send}

    def show(self, time: float) -> str:
        """Returns a time with its unit."""
        return f"{self.cell(time)} {UNITS[: -1 if time == 1 else None]}" if self.unit == UNITS else self.cell(time)

    def cell(self, time: float) -> str:
        """Returns a time for a table, without the word "units"."""
        return format_seconds(time) if self.unit == "s" else f"{time:,.6g}"


def _spread(name: str, times: tuple[float, ...], schedule: Schedule) -> list[float]:
    """Returns a time for each virtual stage: the given ones, or a device's one time divided among its stages."""
    num_stages = schedule.num_virtual_stages
    if len(times) == 1:
        return [times[0] * schedule.piece_share] * num_stages
    if len(times) != num_stages:
        raise InputError(
            f"--{name} has {len(times)} times; {schedule.name} has {num_stages} virtual stages here. "
            f"Give one time for all devices, or {num_stages}, one for each virtual stage."
        )
    return list(times)


def read_times(*, forward: str, backward: str | None, weight: str | None, send: str) -> Times:
    """Returns the times of a command line. Raises InputError if they cannot be read or do not belong together.

    The default backward time is twice the forward time; the default weight time is half of the backward time.
    """
    units: set[str] = set()
    forwards, sends = _read("--forward", forward, units), _read("--send", send, units)
    backwards = _read("--backward", backward, units) if backward else tuple(2 * time for time in forwards)
    weight_times = _read("--weight", weight, units) if weight else tuple(0.5 * time for time in backwards)
    if units >= {UNITS, "s"}:
        raise InputError("some times have a unit and some have none. Write all of them as 1.2ms or all as 1.2.")
    if len(sends) > 1:
        raise InputError(f"--send {send!r} is more than one time. Give one; it holds at every boundary.")
    if min(forwards + backwards) <= 0:
        raise InputError("--forward and --backward must be more than 0.")
    num_times = max(len(backwards), len(weight_times))
    full_times, weight_parts = (times * num_times if len(times) == 1 else times for times in (backwards, weight_times))
    unit = "s" if "s" in units else UNITS
    times = Times(forward=forwards, backward=backwards, weight=weight_times, send=sends[0], unit=unit)
    for full_backward, weight_part in zip(full_times, weight_parts, strict=False):
        if weight_part > full_backward:
            problem_text = f"--weight {times.cell(weight_part)} is more than --backward {times.cell(full_backward)}"
            raise InputError(f"{problem_text}, of which it is a part.")
    return times


def _read(option: str, text: str, units: set[str]) -> tuple[float, ...]:
    """Returns the times of a text such as ``1.2ms`` or ``1,1,1.5``; adds their unit to ``units``, none for a bare 0."""
    times = []
    for word in text.split(","):
        time_match = _TIME.fullmatch(word.strip())
        if time_match is None:
            raise InputError(f"{option} {text!r} is not a time. Write for example 1.2ms, 1.5 or 1,1,1.5.")
        time, unit = float(time_match[1]), time_match[2]
        if time > LARGEST:
            raise InputError(f"{option} {word!r} is too long. Give at most {LARGEST:g}.")
        if unit or time:
            units.add("s" if unit else UNITS)
        times.append(time * _SECONDS[unit])
    return tuple(times)


def _schedule(given: Given) -> Schedule | None:
    """Returns the schedule of the file or of the name; None if neither is given."""
    if given.table is None:
        return _build(given.name, _sizes(given, given.name), given.chunks) if given.name else None
    if given.name or given.stages or given.microbatches or given.chunks:
        raise InputError(f"{given.table} has a whole schedule. Leave out its name, --stages, --microbatches, --chunks.")
    return read_schedule(given.table)


def _sizes(given: Given, what: str) -> tuple[int, int]:
    if given.stages is None or given.microbatches is None:
        raise InputError(f"{what} needs --stages and --microbatches. Write for example --stages 8 --microbatches 32.")
    return given.stages, given.microbatches


def _build(name: str, sizes: tuple[int, int], chunks: int | None) -> Schedule:
    num_stages, num_micro = sizes
    num_chunks = default_chunks(name) if chunks is None else chunks
    if 3 * num_stages * num_micro * num_chunks > MAX_OPS:
        raise InputError(
            f"{num_stages} stages of {num_chunks} chunks x {num_micro} microbatches are more than {MAX_OPS:,} rows."
        )
    return build(name, stages=num_stages, microbatches=num_micro, chunks=num_chunks)


def _step(simulation: Simulation) -> dict[str, float]:
    return {"step": simulation.makespan_s, "bubble": simulation.bubble_s, "bubble_share": simulation.bubble_share}


def _result(schedule: Schedule, simulation: Simulation, times: Times) -> Facts:
    return {
        "schedule": schedule.name,
        "stages": schedule.num_devices,
        "microbatches": schedule.num_microbatches,
        "chunks": schedule.num_virtual_stages // schedule.num_devices,
        "weight_copies": schedule.weight_copies,
        "forward": times.forward,
        "backward": times.backward,
        "weight": times.weight,
        "send": times.send,
        "busy": simulation.busy_s,
        "idle": simulation.idle_s,
        **_step(simulation),
        "bubble_without_barrier": simulation.bubble_without_barrier_s,
        "bubble_published": _published_s(schedule, times),
        "peak_stash": simulation.peak_stash,
        "fused": times.in_lockstep(schedule),
    }


def _published_s(schedule: Schedule, times: Times) -> float | None:
    """Returns the bubble by the formula of the schedule's paper; None if the paper has none that differs, or times
    differ by stage."""
    schedule_definition = definitions().get(schedule.name)
    if schedule_definition is None or schedule_definition.published is None or not times.per_device:
        return None
    (forward,), (backward,), (weight,) = times.forward, times.backward, times.weight
    schedule_sizes = schedule.num_devices, schedule.num_microbatches, schedule_definition.chunks
    return float(schedule_definition.published.seconds(*schedule_sizes, forward, backward - weight, weight))


def _compared(name: str, sizes: tuple[int, int], chunks: int | None, times: Times) -> Facts:
    """Returns one schedule's row; for sizes at which it does not exist, the reason."""
    try:
        schedule = _build(name, sizes, chunks if definition(name).more_chunks else None)
    except InputError as error:
        return {"schedule": name, "weight_copies": definition(name).stage_placement.weight_copies, "cannot": str(error)}
    if not times.per_device:
        raise InputError("schedules cut the model differently: with --compare give one time for all devices.")
    facts = _result(schedule, times.simulate(schedule), times)
    names = ("chunks", "weight_copies", "step", "bubble", "bubble_share", "bubble_without_barrier")
    peaks = {"peak_stash": max(facts["peak_stash"]), "fused_step": facts["fused"]["step"]}
    return {"schedule": name, **{name: facts[name] for name in names}, **peaks}


def _sweep(given: Given, times: Times) -> list[Facts]:
    """Returns the schedule with half and twice the stages, and so on, on the same chips and the same batch.

    A pipeline of half as many stages has twice as many replicas: each runs half of the microbatches, and each device
    twice the layers.
    """
    given_stages, microbatches = _sizes(given, "--sweep-stages")
    if given.name is None or not times.per_device:
        raise InputError("--sweep-stages needs the name of a schedule, and one time for all devices.")
    rows = []
    for stages in (2**power for power in range(1, MAX_SWEPT_STAGES.bit_length())):
        if microbatches * stages % given_stages:
            continue
        row: Facts = {"stages": stages, "microbatches": microbatches * stages // given_stages}
        try:
            schedule = _build(given.name, (stages, row["microbatches"]), given.chunks)
        except InputError as error:
            rows.append({**row, "cannot": str(error)})
            continue
        simulation = times.scaled(given_stages / stages).simulate(schedule)
        peak_stash = max(simulation.peak_stash)
        rows.append({**row, **_step(simulation), "peak_stash": peak_stash, "peak_stash_of_model": peak_stash / stages})
    return rows


# -- text and picture -----------------------------------------------------------------------------------


def _schedule_text(schedule: Schedule, simulation: Simulation, facts: Facts, times: Times) -> Iterator[Piece]:
    yield _title(schedule)
    work_text = f"{times.cell(max(facts['busy']))} of work and a bubble of {times.show(facts['bubble'])}"
    yield Fact("step", f"{times.show(facts['step'])}: {work_text}; devices idle {facts['bubble_share']:.1%} of it")
    if facts["bubble"] - facts["bubble_without_barrier"] > 1e-9 * facts["step"]:
        yield Fact("", f"bubble of {times.show(facts['bubble_without_barrier'])} without a barrier between steps")
    copies_text = "two copies of the weights" if facts["weight_copies"] > 1 else "one copy of the weights"
    stash_text = counted(max(facts["peak_stash"]), "microbatch")
    yield Fact("peak stash", f"activations of {stash_text} of a whole stage, on the fullest device; {copies_text}")
    ticks = facts["fused"]
    yield Fact("tick by tick", f"{times.show(ticks['step'])} in {counted(ticks['ticks'], 'tick')} of up to one F, B "
               f"and W a device, as compiled steps run; peak stash {ticks['peak_stash']:.4g}")  # fmt: skip
    if facts["bubble_published"] is not None and (paper := definitions()[schedule.name].published):
        yield Fact("published", f"bubble of {times.show(facts['bubble_published'])} by {paper.formula}: {paper.why}")
    timeline = timeline_text(schedule, simulation, width=width())
    if timeline:
        weights_text, chunks_text = ", W weight gradients" * schedule.is_split, ", in small letters for odd chunks"
        key_text = (
            f"F forward, B backward{weights_text}{chunks_text * (schedule.num_chunks > 1)}; with the number of the"
        )
        drawn: list[PlainPiece] = [
            Paragraph(timeline.rstrip("\n"), None),
            f"({key_text} microbatch where it fits; dots: idle)",
        ]
        yield from drawn if schedule.num_devices <= MAX_DEVICES_SHOWN else [Detail("the timeline", drawn)]
    else:
        yield "(The timeline is too long for this terminal: draw it with --png FILE.)"
    yield _devices_table(schedule, facts, times)
    unit_text = "device" if times.per_device else "virtual stage"
    f_text, b_text, w_text = (_listed(values, times) for values in (times.forward, times.backward, times.weight))
    yield Condition(f"passes of one {unit_text} over one microbatch: forward {f_text}, backward {b_text}, of it "
                    f"weight gradients {w_text}; a send takes {times.show(times.send)}")  # fmt: skip


def _title(schedule: Schedule) -> str:
    """Returns the schedule and its sizes, for the text and the picture."""
    chunks_per_device = schedule.num_virtual_stages // schedule.num_devices
    chunks_text = f" of {chunks_per_device} chunks" if chunks_per_device > 1 else ""
    devices_text, batch_text = counted(schedule.num_devices, "device"), counted(schedule.num_microbatches, "microbatch")
    return f"{schedule.name}: {devices_text}{chunks_text}, {batch_text}"


def _listed(values: Sequence[float], times: Times) -> str:
    """Returns one time, or the least and the most of the virtual stages."""
    least_text, most_text = times.cell(min(values)), times.cell(max(values))
    return least_text if least_text == most_text else f"{least_text} to {most_text}"


def _devices_table(schedule: Schedule, facts: Facts, times: Times) -> Table:
    stages_of_device: list[list[str]] = [[] for _ in schedule.orders]
    for route in schedule.routes:
        for stage, place in enumerate(route):
            stages_of_device[place.device].append(str(stage))
    per_device = zip(map(", ".join, stages_of_device), facts["busy"], facts["idle"], facts["peak_stash"], strict=True)
    columns: list[str | Heading] = [
        "device",
        "stages",
        Heading("busy", times.cell),
        Heading("idle", times.cell),
        "peak stash",
    ]
    return Table(columns, [[str(device), *row] for device, row in enumerate(per_device)], "devices", DEVICES_SHOWN)


def _rows_text(title: str, rows: list[Facts], columns: Facts) -> Iterator[Piece]:
    """Yields a table of the schedules that exist, then a line for each that does not, with the reason."""
    yield Table.of([row for row in rows if "cannot" not in row], columns, title)
    for row in rows:
        if "cannot" in row:
            yield f"{row.get('name', row.get('schedule'))}: {row['cannot']}"


def _figure(schedule: Schedule, simulation: Simulation, times: Times) -> Any:
    return timeline_figure(
        schedule,
        simulation,
        unit=times.unit,
        title=_title(schedule),
        subtitle=f"step {times.show(simulation.makespan_s)}; devices are idle {simulation.bubble_share:.1%} of it; "
        f"peak stash {counted(max(simulation.peak_stash), 'microbatch')} of a stage",
    )
