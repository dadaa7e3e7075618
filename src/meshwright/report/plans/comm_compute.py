"""Communication and compute by batch size: their times, and their ratio with the crossings.

After figures 15 and 16 of "How to Scale Your Model".
"""

import math
from collections.abc import Sequence

import msgspec

from meshwright.core.errors import InputError
from meshwright.report.figure import INK, MUTED, PALETTE, Encoding, Figure, Layer, alt, panel, themed
from meshwright.report.labels import Frame, point_labels, reference
from meshwright.report.marks import SECONDS_LABEL, Points, ReferenceLine, color_by, lines, log_axis, plot

PANEL_PX = (420, 320)
MEMORY_BOUND = "Dotted: reading weights from HBM binds compute, not FLOPs; a curve bends there."


class CommsCurve(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of communication and of compute at every batch size; compute can differ by mesh.

    For the first ``memory_bound`` batches the chip's memory binds compute. ``crossing`` is the batch in tokens above
    which compute takes longer, if any. A ``strong`` curve is wide and black.
    """

    name: str
    seconds: Sequence[float]
    compute_s: Sequence[float]
    memory_bound: int = 0
    crossing: float | None = None
    strong: bool = False


def comm_compute_figure(
    tokens: Sequence[float], curves: Sequence[CommsCurve], *, title: str, subtitle: str = ""
) -> Figure:
    """Draws times over the batch (compute of the last curve dashed), and compute / communication with crossings;
    ratios are dotted where the chip's memory binds compute, which makes them bend."""
    drawn_curves = [curve for curve in curves if max(curve.seconds, default=0.0) > 0]
    if not drawn_curves:
        raise InputError("there is no communication to draw: the mesh has one device. Give a larger mesh.")
    color_of = {curve.name: INK if curve.strong else PALETTE[i % len(PALETTE)] for i, curve in enumerate(drawn_curves)}
    color = color_by("name", color_of, title="communication", orient="right", symbolType="stroke", symbolStrokeWidth=3)
    x = log_axis(alt.X, "x", (min(tokens), max(tokens)), "batch (tokens)", grid=False)
    chart = alt.hconcat(_times(tokens, drawn_curves, x, color), _ratios(tokens, drawn_curves, x, color), spacing=36)
    if any(curve.memory_bound for curve in drawn_curves):
        subtitle = f"{subtitle} {MEMORY_BOUND}"
    return themed(chart.resolve_scale(color="shared"), title, subtitle)


def _times(tokens: Sequence[float], curves: Sequence[CommsCurve], x: Encoding, color: Encoding) -> Layer:
    compute_s = curves[-1].compute_s
    positive_s = [s for s in (*compute_s, *(s for curve in curves for s in curve.seconds)) if s > 0]
    min_s, max_s = min(positive_s) / 1.3, max(positive_s) * 1.3
    y = log_axis(alt.Y, "y", (min_s, max_s), "time", labelExpr=SECONDS_LABEL)
    # a logarithmic axis has no zero: it leaves a gap
    series = [(curve, [(t, s or math.nan) for t, s in zip(tokens, curve.seconds, strict=True)]) for curve in curves]
    compute_rows = [{"x": batch, "y": s, "text": "compute"} for batch, s in zip(tokens, compute_s, strict=True)]
    dashed_line = plot(compute_rows).mark_line(strokeDash=(6, 4), strokeWidth=2, color="black").encode(x=x, y=y)
    frame = Frame(x=(min(tokens), max(tokens)), y=(min_s, max_s), size=PANEL_PX)
    compute_points = list(zip(tokens, compute_s, strict=True))
    areas = [box for points in (*(points for _, points in series), compute_points) for box in frame.curve(points)]
    compute_label = point_labels([{**compute_rows[-1], "along": compute_points}], frame, areas, fill="black")
    return panel(*_lines(series, x, y, color), dashed_line, compute_label, size=PANEL_PX)


def _ratios(tokens: Sequence[float], curves: Sequence[CommsCurve], x: Encoding, color: Encoding) -> Layer:
    curve_points = [
        (c, [(batch, math_s / s) for batch, math_s, s in zip(tokens, c.compute_s, c.seconds, strict=True) if s > 0])
        for c in curves
    ]
    ratios = [ratio for _, points in curve_points for _, ratio in points]
    y_range = (min([1.0, *ratios]) / 1.2, max([1.0, *ratios]) * 1.2)
    y = log_axis(alt.Y, "y", y_range, "compute / communication")
    frame = Frame(x=(min(tokens), max(tokens)), y=y_range, size=PANEL_PX)
    areas = [box for _, points in curve_points for box in frame.curve(points)]
    areas += frame.dots([(curve.crossing, 1.0) for curve in curves if curve.crossing])
    crossing_plot = plot({"x": curve.crossing, "y": 1.0} for curve in curves if curve.crossing)
    ring_marks = crossing_plot.mark_point(size=60, filled=False, color="black", opacity=1).encode(x=x, y=y)
    even_line = reference(ReferenceLine(axis="y", value=1.0, text="above: compute-bound", color=MUTED), frame, areas)
    return panel(*_lines(curve_points, x, y, color, dotted=True), even_line, ring_marks, size=PANEL_PX)


def _lines(
    curve_data: Sequence[tuple[CommsCurve, Points]], x: Encoding, y: Encoding, color: Encoding, *, dotted: bool = False
) -> list[Layer]:
    """Returns a layer per curve, with ``dotted`` a second one where memory binds; strong curves are wide."""
    layers = []
    for curve, points in curve_data:
        num_bound, width_px = curve.memory_bound if dotted else 0, 3.2 if curve.strong else 1.8
        layers += lines({curve.name: points[num_bound:]}, x, y, color, strokeWidth=width_px)
        if num_bound:
            layers += lines({curve.name: points[: num_bound + 1]}, x, y, color, strokeWidth=width_px, strokeDash=(2, 3))
    return layers
