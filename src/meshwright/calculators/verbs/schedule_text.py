"""What `meshwright schedule` prints."""

from collections.abc import Iterator, Sequence
from typing import Any

from meshwright.algebra.schedules.simulation import Simulation
from meshwright.algebra.schedules.table import Schedule
from meshwright.calculators.verbs.schedule_times import Times
from meshwright.cli.output import width
from meshwright.report.answer import Fact, Paragraph, Piece, Table
from meshwright.report.plans.timeline import timeline_text

MAX_DEVICES_SHOWN = 16


def schedule_text(schedule: Schedule, simulation: Simulation, r: dict[str, Any], times: Times) -> Iterator[Piece]:
    chunks = f" of {r['chunks']} chunks" if r["chunks"] > 1 else ""
    yield f"{schedule.name}: {r['stages']} devices{chunks}, {r['microbatches']} microbatches"
    per = "device" if times.uniform else "virtual stage"
    backward = f"{_listed(times.backward, times)} (weight gradients {_listed(times.weight, times)} of it)"
    yield Fact("passes", f"forward {_listed(times.forward, times)}, backward {backward}, per {per} and microbatch; "
               f"send {times.show(times.send)}")  # fmt: skip
    yield Fact("step", f"{times.show(r['step'])}, of it work {times.show(max(r['busy']))}")
    yield Fact("bubble", f"{times.show(r['bubble'])}; devices are idle {r['bubble_share']:.1%} of the step")
    if r["bubble"] - r["bubble_without_barrier"] > 1e-9 * r["step"]:
        yield Fact("", f"{times.show(r['bubble_without_barrier'])} where the next step needs no barrier")
    copies = "two copies of the weights" if r["weight_copies"] > 1 else "one copy of the weights"
    yield Fact("peak stash", f"{max(r['peak_stash']):.4g} whole-stage microbatches; {copies}")
    lockstep = r["fused"]
    yield Fact("in lockstep", f"{lockstep['ticks']} fused ticks, {times.show(lockstep['step'])}, "
               f"peak stash {lockstep['peak_stash']:.4g}")  # fmt: skip
    yield from _devices_text(schedule, r, times)
    yield from _timeline_text(schedule, simulation)


def _listed(given: Sequence[float], times: Times) -> str:
    """One time, or the least and the most of those of the virtual stages."""
    least, most = times.cell(min(given)), times.cell(max(given))
    return least if least == most else f"{least} to {most}"


def _devices_text(schedule: Schedule, r: dict[str, Any], times: Times) -> Iterator[Piece]:
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
    yield Table(["device", "holds stage", "busy", "idle", "peak stash"], rows)


def _timeline_text(schedule: Schedule, simulation: Simulation) -> Iterator[Piece]:
    text = timeline_text(schedule, simulation, width=width())
    if not text:
        yield "(The timeline is too long for this terminal: draw it with --png FILE.)"
        return
    yield Paragraph(text.rstrip("\n"), None)
    chunks = "; small letters: odd chunks" if schedule.num_chunks > 1 else ""
    weights = ", W weight gradients" if schedule.is_split else ""
    yield f"(F forward, B backward{weights}, each with its microbatch where that fits{chunks}; dots: idle)"


def compared_text(rows: list[dict[str, Any]], times: Times) -> Iterator[Piece]:
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
    yield Table(columns, shown, "All schedules, same work per device:")
    for row in rows:
        if "cannot" in row:
            yield f"{row['schedule']}: {row['cannot']}"


def sweep_text(rows: list[dict[str, Any]], times: Times) -> Iterator[Piece]:
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
    yield Table(columns, shown, "More stages on the same chips, the same batch:")
    for row in rows:
        if "cannot" in row:
            yield f"{row['stages']} stages: {row['cannot']}"
