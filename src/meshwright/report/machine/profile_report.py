"""Writes the folder of `meshwright profile`: a page of Markdown, its pictures and the timeline."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from meshwright.core.files import write_text_whole
from meshwright.core.units import format_bytes, format_flops, format_seconds
from meshwright.profile.compare import TimeRow
from meshwright.profile.summary import Profile
from meshwright.report.answer import Show, Table, as_markdown
from meshwright.report.figure import save
from meshwright.report.machine.profile_figures import memory_timeline_figure, parts_figure, where_figure
from meshwright.report.machine.profile_trace import save_trace

REPORT, TIMELINE = "profile.md", "trace.json.gz"
WHERE, PARTS, MEMORY = "where.png", "parts.png", "memory-timeline.png"
MAX_STEPS = 40
MAX_OPS = 30
MAX_PRODUCTS = 12
PERCENT = "{:.1%}".format
ReportColumns = list[str | tuple[str, Show]]


def write_report(profile: Profile, folder: Path) -> list[Path]:
    """Writes all files of the report and returns their paths, the page first."""
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
    """Returns the page as Markdown."""
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
    flops = partial(format_flops, unit="FLOP")
    compared: list[tuple[str, float, float, Show]] = [
        ("step", profile.predicted_step_s, profile.step_s, format_seconds),
        ("step under the profiler", profile.predicted_step_s, profile.profiled_s, format_seconds),
        ("MFU", profile.predicted_mfu, profile.mfu, PERCENT),
        ("HFU", profile.predicted_hfu, profile.hfu, PERCENT),
        ("FLOPs of products on a device", profile.predicted_flops, profile.flops, flops),
    ]
    rows = [
        [name, show(predicted), show(measured), f"{measured / predicted:.2f}" if predicted else "-"]
        for name, predicted, measured, show in compared
    ]
    rows[1][1] = None
    hidden = [None if s is None else f"{s:.0%}" for s in (predicted_overlap(profile), profile.times.overlap)]
    rows.append(["communication hidden behind compute", *hidden, None])
    return as_markdown(Table(["", "predicted", "measured", "ratio"], rows))


def predicted_overlap(profile: Profile) -> float | None:
    """Returns the share of predicted communication that is overlapped; None without communication."""
    spent = sum(row.predicted_s or 0.0 for row in profile.comparison.terms if row.name.startswith("collective"))
    return max(0.0, 1 - profile.comparison.predicted.exposed_s / spent) if spent else None


def difference(row: TimeRow) -> str:
    """Returns ``+12.3 ms``."""
    return f"{'-' if row.difference_s < 0 else '+'}{format_seconds(abs(row.difference_s))}"


def _rows(rows: Sequence[TimeRow], what: str) -> str:
    columns: ReportColumns = [what, ("predicted", format_seconds), ("measured", format_seconds), "difference"]
    return as_markdown(Table(columns, [[row.name, row.predicted_s, row.measured_s, difference(row)] for row in rows]))


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
    """Returns ``12 ms more than predicted``."""
    return f"{format_seconds(abs(seconds))} {'less' if seconds < 0 else 'more'} than predicted"


def _where(profile: Profile) -> str:
    mean, predicted = profile.times.mean, profile.comparison.predicted
    rows = [(name, predicted.parts[name], seconds) for name, seconds in mean.parts.items()]
    rows.append(("whole step", predicted.total_s, mean.total_s))
    columns: ReportColumns = ["", ("predicted", format_seconds), ("mean device", format_seconds), ("share", PERCENT)]
    return as_markdown(Table(columns, [[*row, row[-1] / mean.total_s] for row in rows]))


def _classes(profile: Profile) -> str:
    whole, flops = profile.times.mean.total_s, profile.flops
    rows = [
        [
            row.kind,
            row.own_s,
            row.wall_s,
            row.wall_s / whole,
            row.flops / flops if flops else None,
            row.flops / row.own_s if row.flops and row.own_s else None,
            row.hbm_bytes / row.own_s if row.own_s else None,
        ]
        for row in profile.comparison.classes
    ]
    seconds = [("by itself", format_seconds), ("of the wall time", format_seconds)]
    shares = [("share", PERCENT), ("FLOP share", PERCENT)]
    rates = [("FLOP/s", format_flops), ("bytes/s", lambda rate: f"{format_bytes(rate)}/s")]
    text = as_markdown(Table(["kind", *seconds, *shares, *rates], rows))
    return text + "\nOf a mean device. Instructions that run at the same instant share it in the wall time.\n"


COUNT = ("times", "{:g}".format)
OWN = ("by itself", format_seconds)


def _ops(profile: Profile) -> str:
    whole = profile.times.mean.total_s
    rows = [
        [
            *(op.name, op.kind, op.step, op.count, op.own_s, op.wall_s / whole),
            op.flops / op.own_s if op.flops and op.own_s else None,
        ]
        for op in profile.times.ops[:MAX_OPS]
    ]
    columns: ReportColumns = [
        "instruction",
        "kind",
        "derived step",
        COUNT,
        OWN,
        ("share", PERCENT),
        ("FLOP/s", format_flops),
    ]
    shown = f"\nThe longest {len(rows)} of {len(profile.times.ops)} instructions of a mean device.\n"
    return as_markdown(Table(columns, rows)) + shown


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
    missed = f" {len(profile.missed)} of them miss the matrix units." if profile.platform != "cpu" else ""
    head = f"{len(rows)} products take float32 operands, {flops / profile.flops:.0%} of the FLOPs.{missed} "
    columns = {"instruction": "name", "derived step": "step", "operands": "operands", "precision": "precision"}
    shown = Table.of(rows[:MAX_PRODUCTS], columns | {"times": ("count", COUNT[1]), "by itself": ("seconds", OWN[1])})
    return head + _UNITS[profile.platform] + "\n\n" + as_markdown(shown)


def _memory(profile: Profile) -> str:
    memory = profile.memory
    lines = [f"![memory]({MEMORY})\n"] if memory.samples else []
    peak = memory.peak
    if peak:
        whose = (
            "the first device" if memory.counted == "device" else "the process, all emulated devices and the runtime"
        )
        lines.append(f"Peak {format_bytes(peak.num_bytes)} after {format_seconds(peak.at_s)}, of {whose}.\n")
    rows = [
        ("predicted, all items", sum(profile.predicted_memory.values())),
        ("compiler: arguments", memory.arguments_bytes),
        ("compiler: temporaries", memory.temporaries_bytes),
        ("temporaries that live at once, by the schedule", memory.live_bytes),
    ]
    lines.append(as_markdown(Table(["one device", ("bytes", format_bytes)], rows)))
    owners = Table.of(memory.owners, {"array or step": "name", "kind": "kind", "bytes": ("num_bytes", format_bytes)})
    lines.append("Who owns the peak, on one device:\n\n" + as_markdown(owners))
    return "\n".join(lines)
