"""The timeline of a pipeline schedule: a row per device, a box per pass; as a picture and as text."""

from collections.abc import Iterator, Sequence

import msgspec

from meshwright.algebra.schedules.simulation import Simulation
from meshwright.algebra.schedules.table import Schedule, StagePass
from meshwright.core.errors import InputError
from meshwright.report.figure import INK, Spec, headline, si_scale, themed

# The hues of the DeepSeek-V3 report's figure: forward orange, backward green, what is split off from it blue.
COLORS: dict[str, str] = {
    "forward": "#E69F00",
    "backward": "#009E73",
    "input gradients": "#56B4E9",
    "weight gradients": "#0072B2",
}
DARK = ("backward", "weight gradients")
"""Passes whose first chunk carries its number in white."""
IDLE = "#F0F0F0"

MAX_OPS = 20_000
WIDTH_PX = (640, 1700)
OP_PX = 15
"""What the shortest pass is given where there is room."""
DIGIT_PX = 5.6
LEGEND_COLUMNS = 4


class _Box(msgspec.Struct, frozen=True, kw_only=True):
    device: int
    op: StagePass
    what: str
    start_s: float
    end_s: float


def timeline_figure(
    schedule: Schedule,
    simulation: Simulation,
    *,
    unit: str = "s",
    title: str = "",
    subtitle: str = "",
) -> Spec:
    """One row per device over time; a box is one pass, with the number of its microbatch where that fits.

    Later chunks of a device are paler. ``unit`` is "s" or what the times are counted in.
    """
    boxes = list(_boxes(schedule, simulation))
    if len(boxes) > MAX_OPS:
        raise InputError(
            f"{len(boxes):,} passes are too many to draw; at most {MAX_OPS:,} can be told apart. "
            f"Draw the schedule with fewer stages or microbatches."
        )
    scale, shown_unit = si_scale(simulation.makespan_s, "s") if unit == "s" else (1.0, unit)
    shortest = min((box.end_s - box.start_s for box in boxes if box.end_s > box.start_s), default=1.0)
    width = min(max(simulation.makespan_s / shortest * OP_PX, WIDTH_PX[0]), WIDTH_PX[1])
    row_px = 28 if schedule.num_devices <= 16 else 16 if schedule.num_devices <= 40 else 10
    groups = {(box.what, box.op.chunk): None for box in sorted(boxes, key=_legend_key)}
    y = {
        "field": "device",
        "type": "ordinal",
        "title": "device",
        "axis": {"ticks": False, "domain": False, "labelOverlap": True},
    }
    x = {
        "field": "start",
        "type": "quantitative",
        "title": f"time ({shown_unit})",
        "scale": {"domain": [0, simulation.makespan_s / scale], "nice": False},
        "axis": {"grid": False, "tickCount": 10},
    }
    spans = {"y": y, "x": x, "x2": {"field": "end"}}
    mark = {"type": "bar", "height": {"band": 0.88}}
    idle = [
        {"device": device, "start": 0, "end": simulation.makespan_s / scale} for device in range(schedule.num_devices)
    ]
    edge = {"stroke": "white", "strokeWidth": 1.0 if row_px >= 16 else 0.4}
    return themed(
        {
            "title": headline(title, subtitle),
            "width": round(width),
            "height": row_px * schedule.num_devices,
            "layer": [
                {"data": {"values": idle}, "mark": {**mark, "color": IDLE}, "encoding": spans},
                {
                    "data": {"values": [_rectangle(box, schedule, scale) for box in boxes]},
                    "mark": {**mark, **edge},
                    "encoding": {**spans, "color": _color(list(groups), schedule)},
                },
                _numbers(boxes, y, x, scale, width / simulation.makespan_s, row_px, schedule),
            ],
        }
    )


def _boxes(schedule: Schedule, simulation: Simulation) -> Iterator[_Box]:
    split = {(device, op.microbatch, op.chunk) for device, op in _ops(schedule) if op.kind == "W"}
    for device, order in enumerate(schedule.orders):
        times = zip(order, simulation.start_s[device], simulation.end_s[device], strict=True)
        for op, start, end in times:
            if op.kind == "B":
                what = "input gradients" if (device, op.microbatch, op.chunk) in split else "backward"
            else:
                what = "forward" if op.kind == "F" else "weight gradients"
            yield _Box(device=device, op=op, what=what, start_s=start, end_s=end)


