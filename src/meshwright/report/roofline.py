"""The roofline picture: the rate that each link allows over arithmetic intensity, and operations as points."""

from collections.abc import Mapping, Sequence

import msgspec

from meshwright.core.units import format_bytes, format_flops
from meshwright.report.figure import MUTED, PALETTE, Figure, alt, themed
from meshwright.report.labels import Frame, point_labels, reference
from meshwright.report.marks import Points, ReferenceLine, check_positive, lines, log_axis, plot, stroke_colors

WIDTH_PX = 640
HEIGHT_PX = 400


class RooflinePoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One operation: its FLOPs per byte over the link, and its rate (measured, or its bound)."""

    label: str
    intensity: float
    flops_per_s: float


def roofline_figure(
    *,
    peak_flops_per_s: float,
    link_bytes_per_s: Mapping[str, float],
    points: Sequence[RooflinePoint] = (),
    title: str = "Roofline",
) -> Figure:
    """Draws min(peak, intensity * bandwidth) per link, critical intensities, and points on logarithmic axes.

    The critical intensity of a link is peak_flops_per_s / link_bytes_per_s: right of it the peak binds.
    Source: How to Scale Your Model, section 1.
    """
    check_positive([("peak_flops_per_s", peak_flops_per_s), *link_bytes_per_s.items()])
    check_positive((f"{point.label}: intensity", point.intensity) for point in points)
    check_positive((f"{point.label}: rate", point.flops_per_s) for point in points)
    critical_by_link = {name: peak_flops_per_s / bytes_per_s for name, bytes_per_s in link_bytes_per_s.items()}
    frame = _frame(peak_flops_per_s, link_bytes_per_s, critical_by_link, points)
    x = log_axis(alt.X, "x", frame.x, "arithmetic intensity (FLOPs per byte)")
    y = log_axis(alt.Y, "y", frame.y, "rate (FLOP/s)")
    points_by_roof: dict[str, Points] = {}
    for name, bytes_per_s in link_bytes_per_s.items():
        # Starting at the bottom keeps slow links inside the picture.
        start_x = max(frame.x[0], frame.y[0] / bytes_per_s)
        flat_points = [(critical_by_link[name], peak_flops_per_s), (frame.x[1], peak_flops_per_s)]
        points_by_roof[f"{name}  {format_bytes(bytes_per_s)}/s"] = [(start_x, start_x * bytes_per_s), *flat_points]
    color = stroke_colors(points_by_roof, title="links", orient="right", symbolStrokeWidth=3)
    areas = [box for roof_points in points_by_roof.values() for box in frame.curve(roof_points)]
    areas += frame.dots([(point.intensity, point.flops_per_s) for point in points])
    # the texts of critical intensities are along their lines, that of the peak is over the flat part
    references = [
        ReferenceLine(axis="x", value=value, text=f"{name} {value:.4g}", color=MUTED)
        for name, value in critical_by_link.items()
    ]
    references.append(ReferenceLine(axis="y", value=peak_flops_per_s, text=f"peak {format_flops(peak_flops_per_s)}"))
    reference_layers = [reference(reference_line, frame, areas) for reference_line in references]
    rows = [{"text": point.label, "x": point.intensity, "y": point.flops_per_s} for point in points]
    point_layer = point_labels(rows, frame, areas)
    layers = [
        *lines(points_by_roof, x, y, color, strokeWidth=2.5),
        *reference_layers,
        point_layer,
        plot(rows).mark_circle(size=90, color=PALETTE[5], opacity=1).encode(x=x, y=y),
    ]
    subtitle = "Sloped: what a link can feed. Flat: the peak. Dashed: the intensity from which the peak binds."
    return themed(alt.layer(*layers), title, subtitle, width=WIDTH_PX, height=HEIGHT_PX)


def _frame(
    peak: float, rate_by_link: Mapping[str, float], critical: Mapping[str, float], points: Sequence[RooflinePoint]
) -> Frame:
    intensities = [*critical.values(), *(point.intensity for point in points)] or [1.0]
    min_x, max_x = min(intensities) / 8, max(intensities) * 8
    point_rates = [point.flops_per_s for point in points]
    # A slow link would otherwise extend the axis far below every point.
    lowest_slope = max(min([min_x * rate for rate in rate_by_link.values()] or [peak]), peak / 1e5)
    return Frame(
        x=(min_x, max_x),
        y=(min([lowest_slope, peak / 100, *(rate / 3 for rate in point_rates)]), max([peak, *point_rates]) * 3),
        size=(WIDTH_PX, HEIGHT_PX),
    )
