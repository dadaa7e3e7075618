"""`meshwright schedule`: a pipeline schedule as a table: its time, its idle devices, its memory, its timeline."""

from pathlib import Path
from typing import Any

from meshwright.algebra.schedules.file import format_schedule, read_schedule
from meshwright.algebra.schedules.registry import build, default_chunks, definition, schedule_names
from meshwright.algebra.schedules.simulation import Simulation
from meshwright.algebra.schedules.table import Schedule
from meshwright.calculators.verbs.roofline_sweep import drawn
from meshwright.calculators.verbs.schedule_text import compared_text, schedule_text, sweep_text
from meshwright.calculators.verbs.schedule_times import Times, read_times
from meshwright.cli.output import say
from meshwright.cli.verb import Options, argument, option, verb
from meshwright.core.errors import InputError
from meshwright.core.files import write_text_whole
from meshwright.report.answer import Answer

MAX_ROWS = 1_000_000
MAX_SWEPT_STAGES = 64


*_FIRST, _LAST = schedule_names()
HELP = f"""Time, idle devices and memory of the schedule NAME, such as 1f1b, or of one of your own.

NAME is {", ".join(_FIRST)} or {_LAST}. Times are of one microbatch; where
they carry no unit the answer is in units too.
"""


class Given(Options):
    name: str | None = argument()
    stages: int | None = option("Devices of the pipeline.")
    microbatches: int | None = option("Microbatches of a step.")
    chunks: int | None = option("Virtual stages per device of the interleaved schedule.  [default: 2]")
    forward: str = option("Of one device; 1.2ms, or one for each virtual stage.", default="1")
    backward: str | None = option("The whole backward pass.  [default: twice the forward pass]")
    weight: str | None = option("The part of it that makes gradients of weights.  [default: half of it]")
    send: str = option("From one stage to the next.", default="0")
    table: Path | None = option("A schedule of your own: a line per device, 0: F0 B0.")
    write: Path | None = option("Write the schedule as such a file.")
    compare: bool = option("All named schedules beside each other.")
    sweep_stages: bool = option("More stages and fewer replicas on the same chips.")
    png: Path | None = option("Draw the timeline to this file (.png or .svg).")


@verb(Given, help=HELP)
def command(given: Given) -> Answer:
    times = read_times(forward=given.forward, backward=given.backward, weight=given.weight, send=given.send)
    if not (given.name or given.table or given.compare):
        raise InputError(f"no schedule is named. Give one of {', '.join(schedule_names())}, or --table FILE.")
    schedule = _schedule(given.name, given.stages, given.microbatches, given.chunks, given.table)
    result: dict[str, Any] = {"unit": times.unit}
    if schedule:
        simulation = times.simulate(schedule)
        result |= _result(schedule, simulation, times)
    if given.compare:
        sizes = _sizes(given.stages, given.microbatches, "--compare")
        result["compare"] = [_compared(one, sizes, given.chunks, times) for one in schedule_names()]
    if given.sweep_stages:
        sizes = _sizes(given.stages, given.microbatches, "--sweep-stages")
        result["sweep"] = _sweep(given.name, sizes, given.chunks, times)
    if not schedule and (given.write or given.png):
        raise InputError("--png and --write take one schedule. Name it, such as 1f1b, beside --compare.")
    if schedule and given.write:
        write_text_whole(given.write, format_schedule(schedule))
        say(f"wrote {given.write}")
    result |= drawn(given.png)
    text = [*schedule_text(schedule, simulation, result, times)] if schedule else []
    if given.compare:
        text += compared_text(result["compare"], times)
    if given.sweep_stages:
        text += sweep_text(result["sweep"], times)
    return Answer(result, text, {given.png: lambda: _figure(schedule, simulation, times)} if schedule else {})


def _schedule(
    name: str | None, stages: int | None, microbatches: int | None, chunks: int | None, table: Path | None
) -> Schedule | None:
    if table is None:
        return _build(name, _sizes(stages, microbatches, name), chunks) if name else None
    if name or stages or microbatches or chunks:
        raise InputError(f"{table} says what the schedule is. Leave out its name, --stages, --microbatches, --chunks.")
    return read_schedule(table)


