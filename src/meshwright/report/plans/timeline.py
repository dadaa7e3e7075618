"""Timelines: of a pipeline schedule, also as text; of compute and links; of the slots of engines."""

from collections.abc import Iterator, Mapping, Sequence

from meshwright.algebra.schedules.simulation import Simulation
from meshwright.algebra.schedules.table import Schedule, StagePass
from meshwright.batching.spans import SlotSpan
from meshwright.core.errors import InputError
from meshwright.core.units import format_seconds
from meshwright.cost.lanes import LaneSlices
from meshwright.report.figure import INK, Figure, alt, si_scale, themed
from meshwright.report.marks import color_by, labels, plot, span, spans

# The hues of the figure in the DeepSeek-V3 report: forward orange, backward green, split backward passes blue.
COLORS: dict[str, str] = {
    "forward": "#E69F00",
    "backward": "#009E73",
    "input gradients": "#56B4E9",
    "weight gradients": "#0072B2",
}
IDLE = "#F0F0F0"

MAX_OPS = 20_000
WIDTH_PX = 900
"""Width of the pictures but that of a schedule, which has one of `SCHEDULE_PX`."""
SCHEDULE_PX = (640, 1700)
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
    shortest_s = min((end_s - start_s for _, _, start_s, end_s in passes if end_s > start_s), default=1.0)
    width = min(max(simulation.makespan_s / shortest_s * OP_PX, SCHEDULE_PX[0]), SCHEDULE_PX[1])
    row_px = 28 if schedule.num_devices <= 16 else 16 if schedule.num_devices <= 40 else 10
    font = 10 if row_px >= 28 else 8
    split_keys = {(device, op.microbatch, op.chunk) for device, op, _, _ in passes if op.kind == "W"}
    box_rows, legend_by_key = [], {}
    for device, op, start_s, end in passes:
        pass_name = {"F": "forward", "B": "backward", "W": "weight gradients"}[op.kind]
        if op.kind == "B" and (device, op.microbatch, op.chunk) in split_keys:
            pass_name = "input gradients"
        label = pass_name if schedule.num_chunks == 1 else f"{pass_name}, chunk {op.chunk}"
        white_share, hex_color = 0.6 * op.chunk / max(schedule.num_chunks - 1, 1), COLORS[pass_name]
        channels = (int(hex_color[digit : digit + 2], 16) for digit in (1, 3, 5))
        color = "#" + "".join(f"{round(channel + (255 - channel) * white_share):02X}" for channel in channels)
        legend_by_key[list(COLORS).index(pass_name), op.chunk] = label, color
        text = str(op.microbatch) if row_px >= LEAST_ROW_WITH_NUMBERS_PX else ""
        px = width * scale / simulation.makespan_s
        box_rows.append(span(start_s / scale, end / scale, text, color, px, font=font, device=device, what=label))
    end = simulation.makespan_s / scale
    y = alt.Y("device:O", title="device", axis=alt.Axis(ticks=False, domain=False, labelOverlap=True))
    axis = alt.Axis(grid=False, tickCount=10)
    x = alt.X("start:Q", title=f"time ({shown_unit})", scale=alt.Scale(domain=[0, end], nice=False), axis=axis)
    idle_bars = plot({"device": device, "start": 0, "end": end} for device in range(schedule.num_devices))
    color_by_group = dict(legend_by_key[key] for key in sorted(legend_by_key))
    color = color_by("what", color_by_group, orient="bottom", columns=4)
    edge_px = 1.0 if row_px >= 16 else 0.4
    chart = alt.layer(
        idle_bars.mark_bar(height=alt.RelativeBandSize(band=0.88), color=IDLE).encode(y=y, x=x, x2="end"),
        spans(box_rows, y=y, x=x, color=color, band=0.88, edge=edge_px, font=font),
    )
    return themed(chart, title, subtitle, width=round(width), height=row_px * schedule.num_devices)


