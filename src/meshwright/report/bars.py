"""Stacked bars of the time of a step and of a device's memory."""

from collections.abc import Mapping
from itertools import accumulate
from typing import Literal

from meshwright.core.units import format_bytes, format_seconds
from meshwright.report.figure import INK, Figure, Layer, alt, si_scale, themed
from meshwright.report.labels import text_px
from meshwright.report.marks import DASHES, color_by, labels, palette_of, plot, span, spans

Bars = Mapping[str, Mapping[str, float]]
"""Bar -> part -> amount: bars from top to bottom, parts from left to right."""

WIDTH_PX = 600
BAR_PX = 46


def step_breakdown_figure(step_s: Bars, *, title: str = "Where a step goes", subtitle: str = "") -> Figure:
    """Draws a bar per estimate or measurement: ``{"predicted": {"compute": 0.2}, "measured": {"step": 0.25}}``.

    Amounts are seconds; the total is written at the end of a bar.
    """
    return themed(_stacked(step_s, "time per step", "s"), title, subtitle)


def memory_figure(
    memory_bytes: Bars, *, limit_bytes: float | None = None, title: str = "Memory per device", subtitle: str = ""
) -> Figure:
    """Draws a bar per estimate or measurement of a device's memory in bytes, and the limit as a dashed line."""
    return themed(_stacked(memory_bytes, "memory", "B", limit_bytes), title, subtitle)


def breakdown_figure(
    parts_s: Mapping[str, float], links_s: Mapping[str, float], *, title: str, subtitle: str = ""
) -> Figure:
    """Draws two bars on one axis: the parts of the step, and the collectives without overlap, by mesh axes.

    Communication in the second bar that is not exposed in the first is overlapped. All amounts are seconds.
    """
    bars = {"step": parts_s, "links alone": links_s} if any(links_s.values()) else {"step": parts_s}
    return themed(_stacked(bars, "time", "s"), title, subtitle)


def _stacked(
    bars: Bars,
    axis_title: str,
    unit: Literal["s", "B"],
    limit: float | None = None,
) -> Layer:
    """Draws bars of labelled parts with their totals at the ends; one that would cross the limit is right of it."""
    totals = {name: sum(parts.values()) for name, parts in bars.items()}
    max_amount = max([*totals.values(), limit or 0.0])
    scale, unit_name = si_scale(max_amount, unit)
    to_text = format_seconds if unit == "s" else format_bytes
    # Parts that are zero in every bar would only extend the legend.
    shown_parts = dict.fromkeys(part for parts in bars.values() for part, amount in parts.items() if amount > 0)
    color_by_part = palette_of(shown_parts)
    px = WIDTH_PX * scale / max_amount if max_amount else 0.0
    part_rows = [
        span(end - amount / scale, end, to_text(amount), color_by_part[part], px, bar=bar, part=part)
        for bar, parts in bars.items()
        for (part, amount), end in zip(parts.items(), accumulate(v / scale for v in parts.values()), strict=True)
        if amount > 0
    ]
    y = alt.Y("bar:N", sort=list(bars), title=None, axis=alt.Axis(ticks=False))
    x_scale = alt.Scale(domain=[0, max_amount / scale or 1], nice=False)
    x = alt.X("start:Q", title=f"{axis_title} ({unit_name})", scale=x_scale, axis=alt.Axis(tickCount=7))
    color = color_by("part", color_by_part, orient="bottom", columns=4)
    sum_rows = [{"bar": bar, "end": total / scale, "text": to_text(total)} for bar, total in totals.items()]
    if limit is not None:
        crossed = [total <= limit < total + (text_px(to_text(total), 13) + 8) / px * scale for total in totals.values()]
        sum_rows = [row | {"end": limit / scale} if over else row for row, over in zip(sum_rows, crossed, strict=True)]
    layers = []
    if limit is not None:  # below the bars, so that it crosses no text in them
        limit_rows = [{"limit": limit / scale, "text": f"limit {to_text(limit)}"}]
        rule = plot(limit_rows).mark_rule(strokeDash=DASHES, strokeWidth=1.5, color=INK)
        layers += [rule.encode(x="limit:Q"), labels(limit_rows, "limit:Q", alt.YValue(-8), align="center", fill=INK)]
    layers.append(spans(part_rows, y=y, x=x, color=color, band=0.68))
    layers.append(labels(sum_rows, "end:Q", y, align="left", baseline="middle", dx=6, fill=INK, fontWeight="bold"))
    return alt.layer(*layers).properties(width=WIDTH_PX, height=BAR_PX * len(bars))
