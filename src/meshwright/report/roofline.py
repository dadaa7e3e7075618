"""The roofline picture: the rate that each link allows over arithmetic intensity, and operations as points."""

import math
from collections.abc import Mapping, Sequence

import msgspec

from meshwright.core.units import format_bytes, format_flops
from meshwright.report.figure import INK, MUTED, PALETTE, Figure, alt, themed
from meshwright.report.marks import Datum, Points, check_positive, labels, lines, log_axis, plot, stroke_colors

WIDTH_PX = 640
HEIGHT_PX = 400
CHARACTER_PX = 6.4
LINE_PX = 15


class RooflinePoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One operation: its FLOPs per byte over the link, and its rate (measured, or its bound)."""

    label: str
    intensity: float
    flops_per_s: float


class _Frame(msgspec.Struct, frozen=True, kw_only=True):
    """The data range of both logarithmic axes; converts values to pixels."""

    x: tuple[float, float]
    y: tuple[float, float]

    def pixel(self, intensity: float, flops_per_s: float) -> tuple[float, float]:
        across = math.log(intensity / self.x[0]) / math.log(self.x[1] / self.x[0])
        down = 1 - math.log(flops_per_s / self.y[0]) / math.log(self.y[1] / self.y[0])
        return across * WIDTH_PX, down * HEIGHT_PX


class _Box(msgspec.Struct, frozen=True):
    """A rectangle of the picture, in pixels."""

    left: float
    right: float
    middle: float
    half_height: float = LINE_PX / 2

    def touches(self, other: "_Box") -> bool:
        apart = abs(self.middle - other.middle) >= self.half_height + other.half_height
        return not apart and self.left < other.right and other.left < self.right


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
    critical = {name: peak_flops_per_s / rate for name, rate in link_bytes_per_s.items()}
    frame = _frame(peak_flops_per_s, link_bytes_per_s, critical, points)
    x = log_axis(alt.X, "x", frame.x, "arithmetic intensity (FLOPs per byte)")
    y = log_axis(alt.Y, "y", frame.y, "rate (FLOP/s)")
    roofs: dict[str, Points] = {}
    for name, rate in link_bytes_per_s.items():
        # Starting at the bottom keeps slow links inside the picture.
        start = max(frame.x[0], frame.y[0] / rate)
        flat = [(critical[name], peak_flops_per_s), (frame.x[1], peak_flops_per_s)]
        roofs[f"{name}  {format_bytes(rate)}/s"] = [(start, start * rate), *flat]
    color = stroke_colors(roofs, title="links", orient="right", symbolStrokeWidth=3)
    bends = [
        {"x": value, "y": frame.y[0], "top": peak_flops_per_s, "text": f"{name} {value:.4g}"}
        for name, value in critical.items()
    ]
    # Along the dashed line, so that labels of neighbouring critical intensities do not overlap.
    along = {"angle": 270, "align": "left", "dx": 8, "dy": 11, "fill": MUTED, "fontSize": 11}
    peak = [{"x": frame.x[0], "y": peak_flops_per_s, "text": f"peak {format_flops(peak_flops_per_s)}"}]
    layers = [
        *lines(roofs, x, y, color, strokeWidth=2.5),
        plot(bends).mark_rule(strokeDash=(4, 4), color=MUTED).encode(x=x, y=y, y2="top"),
        labels(bends, x, y, **along),
        labels(peak, x, y, align="left", dx=6, fill=INK),
    ]
    if points:
        start, top = frame.pixel(min(critical.values(), default=frame.x[0]), peak_flops_per_s)
        dashed = [(frame.pixel(value, peak_flops_per_s)[0], (top + HEIGHT_PX) / 2) for value in critical.values()]
        upright = [_Box(x - 2, x + 2, middle, HEIGHT_PX - middle) for x, middle in dashed]
        rows = _label_rows(points, [_Box(start, WIDTH_PX, top, 1), *upright], frame)
        at = {"x": alt.X("x_px:Q", scale=None), "y": alt.Y("y_px:Q", scale=None)}
        far = plot(
            row for row in rows if abs(row["y_px"] - row["dot_y_px"]) > LINE_PX or row["x_px"] > row["dot_x_px"] + 9
        )
        layers += [
            far.mark_rule(color=MUTED, strokeWidth=1).encode(**at, x2="dot_x_px", y2="dot_y_px"),
            plot(rows).mark_circle(size=90, color=PALETTE[5], opacity=1).encode(x=x, y=y),
            labels(rows, **at, align="left", baseline="middle"),
        ]
    subtitle = "Sloped: what a link can feed. Flat: the peak. Dashed: the intensity from which the peak binds."
    return themed(alt.layer(*layers), title, subtitle, width=WIDTH_PX, height=HEIGHT_PX)


def _frame(
    peak: float, links: Mapping[str, float], critical: Mapping[str, float], points: Sequence[RooflinePoint]
) -> _Frame:
    intensities = [*critical.values(), *(point.intensity for point in points)] or [1.0]
    left, right = min(intensities) / 8, max(intensities) * 8
    rates = [point.flops_per_s for point in points]
    # A slow link would otherwise extend the axis far below every point.
    slopes = max(min([left * rate for rate in links.values()] or [peak]), peak / 1e5)
    return _Frame(
        x=(left, right), y=(min([slopes, peak / 100, *(rate / 3 for rate in rates)]), max([peak, *rates]) * 3)
    )


def _label_rows(points: Sequence[RooflinePoint], taken: Sequence[_Box], frame: _Frame) -> list[Datum]:
    """Returns the labels beside their points if there is room, else further down; each row has the dot's pixels too."""
    dots = [frame.pixel(point.intensity, point.flops_per_s) for point in points]
    boxes = [*taken, *(_Box(x - 6, x + 6, y, 6) for x, y in dots)]
    rows = []
    for point, (x, y) in sorted(zip(points, dots, strict=True), key=lambda pair: pair[1]):
        box = _free_box(point.label, x, y, boxes)
        boxes.append(box)
        place = {"x_px": box.left, "y_px": box.middle, "dot_x_px": x, "dot_y_px": y}
        rows.append({"text": point.label, "x": point.intensity, "y": point.flops_per_s, **place})
    return rows


def _free_box(label: str, x: float, y: float, taken: Sequence[_Box]) -> _Box:
    """Returns the first free box of a label: below right of (x, y), above left, right, left, to the right of other
    boxes, then further down; the first one if none is free."""
    width = len(label) * CHARACTER_PX
    right, left = min(x + 9, WIDTH_PX - width), x - 9 - width
    down = [(right, y + 12 + LINE_PX * line) for line in range(len(taken) + 2)]
    past = [(box.right + 4, y + 12) for box in taken if right < box.right < WIDTH_PX - width - 4]
    places = [down[0], (left, y - 12), (right, y), (left, y), *sorted(past), *down[1:]]
    places = [(start, middle) for start, middle in places if start >= 0]
    boxes = [_Box(start, start + width, middle) for start, middle in places]
    return next((box for box in boxes if not any(box.touches(other) for other in taken)), boxes[0])