def _timed(schedule: Schedule, simulation: Simulation) -> Iterator[tuple[int, StagePass, float, float]]:
    """Yields (device, pass, start, end) of every pass."""
    for device, device_times in enumerate(zip(schedule.orders, simulation.start_s, simulation.end_s, strict=True)):
        for op, start_s, end_s in zip(*device_times, strict=True):
            yield device, op, start_s, end_s


def timeline_text(schedule: Schedule, simulation: Simulation, *, width: int) -> str:
    """Returns the timeline as text of at most ``width`` columns; empty if the shortest pass would have no column.

    A pass is its letter and microbatch, then dashes to its end; odd chunks have lower-case letters; dots are idle.
    """
    label_width = len(str(schedule.num_devices - 1)) + 2
    shortest_s = min((end - start for _, _, start, end in _timed(schedule, simulation) if end > start), default=0.0)
    num_columns = int((width - label_width) * shortest_s / simulation.makespan_s)
    if not num_columns:
        return ""
    columns_per_s = num_columns / shortest_s
    cell_lines = [["."] * round(simulation.makespan_s * columns_per_s) for _ in schedule.orders]
    for device, op, start, end in _timed(schedule, simulation):
        first_col, last_col = round(start * columns_per_s), round(end * columns_per_s)
        letter = op.kind.lower() if op.chunk % 2 else op.kind
        text = f"{letter}{op.microbatch}"
        if len(text) > last_col - first_col:
            text = letter
        cell_lines[device][first_col:last_col] = text.ljust(last_col - first_col, "-")[: last_col - first_col]
    return "".join(f"{device:>{label_width - 2}}  {''.join(line)}\n" for device, line in enumerate(cell_lines))


# -- compute and links ------------------------------------------------------------------------------------

LANE_PX = 26

# Work in the hues of the pipeline's timeline, links in Tol's muted reds and blues.
STREAM_COLORS: dict[str, str] = {
    "forward": "#E69F00",
    "backward": "#009E73",
    "recompute": "#F0E442",
    "optimizer": "#8C7AC0",
    "all-gather": "#56B4E9",
    "reduce-scatter": "#0072B2",
    "all-reduce": "#D55E00",
    "all-to-all": "#CC79A7",
    "permute": "#999999",
}
SHORT = {"forward": "F", "backward": "B", "recompute": "R"}


def two_streams_figure(pairs: Sequence[LaneSlices], *, title: str, subtitle: str = "") -> Figure:
    """Draws a pair of lanes per data-parallel variant on one time axis, with the total time at the end of each pair."""
    longest_s = max(pair.total_s for pair in pairs)
    scale, unit = si_scale(longest_s, "s")
    rows, lane_texts, totals = [], [], []
    for index, pair in enumerate(pairs):
        for box in pair.slices:
            # Only passes are labelled: with their letter and layer.
            text = f"{SHORT[box.what]}{box.layer + 1}" if box.what in SHORT else ""
            start, end, px = box.start_s / scale, box.end_s / scale, WIDTH_PX * scale / longest_s
            rows.append(span(start, end, text, STREAM_COLORS[box.what], px, lane=f"{index} {box.lane}", what=box.what))
        lane_texts += [{"lane": f"{index} compute", "text": f"{pair.name}: compute"}]
        lane_texts += [{"lane": f"{index} links", "text": "links"}]
        totals.append({"lane": f"{index} compute", "end": pair.total_s / scale, "text": format_seconds(pair.total_s)})
    slice_kinds = {row["what"] for row in rows}
    shown_colors = {what: color for what, color in STREAM_COLORS.items() if what in slice_kinds}
    # An empty band separates the pairs.
    lanes = [f"{index} {lane}" for index in range(len(pairs)) for lane in ("compute", "links", "gap")][:-1]
    y = alt.Y("lane:N", sort=lanes, scale=alt.Scale(domain=lanes), axis=None)
    x_scale = alt.Scale(domain=[0, longest_s / scale * 1.08], nice=False)
    x = alt.X("start:Q", title=f"time ({unit})", scale=x_scale, axis=alt.Axis(tickCount=10))
    color = color_by("what", shown_colors, orient="bottom", columns=len(shown_colors))
    lane_names = plot(lane_texts).mark_text(align="right", baseline="middle", dx=-8, fontSize=12, fill=INK)
    chart = alt.layer(
        spans(rows, y=y, x=x, color=color, band=0.9, edge=0.3),
        lane_names.encode(y=y, x=alt.XValue(0), text="text:N"),
        labels(totals, "end:Q", y, align="left", baseline="middle", dx=6, fill=INK, fontWeight="bold"),
    )
    return themed(chart, title, subtitle, width=WIDTH_PX, height=alt.Step(LANE_PX))


