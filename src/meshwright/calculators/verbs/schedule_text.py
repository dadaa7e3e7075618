"""What `meshwright schedule` prints."""

from collections.abc import Sequence
from typing import Any

import click

from meshwright.algebra.schedules.simulation import Simulation
from meshwright.algebra.schedules.table import Schedule
from meshwright.calculators.verbs.schedule_times import Times
from meshwright.cli.output import print_fact, print_table, print_text, width
from meshwright.report.plans.timeline import timeline_text

MAX_DEVICES_SHOWN = 16


def print_schedule(schedule: Schedule, simulation: Simulation, r: dict[str, Any], times: Times) -> None:
    chunks = f" of {r['chunks']} chunks" if r["chunks"] > 1 else ""
    print_text(f"{schedule.name}: {r['stages']} devices{chunks}, {r['microbatches']} microbatches")
    per = "device" if times.uniform else "virtual stage"
    backward = f"{_listed(times.backward, times)} (weight gradients {_listed(times.weight, times)} of it)"
    print_fact("passes", f"forward {_listed(times.forward, times)}, backward {backward}, per {per} and microbatch; "
               f"send {times.show(times.send)}")  # fmt: skip
    print_fact("step", f"{times.show(r['step'])}, of it work {times.show(max(r['busy']))}")
    print_fact("bubble", f"{times.show(r['bubble'])}; devices are idle {r['bubble_share']:.1%} of the step")
    if r["bubble"] - r["bubble_without_barrier"] > 1e-9 * r["step"]:
        print_fact("", f"{times.show(r['bubble_without_barrier'])} where the next step needs no barrier")
    copies = "two copies of the weights" if r["weight_copies"] > 1 else "one copy of the weights"
    print_fact("peak stash", f"{max(r['peak_stash']):.4g} whole-stage microbatches; {copies}")
    lockstep = r["fused"]
    print_fact("in lockstep", f"{lockstep['ticks']} fused ticks, {times.show(lockstep['step'])}, "
               f"peak stash {lockstep['peak_stash']:.4g}")  # fmt: skip
    _print_devices(schedule, r, times)
    _print_timeline(schedule, simulation)


def _listed(given: Sequence[float], times: Times) -> str:
    """One time, or the least and the most of those of the virtual stages."""
    least, most = times.cell(min(given)), times.cell(max(given))
    return least if least == most else f"{least} to {most}"


def _print_devices(schedule: Schedule, r: dict[str, Any], times: Times) -> None:
    held: list[list[int]] = [[] for _ in schedule.orders]
    for route in schedule.routes:
        for stage, place in enumerate(route):
            held[place.device].append(stage)
    rows = [
        [str(device), ", ".join(map(str, held[device])), times.cell(busy), times.cell(idle), f"{stash:.4g}"]
        for device, (busy, idle, stash) in enumerate(zip(r["busy"], r["idle"], r["peak_stash"], strict=True))
    ]
    if len(rows) > MAX_DEVICES_SHOWN:
        half = MAX_DEVICES_SHOWN // 2
        rows = [*rows[:half], ["..."] * 5, *rows[-half:]]
    print_table(["device", "holds stage", "busy", "idle", "peak stash"], rows)


def _print_timeline(schedule: Schedule, simulation: Simulation) -> None:
    text = timeline_text(schedule, simulation, width=width())
    if not text:
        print_text("(The timeline is too long for this terminal: draw it with --png FILE.)")
        return
    click.echo(text, nl=False)
    chunks = "; small letters: odd chunks" if schedule.num_chunks > 1 else ""
    weights = ", W weight gradients" if schedule.is_split else ""
    print_text(f"(F forward, B backward{weights}, each with its microbatch where that fits{chunks}; dots: idle)")


def print_compared(rows: list[dict[str, Any]], times: Times) -> None:
    shown = [
        [
            row["schedule"],
            row["chunks"],
            times.cell(row["step"]),
            f"{row['bubble_share']:.1%}",
            times.cell(row["bubble_without_barrier"]),
            f"{row['peak_stash']:.4g}",
            row["weight_copies"],
            times.cell(row["fused_step"]),
        ]
        for row in rows
        if "cannot" not in row
    ]
    columns = ["schedule", "chunks", "step", "idle", "bubble without barrier", "peak stash", "weights", "in lockstep"]
    print_table(columns, shown, "All schedules, same work per device:")
    for row in rows:
        if "cannot" in row:
            print_text(f"{row['schedule']}: {row['cannot']}")


def print_sweep(rows: list[dict[str, Any]], times: Times) -> None:
    shown = [
        [
            row["stages"],
            row["microbatches"],
            times.cell(row["step"]),
            f"{row['bubble_share']:.1%}",
            f"{row['peak_stash']:.4g}",
            f"{row['peak_stash_of_model']:.3g}",
        ]
        for row in rows
        if "cannot" not in row
    ]
    columns = ["stages", "microbatches per replica", "step", "idle", "peak stash", "of the whole model"]
    print_table(columns, shown, "More stages on the same chips, the same batch:")
    for row in rows:
        if "cannot" in row:
            print_text(f"{row['stages']} stages: {row['cannot']}")
