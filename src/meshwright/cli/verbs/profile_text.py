"""What `profile` prints and gives as JSON: the step beside its prediction, the worst terms first, what to change."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.cli.output import or_dash
from meshwright.core.units import format_bytes, format_seconds
from meshwright.report.answer import Piece, Table

if TYPE_CHECKING:
    from meshwright.profile.summary import Profile

SHOWN_STEPS = 8


def profile_text(profile: "Profile", files: Sequence[Path]) -> Iterator[Piece]:
    """A screenful: the step, where its time goes, the worst terms and steps, advice, memory, files."""
    from meshwright.report.machine.profile_report import difference, difference_words

    rows = [
        _compared("step", profile.predicted_step_s, profile.step_s, format_seconds),
        _compared("MFU", profile.predicted_mfu, profile.mfu, lambda share: f"{share:.1%}"),
        _compared("HFU", profile.predicted_hfu, profile.hfu, lambda share: f"{share:.1%}"),
    ]
    predicted = profile.comparison.predicted.parts
    rows += [_compared(name, predicted[name], s, format_seconds) for name, s in profile.times.mean.parts.items()]
    yield Table(["", "predicted", "measured", "ratio"], rows)
    hidden = or_dash(profile.times.overlap, lambda share: f"{share:.0%}")
    waits = f", waits {format_seconds(profile.times.waited_s)} for other devices" if profile.times.waited_s else ""
    yield (
        f"the five parts are of a mean device under the profiler, {format_seconds(profile.profiled_s)}; communication "
        f"takes "
        f"{format_seconds(profile.times.communication_s)}{waits}, and {hidden} of it hides behind compute"
    )
    if profile.comparison.shares_cores:
        yield (
            "emulated devices share the cores: below, the machine's time is shared out over what works at each instant "
            "on any device, and waiting is no work; kinds of work sum to the step"
        )
    for warning in profile.warnings:
        yield warning[:1].lower() + warning[1:].removesuffix(".")
    yield ""
    for title, chosen in (
        ("kind of work, worst first", profile.comparison.terms),
        ("derived step, worst first", profile.comparison.steps[:SHOWN_STEPS]),
    ):
        cells = [
            [
                _spaced(row.name),
                or_dash(row.predicted_s, format_seconds),
                or_dash(row.measured_s, format_seconds),
                difference(row),
            ]
            for row in chosen
        ]
        yield Table([title, "predicted", "measured", "difference"], cells)
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


def _spaced(name: str) -> str:
    """A label with spaces, where a narrow table may break it."""
    return name if " " in name else name.replace(":", " ")


def _compared(name: str, predicted: float, measured: float, show: Any) -> list[str]:
    return [name, show(predicted), show(measured), f"{measured / predicted:.2f}" if predicted else "-"]


def profile_json(profile: "Profile", files: list[Path]) -> dict[str, Any]:
    """Everything but the single samples of memory."""
    comparison, memory, peak = profile.comparison, profile.memory, profile.memory.peak
    return {
        "platform": profile.platform,
        "step_s": profile.step_s,
        "step_s_profiled": profile.profiled_s,
        "step_s_predicted": profile.predicted_step_s,
        "mfu": profile.mfu,
        "hfu": profile.hfu,
        "mfu_predicted": profile.predicted_mfu,
        "hfu_predicted": profile.predicted_hfu,
        "flops": profile.flops,
        "flops_predicted": profile.predicted_flops,
        "partition": profile.times.mean,
        "partition_predicted": comparison.predicted,
        "devices": profile.times.devices,
        "communication_s": profile.times.communication_s,
        "hidden_s": profile.times.hidden_s,
        "overlap": profile.times.overlap,
        "shares_cores": comparison.shares_cores,
        "terms": comparison.terms,
        "parts": comparison.parts,
        "steps": comparison.steps,
        "classes": comparison.classes,
        "ops": profile.times.ops,
        "float32_products": comparison.float32,
        "advice": profile.advice,
        "memory": {
            "counted": memory.counted,
            "peak_bytes": peak.num_bytes if peak else None,
            "arguments_bytes": memory.arguments_bytes,
            "temporaries_bytes": memory.temporaries_bytes,
            "live_bytes": memory.live_bytes,
            "owners": memory.owners,
            "predicted": profile.predicted_memory,
        },
        "notes": profile.notes,
        "files": files,
    }
