"""A profile as a page of Markdown with its pictures and its timeline: what `meshwright profile` leaves in a folder."""

from collections.abc import Callable, Sequence
from pathlib import Path

from meshwright.core.files import write_text_whole
from meshwright.core.units import format_bytes, format_flops, format_seconds
from meshwright.profile.compare import TimeRow
from meshwright.profile.summary import Profile
from meshwright.report.figure import save
from meshwright.report.machine.profile_figures import memory_timeline_figure, parts_figure, where_figure
from meshwright.report.machine.profile_trace import save_trace
from meshwright.report.plain_tables import Value, as_markdown

REPORT, TIMELINE = "profile.md", "trace.json.gz"
WHERE, PARTS, MEMORY = "where.png", "parts.png", "memory-timeline.png"
MAX_STEPS = 40
MAX_OPS = 30
MAX_PRODUCTS = 12


def write_report(profile: Profile, folder: Path) -> list[Path]:
    """The files that were written, the page first."""
    folder.mkdir(parents=True, exist_ok=True)
    how = f"{profile.plan.model.name} on {profile.plan.cluster.short_name}; {profile.plan.calibration.describe()}"
    written = [save(where_figure(profile), folder / WHERE)]
    written.append(
        save(parts_figure(profile.comparison.parts, title="Parts of the model", subtitle=how), folder / PARTS)
    )
    if profile.memory.samples:
        written.append(save(memory_timeline_figure(profile.memory), folder / MEMORY))
    written.append(save_trace(profile, folder / TIMELINE))
    write_text_whole(folder / REPORT, report_text(profile))
    return [folder / REPORT, *written]


def report_text(profile: Profile) -> str:
    """The page."""
    plan = profile.plan
    sections = [
        f"# Profile of {plan.model.name} on {plan.cluster.short_name}\n",
        _summary(profile),
        "\n".join(f"- {note}" for note in profile.notes) + "\n",
        _section("Furthest from the prediction", _terms(profile)),
        _section("Where the wall time of a step goes", f"![where]({WHERE})\n\n" + _where(profile) + "\n" + WHERE_WORDS),
        _section("Parts of the model", f"![parts]({PARTS})\n\n" + _rows(profile.comparison.parts, "part")),
        _section("Kinds of work", _classes(profile)),
        _section("Derived steps", _rows(profile.comparison.steps[:MAX_STEPS], "step") + _more(profile)),
        _section("Instructions", _ops(profile)),
        _section("Float32 products", _float32(profile)),
        _section("Memory", _memory(profile)),
        f"The timeline is in `{TIMELINE}`: open it in Perfetto, the predicted step above the measured devices.\n",
    ]
    return "\n".join(sections)


WHERE_WORDS = """\
Compute: an instruction runs whose FLOPs at the chip's rate take longer than its bytes. Memory-bound: none of those, and
one runs whose bytes take longer. Exposed communication: only collectives run. Overhead: nothing runs, before the first
instruction of the step, behind the last one, or for at most 50 us between two. Idle: nothing runs for longer.
"""


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n{text}"


def _summary(profile: Profile) -> str:
    rows: list[list[Value]] = [
        [
            "step",
            format_seconds(profile.predicted_step_s),
            format_seconds(profile.step_s),
            _ratio_of(profile.step_s, profile.predicted_step_s),
        ],
        [
            "step under the profiler",
            None,
            format_seconds(profile.profiled_s),
            _ratio_of(profile.profiled_s, profile.predicted_step_s),
        ],
        ["MFU", f"{profile.predicted_mfu:.1%}", f"{profile.mfu:.1%}", _ratio_of(profile.mfu, profile.predicted_mfu)],
        ["HFU", f"{profile.predicted_hfu:.1%}", f"{profile.hfu:.1%}", _ratio_of(profile.hfu, profile.predicted_hfu)],
        [
            "FLOPs of products on a device",
            format_flops(profile.predicted_flops, unit="FLOP"),
            format_flops(profile.flops, unit="FLOP"),
            _ratio_of(profile.flops, profile.predicted_flops),
        ],
        [
            "communication hidden behind compute",
            _share(predicted_overlap(profile)),
            _share(profile.times.overlap),
            None,
        ],
    ]
    return as_markdown(["", "predicted", "measured", "ratio"], rows)


def predicted_overlap(profile: Profile) -> float | None:
    """Share of the predicted communication that does not lengthen the step; None without any."""
    spent = sum(row.predicted_s or 0.0 for row in profile.comparison.terms if row.name.startswith("collective"))
    return max(0.0, 1 - profile.comparison.predicted.exposed_s / spent) if spent else None


def _share(value: float | None) -> str | None:
    return None if value is None else f"{value:.0%}"


def _ratio_of(measured: float, predicted: float) -> str:
    return f"{measured / predicted:.2f}" if predicted else "-"


def _seconds(value: float | None) -> str | None:
    return None if value is None else format_seconds(value)


def difference(row: TimeRow) -> str:
    """``+12.3 ms``."""
    return f"{'-' if row.difference_s < 0 else '+'}{format_seconds(abs(row.difference_s))}"


def _rows(rows: Sequence[TimeRow], what: str) -> str:
    cells = [[row.name, _seconds(row.predicted_s), _seconds(row.measured_s), difference(row)] for row in rows]
    return as_markdown([what, "predicted", "measured", "difference"], cells)


