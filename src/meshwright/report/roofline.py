"""The roofline picture: what rate each link allows at an arithmetic intensity, and where the operations lie."""

import math
from collections.abc import Mapping, Sequence

import msgspec

from meshwright.core.errors import InputError
from meshwright.core.units import format_bytes, format_flops
from meshwright.report.figure import INK, MUTED, PALETTE, Spec, headline, text_layers, themed

WIDTH_PX = 640
HEIGHT_PX = 400
CHARACTER_PX = 6.4
LINE_PX = 15


class RooflinePoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One operation: FLOPs per byte over the link, and the rate it reaches (measured, or its bound)."""

    label: str
    intensity: float
    flops_per_s: float


class _Frame(msgspec.Struct, frozen=True, kw_only=True):
    """The data range of both logarithmic axes, and the place of a value in pixels."""

    x: tuple[float, float]
    y: tuple[float, float]

    def pixel(self, intensity: float, flops_per_s: float) -> tuple[float, float]:
        across = math.log(intensity / self.x[0]) / math.log(self.x[1] / self.x[0])
        down = 1 - math.log(flops_per_s / self.y[0]) / math.log(self.y[1] / self.y[0])
        return across * WIDTH_PX, down * HEIGHT_PX


class _Box(msgspec.Struct, frozen=True, kw_only=True):
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
) -> Spec:
    """A log-log picture: min(peak, intensity * bandwidth) per link, critical intensities, and the points.

    The critical intensity of a link is peak_flops_per_s / link_bytes_per_s: right of it the peak binds.
    Source: How to Scale Your Model, section 1.
    """
    _check_positive({"peak_flops_per_s": peak_flops_per_s, **link_bytes_per_s})
    for point in points:
        _check_positive({f"{point.label}: intensity": point.intensity, f"{point.label}: rate": point.flops_per_s})
    critical = {name: peak_flops_per_s / rate for name, rate in link_bytes_per_s.items()}
    frame = _frame(peak_flops_per_s, link_bytes_per_s, critical, points)
    layers = [
        _roof_layer(peak_flops_per_s, link_bytes_per_s, critical, frame),
        *_critical_layers(peak_flops_per_s, critical, frame),
        *_peak_layers(peak_flops_per_s, frame),
    ]
    if points:
        layers += _point_layers(points, peak_flops_per_s, min(critical.values(), default=frame.x[0]), frame)
    subtitle = "Sloped: what a link can feed. Flat: the peak. Dashed: the intensity from which the peak binds."
    return themed(
        {
            "title": headline(title, subtitle),
            "width": WIDTH_PX,
            "height": HEIGHT_PX,
            "layer": layers,
        }
    )


def _check_positive(values: Mapping[str, float]) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise InputError(f"A roofline needs positive numbers on its logarithmic axes, but {name} is {value:g}.")


def _frame(
    peak: float, links: Mapping[str, float], critical: Mapping[str, float], points: Sequence[RooflinePoint]
) -> _Frame:
    intensities = [*critical.values(), *(point.intensity for point in points)] or [1.0]
    left, right = min(intensities) / 8, max(intensities) * 8
    rates = [point.flops_per_s for point in points]
    # A slow link alone would stretch the picture far below anything that is drawn as a point.
    slopes = max(min([left * rate for rate in links.values()] or [peak]), peak / 1e5)
    return _Frame(
        x=(left, right), y=(min([slopes, peak / 100, *(rate / 3 for rate in rates)]), max([peak, *rates]) * 3)
    )


def _axes(frame: _Frame) -> tuple[Spec, Spec]:
    return (
        _log_axis("intensity", frame.x, "arithmetic intensity (FLOPs per byte)"),
        _log_axis("flops_per_s", frame.y, "rate (FLOP/s)"),
    )


def _log_axis(field: str, domain: tuple[float, float], title: str) -> Spec:
    decades = range(math.ceil(math.log10(domain[0])), math.floor(math.log10(domain[1])) + 1)
    axis = {
        "title": title,
        "values": [10.0**power for power in decades],
        # The SI prefixes below one ("100m") are hard to read as a ratio.
        "labelExpr": "datum.value < 1 ? toString(datum.value) : format(datum.value, '~s')",
    }
    scale = {"type": "log", "domain": list(domain), "nice": False}
    return {"field": field, "type": "quantitative", "scale": scale, "axis": axis}


def _roof_layer(peak: float, links: Mapping[str, float], critical: Mapping[str, float], frame: _Frame) -> Spec:
    rows = []
    for name, rate in links.items():
        legend = f"{name}  {format_bytes(rate)}/s"
        # Starting on the floor keeps slow links inside the picture.
        start = max(frame.x[0], frame.y[0] / rate)
        rows.append({"link": legend, "intensity": start, "flops_per_s": start * rate})
        rows.append({"link": legend, "intensity": critical[name], "flops_per_s": peak})
        rows.append({"link": legend, "intensity": frame.x[1], "flops_per_s": peak})
    x, y = _axes(frame)
    color = {
        "field": "link",
        "type": "nominal",
        "sort": None,
        "legend": {"title": "links", "orient": "right", "symbolStrokeWidth": 3},
    }
    return {
        "data": {"values": rows},
        "mark": {"type": "line", "strokeWidth": 2.5},
        "encoding": {"x": x, "y": y, "color": color},
    }


def _critical_layers(peak: float, critical: Mapping[str, float], frame: _Frame) -> list[Spec]:
    x, y = _axes(frame)
    rows = [
        {"intensity": value, "flops_per_s": frame.y[0], "top": peak, "text": f"{name} {value:.4g}"}
        for name, value in critical.items()
    ]
    rule = {
        "data": {"values": rows},
        "mark": {"type": "rule", "strokeDash": [4, 4], "color": MUTED},
        "encoding": {"x": x, "y": y, "y2": {"field": "top"}},
    }
    # Along the dashed line, so that neighbouring critical intensities do not write over each other.
    mark = {"angle": 270, "align": "left", "dx": 8, "dy": 11, "fill": MUTED, "fontSize": 11}
    return [rule, *text_layers(rows, {"x": x, "y": y, "text": {"field": "text"}}, **mark)]


def _peak_layers(peak: float, frame: _Frame) -> list[Spec]:
    x, y = _axes(frame)
    row = {"intensity": frame.x[0], "flops_per_s": peak, "text": f"peak {format_flops(peak)}"}
    return text_layers([row], {"x": x, "y": y, "text": {"field": "text"}}, align="left", dx=6, fill=INK)


def _point_layers(points: Sequence[RooflinePoint], peak: float, critical: float, frame: _Frame) -> list[Spec]:
    x, y = _axes(frame)
    dots = {
        "data": {"values": [msgspec.to_builtins(point) for point in points]},
        "mark": {"type": "circle", "size": 90, "color": PALETTE[5], "opacity": 1},
        "encoding": {"x": x, "y": y},
    }
    start, top = frame.pixel(critical, peak)
    roof = _Box(left=start, right=WIDTH_PX, middle=top, half_height=1)
    labels = _label_rows(points, [roof], frame)
    pixels = {"type": "quantitative", "scale": None}
    place = {"x": {"field": "x_px", **pixels}, "y": {"field": "y_px", **pixels}}
    ends = {"x2": {"field": "dot_x_px"}, "y2": {"field": "dot_y_px"}}
    leaders = {
        "data": {"values": [row for row in labels if abs(row["y_px"] - row["dot_y_px"]) > LINE_PX]},
        "mark": {"type": "rule", "color": MUTED, "strokeWidth": 1},
        "encoding": {**place, **ends},
    }
    text = {**place, "text": {"field": "label"}}
    return [leaders, dots, *text_layers(labels, text, align="left", baseline="middle")]


def _label_rows(points: Sequence[RooflinePoint], taken: Sequence[_Box], frame: _Frame) -> list[Spec]:
    """Labels beside their points where nothing is in the way, else further down, tied by a thin line."""
    dots = [frame.pixel(point.intensity, point.flops_per_s) for point in points]
    boxes = [*taken, *(_Box(left=x - 6, right=x + 6, middle=y, half_height=6) for x, y in dots)]
    rows = []
    for point, (x, y) in sorted(zip(points, dots, strict=True), key=lambda pair: pair[1]):
        box = _free_box(point.label, x, y, boxes)
        boxes.append(box)
        place = {"x_px": box.left, "y_px": box.middle, "dot_x_px": x, "dot_y_px": y}
        rows.append({"label": point.label, **place})
    return rows


def _free_box(label: str, x: float, y: float, taken: Sequence[_Box]) -> _Box:
    """The first free place for a label: below right of (x, y), above left, right, left, then further down."""
    width = len(label) * CHARACTER_PX
    right = min(x + 9, WIDTH_PX - width)
    down = [(right, y + 12 + LINE_PX * line) for line in range(len(taken) + 2)]
    places = [down[0], (x - 9 - width, y - 12), (right, y), (x - 9 - width, y), *down[1:]]
    boxes = [_Box(left=left, right=left + width, middle=middle) for left, middle in places]
    return next((box for box in boxes if not any(box.touches(other) for other in taken)), boxes[0])