def _ops(schedule: Schedule) -> Iterator[tuple[int, StagePass]]:
    for device, order in enumerate(schedule.orders):
        for op in order:
            yield device, op


def _legend_key(box: _Box) -> tuple[int, int]:
    return list(COLORS).index(box.what), box.op.chunk


def _group(what: str, chunk: int, schedule: Schedule) -> str:
    return what if schedule.num_chunks == 1 else f"{what}, chunk {chunk}"


def _rectangle(box: _Box, schedule: Schedule, scale: float) -> Spec:
    return {
        "device": box.device,
        "start": box.start_s / scale,
        "end": box.end_s / scale,
        "what": _group(box.what, box.op.chunk, schedule),
    }


def _color(groups: Sequence[tuple[str, int]], schedule: Schedule) -> Spec:
    """Hue by pass; each further chunk lies closer to white."""
    steps = max(schedule.num_chunks - 1, 1)
    shades = [_paler(COLORS[what], 0.6 * chunk / steps) for what, chunk in groups]
    legend = {"title": None, "orient": "bottom", "columns": LEGEND_COLUMNS, "symbolType": "square"}
    return {
        "field": "what",
        "type": "nominal",
        "scale": {"domain": [_group(what, chunk, schedule) for what, chunk in groups], "range": shades},
        "legend": legend,
    }


def _paler(color: str, share: float) -> str:
    """The colour with a share of white in it."""
    parts = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02X}" for part in parts)


def _numbers(
    boxes: Sequence[_Box], y: Spec, x: Spec, scale: float, px_per_s: float, row_px: int, schedule: Schedule
) -> Spec:
    """The numbers of the microbatches, where a box is wide enough for its own."""
    size = 10 if row_px >= 28 else 8
    rows = []
    for box in boxes:
        text = str(box.op.microbatch)
        if row_px < 14 or (box.end_s - box.start_s) * px_per_s < len(text) * DIGIT_PX * size / 10 + 2:
            continue
        light = box.what in DARK and 2 * box.op.chunk < max(schedule.num_chunks - 1, 1)
        middle = (box.start_s + box.end_s) / 2 / scale
        rows.append({"device": box.device, "start": middle, "text": text, "ink": "white" if light else INK})
    return {
        "data": {"values": rows},
        "mark": {"type": "text", "fontSize": size, "baseline": "middle"},
        "encoding": {
            "y": y,
            "x": x,
            "text": {"field": "text"},
            "color": {"field": "ink", "type": "nominal", "scale": None},
        },
    }


def timeline_text(schedule: Schedule, simulation: Simulation, *, width: int) -> str:
    """The timeline in letters, at most ``width`` wide; empty where the shortest pass would have no column.

    A pass is its letter and microbatch, then dashes to its end; odd chunks have small letters; dots are idle time.
    """
    label = len(str(schedule.num_devices - 1)) + 2
    spans = [end - start for _, start, end in _timed(schedule, simulation) if end > start]
    columns = int((width - label) * min(spans, default=0.0) / simulation.makespan_s)
    if not columns:
        return ""
    per_s = columns / min(spans)
    lines = []
    for device, order in enumerate(schedule.orders):
        row = ["."] * round(simulation.makespan_s * per_s)
        for op, start, end in zip(order, simulation.start_s[device], simulation.end_s[device], strict=True):
            first, last = round(start * per_s), round(end * per_s)
            row[first:last] = _letters(op, last - first)
        lines.append(f"{device:>{label - 2}}  " + "".join(row))
    return "\n".join(lines) + "\n"


def _timed(schedule: Schedule, simulation: Simulation) -> Iterator[tuple[StagePass, float, float]]:
    for order, starts, ends in zip(schedule.orders, simulation.start_s, simulation.end_s, strict=True):
        yield from zip(order, starts, ends, strict=True)


def _letters(op: StagePass, columns: int) -> str:
    letter = op.kind.lower() if op.chunk % 2 else op.kind
    text = f"{letter}{op.microbatch}"
    return (text if len(text) <= columns else letter).ljust(columns, "-")[:columns]
