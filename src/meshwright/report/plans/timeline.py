"""Draws and prints the timeline of a pipeline schedule: a row per device, a box per pass."""

from collections.abc import Iterator

from meshwright.algebra.schedules.simulation import Simulation
from meshwright.algebra.schedules.table import Schedule, StagePass
from meshwright.core.errors import InputError
from meshwright.report.figure import Figure, alt, si_scale, themed
from meshwright.report.marks import color_by, plot, span, spans

# The hues of the figure in the DeepSeek-V3 report: forward orange, backward green, split backward passes blue.
COLORS: dict[str, str] = {
    "forward": "#E69F00",
    "backward": "#009E73",
    "input gradients": "#56B4E9",
    "weight gradients": "#0072B2",
}
IDLE = "#F0F0F0"

MAX_OPS = 20_000
WIDTH_PX = (640, 1700)
OP_PX = 15
"""Width of the shortest pass if the picture has room."""
LEAST_ROW_WITH_NUMBERS_PX = 14


def timeline_figure(
    schedule: Schedule, simulation: Simulation, *, unit: str = "s", title: str = "", subtitle: str = ""
) -> Figure:
    """Draws one row per device over time; a box is one pass, with the number of its microbatch if that fits.

    Later chunks of a device are paler. ``unit`` is that of the simulation's times, "s" if they are seconds.
    """
    passes = list(_timed(schedule, simulation))
    if len(passes) > MAX_OPS:
        raise InputError(
            f"{len(passes):,} passes are too many to draw; a picture shows at most {MAX_OPS:,}. "
            f"Draw the schedule with fewer stages or microbatches."
        )
    scale, shown_unit = si_scale(simulation.makespan_s, "s") if unit == "s" else (1.0, unit)
    shortest = min((end - start for _, _, start, end in passes if end > start), default=1.0)
    width = min(max(simulation.makespan_s / shortest * OP_PX, WIDTH_PX[0]), WIDTH_PX[1])
    row_px = 28 if schedule.num_devices <= 16 else 16 if schedule.num_devices <= 40 else 10
    font = 10 if row_px >= 28 else 8
    split = {(device, op.microbatch, op.chunk) for device, op, _, _ in passes if op.kind == "W"}
    rows, colors = [], {}
    for device, op, start, end in passes:
        what = {"F": "forward", "B": "backward", "W": "weight gradients"}[op.kind]
        if op.kind == "B" and (device, op.microbatch, op.chunk) in split:
            what = "input gradients"
        group = what if schedule.num_chunks == 1 else f"{what}, chunk {op.chunk}"
        white, hue = 0.6 * op.chunk / max(schedule.num_chunks - 1, 1), COLORS[what]
        parts = (int(hue[at : at + 2], 16) for at in (1, 3, 5))
        color = "#" + "".join(f"{round(part + (255 - part) * white):02X}" for part in parts)
        colors[list(COLORS).index(what), op.chunk] = group, color
        text = str(op.microbatch) if row_px >= LEAST_ROW_WITH_NUMBERS_PX else ""
        px = width * scale / simulation.makespan_s
        rows.append(span(start / scale, end / scale, text, color, px, font=font, device=device, what=group))
    end = simulation.makespan_s / scale
    y = alt.Y("device:O", title="device", axis=alt.Axis(ticks=False, domain=False, labelOverlap=True))
    axis = alt.Axis(grid=False, tickCount=10)
    x = alt.X("start:Q", title=f"time ({shown_unit})", scale=alt.Scale(domain=[0, end], nice=False), axis=axis)
    idle = plot({"device": device, "start": 0, "end": end} for device in range(schedule.num_devices))
    legend = dict(colors[key] for key in sorted(colors))
    color = color_by("what", legend, orient="bottom", columns=4)
    edge = 1.0 if row_px >= 16 else 0.4
    chart = alt.layer(
        idle.mark_bar(height=alt.RelativeBandSize(band=0.88), color=IDLE).encode(y=y, x=x, x2="end"),
        spans(rows, y=y, x=x, color=color, band=0.88, edge=edge, font=font),
    )
    return themed(chart, title, subtitle, width=round(width), height=row_px * schedule.num_devices)


def _timed(schedule: Schedule, simulation: Simulation) -> Iterator[tuple[int, StagePass, float, float]]:
    """Yields (device, pass, start, end) of every pass."""
    for device, times in enumerate(zip(schedule.orders, simulation.start_s, simulation.end_s, strict=True)):
        for op, start, end in zip(*times, strict=True):
            yield device, op, start, end


def timeline_text(schedule: Schedule, simulation: Simulation, *, width: int) -> str:
    """Returns the timeline as text of at most ``width`` columns; empty if the shortest pass would have no column.

    A pass is its letter and microbatch, then dashes to its end; odd chunks have lower-case letters; dots are idle.
    """
    label = len(str(schedule.num_devices - 1)) + 2
    shortest = min((end - start for _, _, start, end in _timed(schedule, simulation) if end > start), default=0.0)
    columns = int((width - label) * shortest / simulation.makespan_s)
    if not columns:
        return ""
    per_s = columns / shortest
    lines = [["."] * round(simulation.makespan_s * per_s) for _ in schedule.orders]
    for device, op, start, end in _timed(schedule, simulation):
        first, last = round(start * per_s), round(end * per_s)
        letter = op.kind.lower() if op.chunk % 2 else op.kind
        text = f"{letter}{op.microbatch}"
        if len(text) > last - first:
            text = letter
        lines[device][first:last] = text.ljust(last - first, "-")[: last - first]
    return "".join(f"{device:>{label - 2}}  {''.join(line)}\n" for device, line in enumerate(lines))
