"""What `profile` and `train --profile` answer: the step beside its prediction, worst terms first, and advice."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.cli.output import or_dash
from meshwright.core.units import format_bytes, format_seconds
from meshwright.report.answer import Answer, Piece, Table

if TYPE_CHECKING:
    from meshwright.profile.summary import Profile

SHOWN_STEPS = 8


def profile_answer(profile: "Profile", folder: Path) -> Answer:
    """Write the report into the folder; its short form, and everything but the single samples of memory as data."""
    from meshwright.report.machine.profile_report import write_report

    files = write_report(profile, folder)
    return Answer(_facts(profile) | {"files": files}, _text(profile, files))


def _text(profile: "Profile", files: Sequence[Path]) -> Iterator[Piece]:
    """A screenful: the step, where its time goes, the worst terms and steps, advice, memory, files."""
    from meshwright.report.machine.profile_report import difference_words, headline_rows, times_table

    times, comparison = profile.times, profile.comparison
    parts = comparison.predicted.parts
    rows = [(name, parts[name], seconds, format_seconds) for name, seconds in times.mean.parts.items()]
    yield Table.compared([*headline_rows(profile), *rows])
    hidden = or_dash(times.overlap, "{:.0%}".format)
    waits = f", waits {format_seconds(times.waited_s)} for other devices" if times.waited_s else ""
    yield (
        f"the five parts are of a mean device under the profiler, {format_seconds(profile.profiled_s)}; communication "
        f"takes {format_seconds(times.communication_s)}{waits}, and {hidden} of it hides behind compute"
    )
    if comparison.shares_cores:
        yield (
            "emulated devices share the cores: below, the machine's time is shared out over what works at each instant "
            "on any device, and waiting is no work; kinds of work sum to the step"
        )
    for warning in profile.warnings:
        yield warning[:1].lower() + warning[1:].removesuffix(".")
    yield ""
    yield times_table(comparison.terms, "kind of work, worst first")
    yield times_table(comparison.steps[:SHOWN_STEPS], "derived step, worst first")
    for one in profile.advice:
        yield f"{one.term}, {difference_words(one.difference_s)}: {one.text}"
    peak = profile.memory.peak
    if peak:
        owner = profile.memory.owners[0]
        whose = "of the first device" if profile.memory.counted == "device" else "of the process"
        yield (
            f"memory: peak {format_bytes(peak.num_bytes)} {whose}; largest on a device: {owner.name} "
            f"({owner.kind}), {format_bytes(owner.num_bytes)}"
        )
    yield f"wrote {', '.join(map(str, files))}"


OF_PROFILE = ("platform", "step_s", "mfu", "hfu", "flops", "advice", "notes")
OF_TIMES = ("devices", "communication_s", "hidden_s", "overlap", "ops")
OF_COMPARISON = ("shares_cores", "terms", "parts", "steps", "classes")
OF_MEMORY = ("counted", "arguments_bytes", "temporaries_bytes", "live_bytes", "owners")


def _facts(profile: "Profile") -> dict[str, Any]:
    times, comparison, memory = profile.times, profile.comparison, profile.memory
    chosen = ((profile, OF_PROFILE), (times, OF_TIMES), (comparison, OF_COMPARISON))
    return {
        **{name: getattr(whole, name) for whole, names in chosen for name in names},
        "step_s_profiled": profile.profiled_s,
        "step_s_predicted": profile.predicted_step_s,
        "mfu_predicted": profile.predicted_mfu,
        "hfu_predicted": profile.predicted_hfu,
        "flops_predicted": profile.predicted_flops,
        "partition": times.mean,
        "partition_predicted": comparison.predicted,
        "float32_products": comparison.float32,
        "memory": {
            **{name: getattr(memory, name) for name in OF_MEMORY},
            "peak_bytes": memory.peak.num_bytes if memory.peak else None,
            "predicted": profile.predicted_memory,
        },
    }
