"""Pictures of a profile: where the time goes, predicted beside measured, memory over time."""

from collections.abc import Sequence

from meshwright.core.errors import InputError
from meshwright.core.units import format_bytes
from meshwright.profile.compare import TimeRow
from meshwright.profile.memory import MemoryProfile
from meshwright.profile.summary import Profile
from meshwright.report.bars import step_breakdown_figure
from meshwright.report.figure import INK, MUTED, PALETTE, Encoding, Figure, Layer, alt, si_scale, themed
from meshwright.report.marks import color_by, labels, plot, without_overlaps

MAX_DEVICES = 8
MAX_ROWS = 14
ROW_PX = 34
WIDTH_PX = 560
MEMORY_PX = {"width": 640, "height": 300}
MAX_SAMPLES = 1500


def where_figure(profile: Profile) -> Figure:
    """Draws bars of the predicted step, of the mean device and, if there are several, of up to `MAX_DEVICES` devices.

    The bars have the parts of `cost.breakdown.Partition`.
    """
    devices = list(profile.times.devices.items())
    bars = {"predicted": profile.comparison.predicted.parts, "mean": profile.times.mean.parts}
    if len(devices) > 1:
        bars |= {f"device {number}": found.parts for number, found in devices[:MAX_DEVICES]}
    shown = f"; {MAX_DEVICES} of {len(devices)} devices shown" if len(devices) > MAX_DEVICES else ""
    subtitle = f"The wall time of a step, predicted and under the profiler{shown}"
    return step_breakdown_figure(bars, title="Where the time of a step goes", subtitle=subtitle)


def parts_figure(rows: Sequence[TimeRow], *, subtitle: str = "") -> Figure:
    """Draws two bars for each of the longest rows, predicted above measured. Raises InputError for no row."""
    chosen = sorted(rows, key=lambda row: -max(row.predicted_s or 0.0, row.measured_s or 0.0))[:MAX_ROWS]
    if not chosen:
        raise InputError("there is nothing to compare. Give a trace with events of the program.")
    longest = max(max(row.predicted_s or 0.0, row.measured_s or 0.0) for row in chosen)
    scale, unit = si_scale(longest, "s")
    bars = [
        {"row": row.name, "what": what, "time": (seconds or 0.0) / scale}
        for row in chosen
        for what, seconds in (("predicted", row.predicted_s), ("measured", row.measured_s))
    ]
    colors = {"predicted": PALETTE[4], "measured": PALETTE[0]}
    y_axis, x_axis = alt.Axis(ticks=False, labelLimit=320), alt.Axis(tickCount=6)
    chart = (
        plot(bars)
        .mark_bar()
        .encode(
            y=alt.Y("row:N", sort=[row.name for row in chosen], title=None, axis=y_axis),
            yOffset=alt.YOffset("what:N", sort=list(colors)),
            x=alt.X("time:Q", title=f"time per step ({unit})", axis=x_axis),
            color=color_by("what", colors, orient="bottom"),
        )
    )
    shown = f"the {MAX_ROWS} longest of {len(rows)} rows shown" if len(rows) > MAX_ROWS else ""
    subtitle = "; ".join(text for text in (subtitle, shown) if text)
    return themed(chart, "Parts of the model", subtitle, width=WIDTH_PX, height=ROW_PX * len(chosen))


def memory_timeline_figure(memory: MemoryProfile) -> Figure:
    """Draws the memory of the first steps over time, with its marks and its peak. The profile must have samples."""
    peak = memory.peak
    assert peak is not None
    scale, unit = si_scale(peak.num_bytes, "B")
    end_s = memory.samples[-1].at_s
    time_scale, time_unit = si_scale(end_s, "s")
    # Fewer than 2 * MAX_SAMPLES, always with the peak.
    stride = max(1, len(memory.samples) // MAX_SAMPLES)
    kept = sorted({*memory.samples[::stride], peak, memory.samples[-1]})
    rows = [{"x": sample.at_s / time_scale, "y": sample.num_bytes / scale} for sample in kept]
    domain = alt.Scale(domain=[0, end_s / time_scale], nice=False)
    x = alt.X("x:Q", title=f"time ({time_unit})", axis=alt.Axis(grid=False), scale=domain)
    y = alt.Y("y:Q", title=f"memory ({unit})", scale=alt.Scale(zero=True))
    top = [{"x": peak.at_s / time_scale, "y": peak.num_bytes / scale, "text": format_bytes(peak.num_bytes)}]
    side = {"align": "right", "dx": -8} if peak.at_s > end_s / 2 else {"align": "left", "dx": 8}
    area = plot(rows).mark_area(color=PALETTE[4], opacity=0.5, line={"color": PALETTE[0]})
    chart = alt.layer(
        area.encode(x=x, y=y),
        *_marks(memory, x, time_scale),
        plot(top).mark_point(filled=True, color=INK).encode(x=x, y=y),
        labels(top, x, y, dy=-10, fill=INK, **side),
    )
    what = "of the first device" if memory.counted == "device" else "resident in the process, the runtime included"
    return themed(chart, "Memory of the first steps", f"Bytes {what}; the peak is marked", **MEMORY_PX)


def _marks(memory: MemoryProfile, x: Encoding, time_scale: float) -> list[Layer]:
    """Returns two layers: a dashed line per mark, and the labels that do not overlap an earlier one."""
    rows = [{"x": mark.at_s / time_scale, "text": mark.text} for mark in memory.marks]
    label_width = memory.samples[-1].at_s / time_scale * 0.02
    named = without_overlaps(rows, lambda row: (row["x"] / label_width, 0.0))
    words = {"angle": 270, "align": "left", "baseline": "top", "dx": 4, "dy": 3, "fontSize": 10, "fill": MUTED}
    return [
        plot(rows).mark_rule(strokeDash=(3, 3), color=MUTED).encode(x=x),
        plot(named).mark_text(**words).encode(x=x, y=alt.YValue("height"), text="text:N"),
    ]