# -- slots ------------------------------------------------------------------------------------------------

SLOT_COLORS = {"prefill": "#E69F00", "decode": "#009E73", "ended, held": "#999999"}
MAX_SPANS, MAX_SLOTS = 5_000, 128


def slots_figure(pools: Mapping[str, Sequence[SlotSpan]], *, title: str, subtitle: str = "") -> Figure:
    """Draws each pool's spans under its name, a row for every slot that is ever held, the request's number in each box
    that has room for it.

    Grey boxes are held by requests that have all their tokens; in pale ones a slot is free. Raises InputError if there
    are too many boxes to be seen.
    """
    pairs = [(name, slot_span) for name, slot_spans in pools.items() for slot_span in slot_spans]
    slots = {(name, slot_span.replica, slot_span.slot) for name, slot_span in pairs}
    if not 0 < len(pairs) <= MAX_SPANS or len(slots) > MAX_SLOTS:
        raise InputError(
            f"{len(pairs):,} spans in {len(slots):,} slots; a picture shows 1 to {MAX_SPANS:,} in at most {MAX_SLOTS} "
            f"slots. Simulate fewer seconds, a lower --rate, or smaller engines and batches."
        )
    scale, unit = si_scale(max(slot_span.end_s for _, slot_span in pairs), "s")
    end_x = max(slot_span.end_s for _, slot_span in pairs) / scale
    slot_keys = [key for name in pools for key in sorted(slots) if key[0] == name]
    numbered = {name for name, replica, _ in slots if replica}
    name_by_key = {key: f"{key[0]}{f' {key[1] + 1}' * (key[0] in numbered)}, slot {key[2] + 1}" for key in slot_keys}
    row_px = 22 if len(slot_keys) <= 24 else 12 if len(slot_keys) <= 64 else 7
    boxes = []
    for name, slot_span in pairs:
        state = "ended, held" if slot_span.phase == "ended" else slot_span.phase
        bounds_x = (slot_span.start_s / scale, slot_span.end_s / scale)
        row_name = name_by_key[name, slot_span.replica, slot_span.slot]
        text = str(slot_span.request + 1) if row_px > 7 else ""
        boxes.append(span(*bounds_x, text, SLOT_COLORS[state], WIDTH_PX / end_x, slot=row_name, what=state))
    row_names = [name_by_key[key] for key in slot_keys]
    y = alt.Y("slot:O", sort=row_names, title=None, axis=alt.Axis(ticks=False, domain=False, labelOverlap=True))
    x = alt.X("start:Q", title=f"time ({unit})", scale=alt.Scale(domain=[0, end_x], nice=False))
    free_bars = plot({"slot": name, "start": 0, "end": end_x} for name in row_names)
    shown_colors = {name: color for name, color in SLOT_COLORS.items() if any(box["what"] == name for box in boxes)}
    color = color_by("what", shown_colors, orient="bottom")
    chart = alt.layer(
        free_bars.mark_bar(height=alt.RelativeBandSize(band=0.88), color=IDLE).encode(y=y, x=x, x2="end"),
        spans(boxes, y=y, x=x, color=color, band=0.88, edge=0.6 if row_px > 12 else 0.1, font=10),
    )
    return themed(chart, title, subtitle, width=WIDTH_PX, height=row_px * len(slot_keys))
