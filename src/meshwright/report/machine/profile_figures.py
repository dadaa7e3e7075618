"""The pictures of a profile: where the time goes, predicted beside measured, memory over time."""

from collections.abc import Sequence

from meshwright.core.errors import InputError
from meshwright.core.units import format_bytes
from meshwright.profile.compare import TimeRow
from meshwright.profile.memory import MemoryProfile, Sample
from meshwright.profile.summary import Profile
from meshwright.report.bars import step_breakdown_figure
from meshwright.report.figure import INK, MUTED, PALETTE, Spec, headline, si_scale, text_layers, themed

MAX_DEVICES = 8
MAX_ROWS = 14
ROW_PX = 34
WIDTH_PX = 560
MEMORY_PX = (640, 300)
MAX_SAMPLES = 1500


def where_figure(profile: Profile) -> Spec:
    """One bar per device beside the predicted one: compute, memory-bound, exposed communication, overhead, idle."""
    devices = list(profile.times.devices.items())
    bars = {"predicted": profile.comparison.predicted.parts, "mean": profile.times.mean.parts}
    if len(devices) > 1:
        bars |= {f"device {number}": found.parts for number, found in devices[:MAX_DEVICES]}
    shown = f"; {MAX_DEVICES} of {len(devices)} devices shown" if len(devices) > MAX_DEVICES else ""
    subtitle = f"The wall time of a step on each device, under the profiler{shown}"
    return step_breakdown_figure(bars, title="Where the time of a step goes", subtitle=subtitle)


def parts_figure(rows: Sequence[TimeRow], *, title: str, subtitle: str = "") -> Spec:
    """Two bars for each row, predicted above measured, the longest first."""
    chosen = sorted(rows, key=lambda row: -max(row.predicted_s or 0.0, row.measured_s or 0.0))[:MAX_ROWS]
    if not chosen:
        raise InputError("there is nothing to compare. Give a trace with events of the program.")
    longest = max(max(row.predicted_s or 0.0, row.measured_s or 0.0) for row in chosen)
    scale, unit = si_scale(longest, "s")
    values = [
        {"row": row.name, "what": what, "time": (seconds or 0.0) / scale}
        for row in chosen
        for what, seconds in (("predicted", row.predicted_s), ("measured", row.measured_s))
    ]
    names = [row.name for row in chosen]
    encoding: Spec = {
        "y": {
            "field": "row",
            "type": "nominal",
            "sort": names,
            "title": None,
            "axis": {"ticks": False, "labelLimit": 320},
        },
        "yOffset": {"field": "what", "sort": ["predicted", "measured"]},
        "x": {"field": "time", "type": "quantitative", "title": f"time per step ({unit})", "axis": {"tickCount": 6}},
        "color": {
            "field": "what",
            "type": "nominal",
            "scale": {"domain": ["predicted", "measured"], "range": [PALETTE[4], PALETTE[0]]},
            "legend": {"title": None, "orient": "bottom", "symbolType": "square"},
        },
    }
    return themed(
        {
            "title": headline(title, subtitle),
            "width": WIDTH_PX,
            "height": ROW_PX * len(chosen),
            "data": {"values": values},
            "mark": {"type": "bar"},
            "encoding": encoding,
        }
    )


def memory_timeline_figure(memory: MemoryProfile) -> Spec:
    """Bytes over the time of the first steps, with what began when, and the peak."""
    peak = memory.peak
    if peak is None:
        raise InputError("no memory was sampled. Profile steps on this machine, without --trace.")
    scale, unit = si_scale(peak.num_bytes, "B")
    end_s = memory.samples[-1].at_s
    time_scale, time_unit = si_scale(end_s, "s")
    place: Spec = {
        "x": {
            "field": "at",
            "type": "quantitative",
            "title": f"time ({time_unit})",
            "axis": {"grid": False},
            "scale": {"domain": [0, end_s / time_scale], "nice": False},
        },
        "y": {"field": "held", "type": "quantitative", "title": f"memory ({unit})", "scale": {"zero": True}},
    }
    top = [{"at": peak.at_s / time_scale, "held": peak.num_bytes / scale, "text": format_bytes(peak.num_bytes)}]
    side = {"align": "right", "dx": -8} if peak.at_s > end_s / 2 else {"align": "left", "dx": 8}
    what = "of the first device" if memory.counted == "device" else "resident in the process, with the runtime in it"
    area = {"type": "area", "color": PALETTE[4], "opacity": 0.5, "line": {"color": PALETTE[0]}}
    return themed(
        {
            "title": headline("Memory of the first steps", f"Bytes {what}; the peak is marked"),
            "width": MEMORY_PX[0],
            "height": MEMORY_PX[1],
            "layer": [
                {"data": {"values": _sampled(memory, peak, scale, time_scale)}, "mark": area, "encoding": place},
                *_mark_layers(memory, place["x"], time_scale),
                {"data": {"values": top}, "mark": {"type": "point", "filled": True, "color": INK}, "encoding": place},
                *text_layers(top, {**place, "text": {"field": "text"}}, dy=-10, fill=INK, **side),
            ],
        }
    )


def _sampled(memory: MemoryProfile, peak: Sample, scale: float, time_scale: float) -> list[Spec]:
    """At most so many samples as a picture can show, the peak among them."""
    stride = max(1, len(memory.samples) // MAX_SAMPLES)
    samples = {*memory.samples[::stride], peak, memory.samples[-1]}
    return [{"at": sample.at_s / time_scale, "held": sample.num_bytes / scale} for sample in sorted(samples)]


def _mark_layers(memory: MemoryProfile, x: Spec, time_scale: float) -> list[Spec]:
    """Dashed lines where something began; words where they do not lie on each other."""
    marks = [(mark.at_s / time_scale, mark.text) for mark in memory.marks]
    if not marks:
        return []
    apart = memory.samples[-1].at_s / time_scale * 0.02
    named: list[Spec] = []
    for at, text in marks:
        if not named or at - named[-1]["at"] > apart:
            named.append({"at": at, "text": text})
    rule = {"type": "rule", "strokeDash": [3, 3], "color": MUTED}
    words = {"type": "text", "angle": 270, "align": "left", "baseline": "top", "dx": 4, "dy": 3, "fontSize": 10}
    bottom = {"x": x, "y": {"value": MEMORY_PX[1]}, "text": {"field": "text"}}
    return [
        {"data": {"values": [{"at": at} for at, _ in marks]}, "mark": rule, "encoding": {"x": x}},
        {"data": {"values": named}, "mark": {**words, "fill": MUTED}, "encoding": bottom},
    ]
