"""Writes the folder of `meshwright profile`: a page of Markdown, its pictures and the timeline."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from meshwright.core.errors import InputError
from meshwright.core.files import write_text_whole
from meshwright.core.units import counted, format_bytes, format_flops, format_rate, format_seconds
from meshwright.profile.compare import TimeRow
from meshwright.profile.memory import MemoryProfile
from meshwright.profile.summary import Profile
from meshwright.report.answer import Heading, Show, Table, TableColumns, as_markdown, utilisation_rows
from meshwright.report.bars import step_breakdown_figure
from meshwright.report.figure import INK, MUTED, PALETTE, Figure, alt, save, si_scale, themed
from meshwright.report.labels import Frame, point_labels, reference
from meshwright.report.machine.profile_trace import save_trace
from meshwright.report.marks import ReferenceLine, color_by, plot

REPORT, TIMELINE = "profile.md", "trace.json.gz"
WHERE, PARTS, MEMORY = "where.png", "parts.png", "memory-timeline.png"
MAX_STEPS = 40
MAX_OPS = 30
MAX_PRODUCTS = 12
PERCENT = "{:.1%}".format

MAX_DEVICES = 8
MAX_ROWS = 14
ROW_PX = 34
WIDTH_PX = 560
MEMORY_PX = {"width": 640, "height": 300}
MAX_SAMPLES = 1500


def write_report(profile: Profile, folder: Path) -> list[Path]:
    """Writes all files of the report and returns their paths, the page first."""
    folder.mkdir(parents=True, exist_ok=True)
    subtitle = f"{profile.plan.model.name} on {profile.plan.cluster.short_name}; {profile.plan.calibration.describe()}"
    written_paths = [save(where_figure(profile), folder / WHERE)]
    written_paths.append(save(parts_figure(profile.comparison.parts, subtitle=subtitle), folder / PARTS))
    if profile.memory.samples:
        written_paths.append(save(memory_timeline_figure(profile.memory), folder / MEMORY))
    written_paths.append(save_trace(profile, folder / TIMELINE))
    write_text_whole(folder / REPORT, report_text(profile))
    return [folder / REPORT, *written_paths]


def report_text(profile: Profile) -> str:
    """Returns the page as Markdown."""
    plan, comparison = profile.plan, profile.comparison
    num_left = len(comparison.steps) - MAX_STEPS
    rest_text = f"\n{counted(num_left, 'further step')} differ by less.\n" if num_left > 0 else ""
    text_by_title = {
        "Furthest from the prediction": _terms(profile),
        "Where the wall time of a step goes": f"![where]({WHERE})\n\n{_where(profile)}\n{WHERE_WORDS}",
        "Parts of the model": f"![parts]({PARTS})\n\n{as_markdown(times_table(comparison.parts, 'part'))}",
        "Kinds of work": _classes(profile),
        "Derived steps": as_markdown(times_table(comparison.steps[:MAX_STEPS], "step")) + rest_text,
        "Instructions": _ops(profile),
        "Float32 products": _float32(profile),
        "Memory": _memory(profile),
    }
    texts = [
        f"# Profile of {plan.model.name} on {plan.cluster.short_name}\n",
        _summary(profile),
        "\n".join(f"- {note}" for note in profile.notes) + "\n",
        *(f"## {title}\n\n{text}" for title, text in text_by_title.items()),
        f"The timeline is in `{TIMELINE}`: Perfetto opens it, with the predicted step above the measured devices.\n",
    ]
    return "\n".join(texts)


WHERE_WORDS = """\
Compute: an instruction runs whose FLOPs at the chip's rate take longer than its bytes. Memory-bound: no such
instruction runs, but one whose bytes take longer. Exposed communication: only collectives run. Overhead: nothing runs
before the first or after the last instruction of the step, or for at most 50 us between two. Idle: nothing runs for
longer.
"""


def headline_rows(profile: Profile) -> list[tuple[str, float | None, float | None, Show]]:
    """Returns the rows of `Table.compared` for the step, its utilisation, and the traced step that the parts sum to."""
    return [
        ("step", profile.predicted_step_s, profile.step_s, format_seconds),
        *utilisation_rows(profile.priced.estimate, profile),
        ("step under the profiler", profile.predicted_step_s, profile.profiled_s, format_seconds),
    ]


def _summary(profile: Profile) -> str:
    # the share of communication that is overlapped; None without communication
    predicted_step, terms = profile.comparison.predicted, profile.comparison.terms
    comms_s = sum(row.predicted_s or 0.0 for row in terms if row.name.startswith("collective"))
    overlap_shares = max(0.0, 1 - predicted_step.exposed_s / comms_s) if comms_s else None, profile.times.overlap
    rows: list[tuple[str, float | None, float | None, Show]] = [
        *headline_rows(profile),
        ("FLOPs of products on a device", profile.predicted_flops, profile.flops, partial(format_flops, unit="FLOP")),
        ("communication overlapped", *overlap_shares, "{:.0%}".format),
    ]
    return as_markdown(Table.compared(rows))


def times_table(rows: Sequence[TimeRow], what: str, first: int | None = None) -> Table:
    """Returns a table of predicted and measured seconds and their difference; ``what`` heads the names."""
    return Table.of(
        rows,
        {
            # A narrow table breaks a label at spaces.
            what: ("name", lambda name: name if " " in name else name.replace(":", " ")),
            "predicted": "predicted_s",
            "measured": "measured_s",
            "difference": ("difference_s", lambda s: f"{'-' if s < 0 else '+'}{format_seconds(abs(s))}"),
        },
        first=first,
    )


def _terms(profile: Profile) -> str:
    hint_lines = [f"- **{hint.term}** ({difference_words(hint.difference_s)}): {hint.text}." for hint in profile.advice]
    no_hint_text = "Nothing is further from its prediction than 2% of the step."
    table = as_markdown(times_table(profile.comparison.terms, "kind of work"))
    return table + "\n" + ("\n".join(hint_lines) or no_hint_text) + "\n"


def difference_words(seconds: float) -> str:
    """Returns ``12 ms more than predicted``."""
    return f"{format_seconds(abs(seconds))} {'less' if seconds < 0 else 'more'} than predicted"


def _where(profile: Profile) -> str:
    mean_step, predicted_step = profile.times.mean, profile.comparison.predicted
    rows = [(name, predicted_step.parts[name], mean_s) for name, mean_s in mean_step.parts.items()]
    rows.append(("whole step", predicted_step.total_s, mean_step.total_s))
    seconds_headings = [Heading(title, format_seconds) for title in ("predicted", "mean device")]
    columns: list[str | Heading] = ["", *seconds_headings, Heading("share", PERCENT)]
    return as_markdown(Table(columns, [[*row, row[-1] / mean_step.total_s] for row in rows]))


RATES: TableColumns = {
    "FLOP/s": (lambda row: _rate(row.flops, row.own_s), format_flops),
    "bytes/s": (lambda row: _rate(row.hbm_bytes, row.own_s), format_rate),
}
COUNT = ("count", "{:g}".format)


def _rate(amount: float, seconds: float) -> float | None:
    return amount / seconds if amount and seconds else None


def _classes(profile: Profile) -> str:
    step_s, step_flops = profile.times.mean.total_s, profile.flops
    columns: TableColumns = {
        "kind": "kind",
        "by itself": "own_s",
        "of the wall time": "wall_s",
        "share": (lambda row: row.wall_s / step_s, PERCENT),
        "FLOP share": (lambda row: row.flops / step_flops if step_flops else None, PERCENT),
        **RATES,
    }
    table_md = as_markdown(Table.of(profile.comparison.classes, columns))
    return table_md + "\nFigures are means over devices. Instructions that run at the same time share the wall time.\n"


def _ops(profile: Profile) -> str:
    step_s, shown_ops = profile.times.mean.total_s, profile.times.ops[:MAX_OPS]
    columns: TableColumns = {
        "instruction": "name",
        "kind": "kind",
        "derived step": "step",
        "times": COUNT,
        "by itself": "own_s",
        "share": (lambda op: op.wall_s / step_s, PERCENT),
        "FLOP/s": RATES["FLOP/s"],
    }
    count_text = f"\nThe longest {len(shown_ops)} of {len(profile.times.ops)} instructions of a mean device.\n"
    return as_markdown(Table.of(shown_ops, columns)) + count_text


_UNITS = {
    "cpu": "A CPU has no matrix units that need narrower operands: the products are only listed.",
    "gpu": "A GPU takes float32 operands as TF32 by default, at half of the rate of bfloat16 or less; a state of bf16 "
    "operands (strategy.state=bf16-adam) reaches the whole rate.",
    "tpu": "A TPU rounds float32 operands to bfloat16 unless more precision is set: products with precision high or "
    "highest multiply three or six times and do not reach the rate of the matrix unit.",
}


def _float32(profile: Profile) -> str:
    rows = profile.comparison.float32
    if not rows:
        return "None: no product of the program takes float32 operands.\n"
    missed_text = f" {len(profile.missed)} of them miss the matrix units." if profile.platform != "cpu" else ""
    share_text = f"{sum(row.flops for row in rows) / profile.flops:.0%} of the FLOPs"
    head_text = f"{counted(len(rows), 'product')} of float32 operands, {share_text}.{missed_text} "
    columns: TableColumns = {"instruction": "name", "derived step": "step", "operands": "operands"}
    columns = {**columns, "precision": "precision", "times": COUNT, "by itself": ("seconds", format_seconds)}
    return f"{head_text}{_UNITS[profile.platform]}\n\n{as_markdown(Table.of(rows[:MAX_PRODUCTS], columns))}"


def _memory(profile: Profile) -> str:
    memory, peak = profile.memory, profile.memory.peak
    lines = [f"![memory]({MEMORY})\n"] if memory.samples else []
    if peak:
        owner_text = {"device": "the first device"}.get(
            memory.counted, "the process: all emulated devices and the runtime"
        )
        lines.append(f"Peak {format_bytes(peak.num_bytes)} after {format_seconds(peak.at_s)}, of {owner_text}.\n")
    rows = [
        ("predicted, all items", sum(profile.predicted_memory.values())),
        ("compiler: arguments", memory.arguments_bytes),
        ("compiler: temporaries", memory.temporaries_bytes),
        ("temporaries that live at once, by the schedule", memory.live_bytes),
    ]
    lines.append(as_markdown(Table(["one device", Heading("bytes", format_bytes)], rows)))
    owner_table = Table.of(memory.owners, {"array or step": "name", "kind": "kind", "bytes": "num_bytes"})
    lines.append("Who owns the peak, on one device:\n\n" + as_markdown(owner_table))
    return "\n".join(lines)


# -- pictures ---------------------------------------------------------------------------------------------


def where_figure(profile: Profile) -> Figure:
    """Draws bars of the predicted step, of the mean device and, if there are several, of up to `MAX_DEVICES` devices.

    The bars have the parts of `cost.breakdown.Partition`.
    """
    device_items = list(profile.times.devices.items())
    parts_by_bar = {"predicted": profile.comparison.predicted.parts, "mean": profile.times.mean.parts}
    if len(device_items) > 1:
        parts_by_bar |= {f"device {device_index}": times.parts for device_index, times in device_items[:MAX_DEVICES]}
    shown_text = f"; {MAX_DEVICES} of {len(device_items)} devices shown" if len(device_items) > MAX_DEVICES else ""
    subtitle = f"The wall time of a step, predicted and under the profiler{shown_text}"
    return step_breakdown_figure(parts_by_bar, title="Where the time of a step goes", subtitle=subtitle)


def parts_figure(rows: Sequence[TimeRow], *, subtitle: str = "") -> Figure:
    """Draws two bars for each of the longest rows, predicted above measured. Raises InputError for no row."""
    longest_rows = sorted(rows, key=lambda row: -max(row.predicted_s or 0.0, row.measured_s or 0.0))[:MAX_ROWS]
    if not longest_rows:
        raise InputError("there is nothing to compare. Give a trace with events of the program.")
    longest_s = max(max(row.predicted_s or 0.0, row.measured_s or 0.0) for row in longest_rows)
    scale, unit = si_scale(longest_s, "s")
    bar_rows = [
        {"row": row.name, "what": what, "time": (seconds or 0.0) / scale}
        for row in longest_rows
        for what, seconds in (("predicted", row.predicted_s), ("measured", row.measured_s))
    ]
    color_by_what = {"predicted": PALETTE[4], "measured": PALETTE[0]}
    y_axis, x_axis = alt.Axis(ticks=False, labelLimit=320), alt.Axis(tickCount=6)
    chart = (
        plot(bar_rows)
        .mark_bar()
        .encode(
            y=alt.Y("row:N", sort=[row.name for row in longest_rows], title=None, axis=y_axis),
            yOffset=alt.YOffset("what:N", sort=list(color_by_what)),
            x=alt.X("time:Q", title=f"time per step ({unit})", axis=x_axis),
            color=color_by("what", color_by_what, orient="bottom"),
        )
    )
    shown_text = f"the {MAX_ROWS} longest of {len(rows)} rows shown" if len(rows) > MAX_ROWS else ""
    subtitle = "; ".join(text for text in (subtitle, shown_text) if text)
    return themed(chart, "Parts of the model", subtitle, width=WIDTH_PX, height=ROW_PX * len(longest_rows))


def memory_timeline_figure(memory: MemoryProfile) -> Figure:
    """Draws the memory of the first steps over time, with its marks and its peak. The profile must have samples."""
    peak = memory.peak
    assert peak is not None
    byte_scale, byte_unit = si_scale(peak.num_bytes, "B")
    end_s = memory.samples[-1].at_s
    time_scale, time_unit = si_scale(end_s, "s")
    # Fewer than 2 * MAX_SAMPLES, always with the peak.
    stride = max(1, len(memory.samples) // MAX_SAMPLES)
    samples = sorted({*memory.samples[::stride], peak, memory.samples[-1]})
    rows = [{"x": sample.at_s / time_scale, "y": sample.num_bytes / byte_scale} for sample in samples]
    x_span, y_span = (0.0, end_s / time_scale), (0.0, 1.15 * peak.num_bytes / byte_scale)
    frame = Frame(x=x_span, y=y_span, size=(MEMORY_PX["width"], MEMORY_PX["height"]), log=(False, False))
    x = alt.X("x:Q", title=f"time ({time_unit})", axis=alt.Axis(grid=False), scale=alt.Scale(domain=x_span, nice=False))
    y = alt.Y("y:Q", title=f"memory ({byte_unit})", scale=alt.Scale(domain=y_span, nice=False))
    peak_point = peak.at_s / time_scale, peak.num_bytes / byte_scale
    peak_row = {"x": peak_point[0], "y": peak_point[1], "text": format_bytes(peak.num_bytes)}
    areas = frame.dots([peak_point]) + frame.curve([(row["x"], row["y"]) for row in rows[:: 1 + len(rows) // 100]])
    area_mark = plot(rows).mark_area(color=PALETTE[4], opacity=0.5, line={"color": PALETTE[0]})
    mark_lines = [ReferenceLine(axis="x", value=m.at_s / time_scale, text=m.text, color=MUTED) for m in memory.marks]
    chart = alt.layer(
        area_mark.encode(x=x, y=y),
        *(reference(line, frame, areas, font=10) for line in mark_lines),
        plot([peak_row]).mark_point(filled=True, color=INK).encode(x=x, y=y),
        point_labels([peak_row], frame, areas, fill=INK),
    )
    owner = "of the first device" if memory.counted == "device" else "resident in the process, the runtime included"
    return themed(chart, "Memory of the first steps", f"Bytes {owner}; the peak is marked", **MEMORY_PX)
