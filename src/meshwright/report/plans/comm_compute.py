"""Communication and compute by batch size: their times, and their ratio with the crossings.

After figures 15 and 16 of "How to Scale Your Model".
"""

import math
from collections.abc import Sequence

import msgspec

from meshwright.core.errors import InputError
from meshwright.report.figure import INK, MUTED, PALETTE, Encoding, Figure, Layer, alt, panel, si_scale, themed
from meshwright.report.marks import Points, ReferenceLine, color_by, labels, lines, log_axis, plot, reference

PANEL_PX = (420, 320)


class CommsCurve(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of communication and of compute at every batch size; compute can differ by mesh.

    ``crossing`` is the batch in tokens above which compute takes longer, if any. A ``strong`` curve is wide and black.
    """

    name: str
    seconds: Sequence[float]
    compute_s: Sequence[float]
    crossing: float | None = None
    strong: bool = False


def comm_compute_figure(
    tokens: Sequence[float], curves: Sequence[CommsCurve], *, title: str, subtitle: str = ""
) -> Figure:
    """Draws times over the batch (compute of the last curve dashed), and compute / communication with crossings."""
    drawn = [curve for curve in curves if max(curve.seconds, default=0.0) > 0]
    if not drawn:
        raise InputError("there is no communication to draw: the mesh has one device. Give a larger mesh.")
    colors = {curve.name: INK if curve.strong else PALETTE[number % 8] for number, curve in enumerate(drawn)}
    color = color_by("name", colors, title="communication", orient="right", symbolType="stroke", symbolStrokeWidth=3)
    x = log_axis(alt.X, "x", (min(tokens), max(tokens)), "batch (tokens)", grid=False)
    chart = alt.hconcat(_times(tokens, drawn, x, color), _ratios(tokens, drawn, x, color), spacing=36)
    return themed(chart.resolve_scale(color="shared"), title, subtitle)


def _times(tokens: Sequence[float], curves: Sequence[CommsCurve], x: Encoding, color: Encoding) -> Layer:
    compute_s = curves[-1].compute_s
    every = [s for s in (*compute_s, *(s for curve in curves for s in curve.seconds)) if s > 0]
    scale, unit = si_scale(max(every), "s")
    low, high = min(every) / scale / 1.3, max(every) / scale * 1.3
    y = log_axis(alt.Y, "y", (low, high), f"time ({unit})")
    shown = [(one, [(batch, s / scale) for batch, s in zip(tokens, one.seconds, strict=True)]) for one in curves]
    work = [{"x": batch, "y": s / scale, "text": "compute"} for batch, s in zip(tokens, compute_s, strict=True)]
    dashed = plot(work).mark_line(strokeDash=(6, 4), strokeWidth=2, color="black").encode(x=x, y=y)
    label = labels(work[-1:], x, y, align="right", dx=-8, dy=-8, fill="black")
    return panel(*_lines(shown, x, y, color), dashed, label, size=PANEL_PX)


def _ratios(tokens: Sequence[float], curves: Sequence[CommsCurve], x: Encoding, color: Encoding) -> Layer:
    shown = [
        (one, [(batch, work / s) for batch, work, s in zip(tokens, one.compute_s, one.seconds, strict=True) if s > 0])
        for one in curves
    ]
    ratios = [ratio for _, points in shown for _, ratio in points]
    y = log_axis(alt.Y, "y", (min(ratios) / 1.2, max(ratios) * 1.2), "compute / communication")
    crossings = plot({"x": one.crossing, "y": 1.0} for one in curves if one.crossing)
    rings = crossings.mark_point(size=60, filled=False, color="black", opacity=1).encode(x=x, y=y)
    even = reference(ReferenceLine(axis="y", value=1.0, text="above: compute-bound", color=MUTED))
    return panel(*_lines(shown, x, y, color), even, rings, size=PANEL_PX)


def _lines(shown: Sequence[tuple[CommsCurve, Points]], x: Encoding, y: Encoding, color: Encoding) -> list[Layer]:
    """Returns a layer per curve; strong curves are wide. A value of 0 leaves a gap."""
    layers = []
    for one, points in shown:
        there = [(batch, value or math.nan) for batch, value in points]
        layers += lines({one.name: there}, x, y, color, strokeWidth=3.2 if one.strong else 1.8)
    return layers