def _sizes(stages: int | None, microbatches: int | None, what: str) -> tuple[int, int]:
    if stages is None or microbatches is None:
        raise InputError(f"{what} needs --stages and --microbatches. Write for example --stages 8 --microbatches 32.")
    return stages, microbatches


def _build(name: str, sizes: tuple[int, int], chunks: int | None) -> Schedule:
    stages, microbatches = sizes
    pieces = default_chunks(name) if chunks is None else chunks
    if 3 * stages * microbatches * pieces > MAX_ROWS:
        raise InputError(
            f"{stages} stages of {pieces} chunks x {microbatches} microbatches are more than {MAX_ROWS:,} rows."
        )
    return build(name, stages=stages, microbatches=microbatches, chunks=pieces)


def _result(schedule: Schedule, simulation: Simulation, times: Times) -> dict[str, Any]:
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
        "step": simulation.makespan_s,
        "busy": simulation.busy_s,
        "idle": simulation.idle_s,
        "bubble": simulation.bubble_s,
        "bubble_share": simulation.bubble_share,
        "bubble_without_barrier": simulation.bubble_without_barrier_s,
        "peak_stash": simulation.peak_stash,
        "fused": times.in_lockstep(schedule),
    }


def _compared(name: str, sizes: tuple[int, int], chunks: int | None, times: Times) -> dict[str, Any]:
    """One schedule's row; with the reason instead where it does not exist for these sizes."""
    try:
        schedule = _build(name, sizes, chunks if definition(name).more_chunks else None)
    except InputError as error:
        return {"schedule": name, "weight_copies": definition(name).stage_placement.weight_copies, "cannot": str(error)}
    if not times.uniform:
        raise InputError("schedules cut the model differently: with --compare give one time per device.")
    simulation, lockstep = times.simulate(schedule), times.in_lockstep(schedule)
    return {
        "schedule": name,
        "chunks": schedule.num_virtual_stages // schedule.num_devices,
        "weight_copies": schedule.weight_copies,
        "step": simulation.makespan_s,
        "bubble": simulation.bubble_s,
        "bubble_share": simulation.bubble_share,
        "bubble_without_barrier": simulation.bubble_without_barrier_s,
        "peak_stash": max(simulation.peak_stash),
        "fused_step": lockstep["step"],
    }


def _sweep(name: str | None, sizes: tuple[int, int], chunks: int | None, times: Times) -> list[dict[str, Any]]:
    """The schedule with half and twice the stages, and so on, on the same chips and the same batch.

    A pipeline of half as many stages has twice as many replicas: each runs half of the microbatches, and each device
    twice the layers.
    """
    if name is None or not times.uniform:
        raise InputError("--sweep-stages needs the name of a schedule, and one time per device.")
    stages, microbatches = sizes
    found = []
    for swept in (2**power for power in range(1, MAX_SWEPT_STAGES.bit_length())):
        if microbatches * swept % stages:
            continue
        try:
            schedule = _build(name, (swept, microbatches * swept // stages), chunks)
        except InputError as error:
            found.append({"stages": swept, "microbatches": microbatches * swept // stages, "cannot": str(error)})
            continue
        simulation = times.scaled(stages / swept).simulate(schedule)
        found.append(
            {
                "stages": swept,
                "microbatches": schedule.num_microbatches,
                "step": simulation.makespan_s,
                "bubble": simulation.bubble_s,
                "bubble_share": simulation.bubble_share,
                "peak_stash": max(simulation.peak_stash),
                "peak_stash_of_model": max(simulation.peak_stash) / swept,
            }
        )
    return found


def _figure(schedule: Schedule, simulation: Simulation, times: Times) -> Any:
    from meshwright.report.plans.timeline import timeline_figure

    return timeline_figure(
        schedule,
        simulation,
        unit=times.unit,
        title=f"{schedule.name}: {schedule.num_devices} devices, {schedule.num_microbatches} microbatches",
        subtitle=f"step {times.show(simulation.makespan_s)}; devices are idle {simulation.bubble_share:.1%} of it; "
        f"peak stash {max(simulation.peak_stash):.4g} whole-stage microbatches",
    )