def _more(profile: Profile) -> str:
    left = len(profile.comparison.steps) - MAX_STEPS
    return f"\n{left} further steps differ by less.\n" if left > 0 else ""


def _terms(profile: Profile) -> str:
    advice = {one.term: one.text for one in profile.advice}
    lines = [f"- **{one.term}** ({difference_words(one.difference_s)}): {one.text}." for one in profile.advice]
    nothing = "Nothing is further from its prediction than 2% of the step."
    table = _rows(profile.comparison.terms, "kind of work")
    return table + "\n" + ("\n".join(lines) if advice else nothing) + "\n"


def difference_words(seconds: float) -> str:
    """``12 ms more than predicted``."""
    return f"{format_seconds(abs(seconds))} {'less' if seconds < 0 else 'more'} than predicted"


def _where(profile: Profile) -> str:
    mean, predicted, whole = profile.times.mean, profile.comparison.predicted, profile.times.mean.total_s
    rows: list[list[Value]] = [
        [name, format_seconds(predicted.parts[name]), format_seconds(s), f"{s / whole:.1%}"]
        for name, s in mean.parts.items()
    ]
    rows.append(["whole step", format_seconds(predicted.total_s), format_seconds(whole), "100.0%"])
    return as_markdown(["", "predicted", "mean device", "share"], rows)


def _classes(profile: Profile) -> str:
    whole, flops = profile.times.mean.total_s, profile.flops
    rows = [
        [
            row.kind,
            format_seconds(row.own_s),
            format_seconds(row.wall_s),
            f"{row.wall_s / whole:.1%}",
            f"{row.flops / flops:.1%}" if flops else None,
            format_flops(row.flops / row.own_s) if row.flops and row.own_s else None,
            f"{format_bytes(row.hbm_bytes / row.own_s)}/s" if row.own_s else None,
        ]
        for row in profile.comparison.classes
    ]
    text = as_markdown(["kind", "by itself", "of the wall time", "share", "FLOP share", "FLOP/s", "bytes/s"], rows)
    return text + "\nOf a mean device. Instructions that run at the same instant share it in the wall time.\n"


def _ops(profile: Profile) -> str:
    whole = profile.times.mean.total_s
    rows = [
        [
            op.name,
            op.kind,
            op.step,
            f"{op.count:g}",
            format_seconds(op.own_s),
            f"{op.wall_s / whole:.1%}",
            format_flops(op.flops / op.own_s) if op.flops and op.own_s else None,
        ]
        for op in profile.times.ops[:MAX_OPS]
    ]
    text = as_markdown(["instruction", "kind", "derived step", "times", "by itself", "share", "FLOP/s"], rows)
    return text + f"\nThe longest {len(rows)} of {len(profile.times.ops)} instructions of a mean device.\n"


_UNITS = {
    "cpu": "A CPU has no matrix units that want narrower operands: the products are only listed.",
    "gpu": "A GPU takes float32 operands as TF32 by default, at half of the rate of bfloat16 or less: a state of bf16 "
    "operands (strategy.state=bf16-adam) takes the whole rate.",
    "tpu": "A TPU rounds float32 operands to bfloat16 unless more precision is asked for: those with precision high or "
    "highest multiply three or six times and miss the rate of the matrix unit.",
}


def _float32(profile: Profile) -> str:
    rows = profile.comparison.float32
    if not rows:
        return "None: no product of the program takes float32 operands.\n"
    flops = sum(row.flops for row in rows)
    cells = [
        [row.name, row.step, row.operands, row.precision, f"{row.count:g}", format_seconds(row.seconds)]
        for row in rows[:MAX_PRODUCTS]
    ]
    missed = f" {len(profile.missed)} of them miss the matrix units." if profile.platform != "cpu" else ""
    head = f"{len(rows)} products take float32 operands, {flops / profile.flops:.0%} of the FLOPs.{missed} "
    table = as_markdown(["instruction", "derived step", "operands", "precision", "times", "by itself"], cells)
    return head + _UNITS[profile.platform] + "\n\n" + table


def _memory(profile: Profile) -> str:
    memory = profile.memory
    lines = [f"![memory]({MEMORY})\n"] if memory.samples else []
    peak = memory.peak
    if peak:
        whose = (
            "the first device" if memory.counted == "device" else "the process, all emulated devices and the runtime"
        )
        lines.append(f"Peak {format_bytes(peak.num_bytes)} after {format_seconds(peak.at_s)}, of {whose}.\n")
    predicted = sum(profile.predicted_memory.values())
    rows: list[list[Value]] = [
        ["predicted, all items", format_bytes(predicted)],
        ["compiler: arguments", _known(memory.arguments_bytes, format_bytes)],
        ["compiler: temporaries", _known(memory.temporaries_bytes, format_bytes)],
        ["temporaries that live at once, by the schedule", format_bytes(memory.live_bytes)],
    ]
    lines.append(as_markdown(["one device", "bytes"], rows))
    owners = [[owner.name, owner.kind, format_bytes(owner.num_bytes)] for owner in memory.owners]
    lines.append("Who owns the peak, on one device:\n\n" + as_markdown(["array or step", "kind", "bytes"], owners))
    return "\n".join(lines)


def _known(value: float | None, show: Callable[[float], str]) -> str | None:
    return None if value is None else show(value)
