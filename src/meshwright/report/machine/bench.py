"""Pictures of a benchmark: the measured roofline, sweeps of sizes, the knee of the batch, collectives."""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from meshwright.algebra.steps import BOOK_NAMES
from meshwright.bench.results import ELEMENT_BYTES, BenchReport, Collective, Product
from meshwright.bench.workloads import FLOPS_EACH, layer_flops, weight_shards
from meshwright.core.dims import COLLECTIVES, DTYPE_BYTES
from meshwright.core.units import format_count, format_flops
from meshwright.report.figure import PALETTE, Encoding, Figure, Layer, alt, panel, si_scale, themed
from meshwright.report.marks import Points, ReferenceLine, color_by, lines, log_axis, plot
from meshwright.report.roofline import RooflinePoint, roofline_figure
from meshwright.report.sweeps import curves_figure
from meshwright.spec.chip import chip

PANEL_PX = (250, 300)
COLUMNS = 3
LINE_POINTS = 40


def bench_figures(report: BenchReport) -> dict[str, Figure]:
    """Maps file names to pictures, for every part of the report that has enough points."""
    parts = {
        "roofline.png": _roofline,
        "matmul.png": _matmul,
        "elementwise.png": _elementwise,
        "batch.png": _batch_times,
        "throughput.png": _throughput,
        "collectives.png": _collectives,
    }
    figures = {name: draw(report) for name, draw in parts.items()}
    return {name: figure for name, figure in figures.items() if figure is not None}


def _where(report: BenchReport) -> str:
    return f"{report.machine}, {report.date[:10]}"


def _roofline(report: BenchReport) -> Figure | None:
    """Draws products, multiply-add chains and layers under rates of the data sheet, else of this run; or None."""
    products = report.matmul.sweep if report.matmul else ()
    largest = report.copy.largest() if report.copy else None
    main = [p for p in products if p.dtype == products[0].dtype]
    if not main or largest is None:
        return None
    sheet = chip(report.chip)
    points = _points(report, main)
    peak, memory, whose = sheet.peak_flops.get(main[0].dtype), sheet.hbm_bytes_per_s, "the data sheet"
    if peak is None or memory is None:
        peak, memory, whose = max(point.flops_per_s for point in points), largest.bytes_per_s, "this run"
    what = "an emulated device" if report.platform == "cpu" else f"one {report.device_kind}"
    title = f"Measured on {what}, under the rates of {whose}"
    return roofline_figure(peak_flops_per_s=peak, link_bytes_per_s={"memory": memory}, points=points, title=title)


def _points(report: BenchReport, products: Sequence[Product]) -> list[RooflinePoint]:
    """Returns the smallest and largest product, every second fused chain, and the first, middle and last layer."""
    points = []
    for product in dict.fromkeys((products[0], products[-1])):
        intensity = 2 * product.n / (3 * DTYPE_BYTES[product.dtype])
        points.append(RooflinePoint(f"{product.dtype} product of {product.n}", intensity, product.flops_per_s))
    for chain in [chain for chain in report.elementwise.chains if chain.fused][::2] if report.elementwise else []:
        label = "1 multiply-add" if chain.repeats == 1 else f"{chain.repeats} fused"
        points.append(RooflinePoint(label, FLOPS_EACH * chain.repeats / (2 * ELEMENT_BYTES), chain.flops_per_s))
    part = report.batch
    if part is None or not part.layers:
        return points
    for layer in dict.fromkeys((part.layers[0], part.layers[len(part.layers) // 2], part.layers[-1])):
        tokens = layer.tokens
        # Operands and results of every product are moved once.
        shapes = [shard.shape for shard in weight_shards(part.sizes, part.dtype)]
        elements = sum(rows * columns + tokens * (rows + columns) for rows, columns in shapes)
        intensity = layer_flops(part.sizes, tokens) / (elements * DTYPE_BYTES[part.dtype])
        label = f"layer, {format_count(tokens)} token{'s' if tokens > 1 else ''}"
        points.append(RooflinePoint(label, intensity, layer.flops_per_s))
    return points


def _matmul(report: BenchReport) -> Figure | None:
    sweep = report.matmul.sweep if report.matmul else ()
    if not sweep:
        return None
    curves: dict[str, list[tuple[float, float]]] = {}
    for product in sweep:
        curves.setdefault(product.dtype, []).append((product.n, product.flops_per_s))
    peaks = {dtype: peak for dtype, peak in chip(report.chip).peak_flops.items() if dtype in curves}
    marks = [
        ReferenceLine(axis="y", value=peak, text=f"{dtype} peak {format_flops(peak)}") for dtype, peak in peaks.items()
    ]
    return curves_figure(
        curves,
        x_title="side of a square product",
        y_title="FLOP/s of a device",
        title="Square products",
        subtitle=_where(report),
        references=marks,
        x_ticks=[p.n for p in sweep],
    )


def _elementwise(report: BenchReport) -> Figure | None:
    part = report.elementwise
    chains = part.chains if part else ()
    fused, eager = ([chain for chain in chains if chain.fused is wanted] for wanted in (True, False))
    if part is None or len(fused) < 2:
        return None
    scale, unit = si_scale(max(chain.seconds.median_s for chain in chains), "s")
    curves = {
        name: [(chain.repeats, chain.seconds.median_s / scale) for chain in chosen]
        for name, chosen in (("one kernel", fused), ("op by op", eager))
        if chosen
    }
    marks = []
    if part.doubles_at:
        marks.append(_at(part.doubles_at, "time doubles at"))
    if part.predicted_at and 1 < part.predicted_at < fused[-1].repeats:
        marks.append(_at(part.predicted_at, "predicted", "end"))
    return curves_figure(
        curves,
        x_title="multiply-adds of every element",
        y_title=f"time ({unit})",
        title="How many multiply-adds fit before the time doubles",
        subtitle=_where(report),
        references=marks,
        x_ticks=[chain.repeats for chain in fused],
    )


def _at(value: float, what: str, at: Literal["start", "end"] = "start") -> ReferenceLine:
    return ReferenceLine(axis="x", value=value, text=f"{what} {value:.3g}", at=at)


def _batch_times(report: BenchReport) -> Figure | None:
    layers, knee = (report.batch.layers, report.batch.knee) if report.batch else ((), None)
    scale, unit = si_scale(max((layer.seconds.median_s for layer in layers), default=0.0), "s")
    curves = {"measured": [(float(layer.tokens), layer.seconds.median_s / scale) for layer in layers]}
    if knee:
        tokens = sorted({knee.at, *(float(layer.tokens) for layer in layers)})
        curves["fitted"] = [(batch, max(knee.floor, knee.slope * batch) / scale) for batch in tokens]
    return _over_batch(report, curves, f"time of a layer ({unit})", "Time of a layer against the batch")


def _throughput(report: BenchReport) -> Figure | None:
    layers, name = (report.batch.layers, f"{report.batch.dtype} layer") if report.batch else ((), "")
    curves = {name: [(layer.tokens, layer.tokens_per_us) for layer in layers]}
    return _over_batch(report, curves, "tokens per us", "Tokens per us of a layer")


def _over_batch(report: BenchReport, curves: Mapping[str, Points], y_title: str, title: str) -> Figure | None:
    """Draws curves over tokens per device with the measured and predicted knee; None for fewer than two layers."""
    part = report.batch
    if part is None or len(part.layers) < 2:
        return None
    tokens = [layer.tokens for layer in part.layers]
    marks = []
    if part.knee:
        marks.append(_at(part.knee.at, "knee"))
    if part.predicted_knee and tokens[0] < part.predicted_knee < tokens[-1]:
        marks.append(_at(part.predicted_knee, "critical batch", "end"))
    return curves_figure(
        curves,
        x_title="tokens of a device",
        y_title=y_title,
        title=title,
        subtitle=_where(report),
        references=marks,
        x_ticks=tokens,
    )


# -- collectives ----------------------------------------------------------------------------------------


def _collectives(report: BenchReport) -> Figure | None:
    """Draws measured time over bytes with the fitted lines: a panel per group, on equal axes. None if not measured."""
    rows = report.collectives.collectives if report.collectives else ()
    if not rows:
        return None
    sizes = [time.array_bytes for row in rows for time in row.times]
    # In microseconds: times range from a few to some thousands.
    times = [us for row in rows for time in row.times for us in (time.seconds.median_s * 1e6, time.fitted_s * 1e6)]
    x = log_axis(alt.X, "x", (min(sizes) / 1.5, max(sizes) * 1.5), "bytes of the array")
    groups: dict[tuple[str, int], list[Collective]] = {}
    for row in rows:
        groups.setdefault((row.group.axis, row.group.size), []).append(row)
    panels = []
    for number, group in enumerate(groups.values()):
        title = None if number % COLUMNS else "time (us)"
        y = log_axis(alt.Y, "y", (min(times) / 1.5, max(times) * 1.5), title)
        panels.append(_panel(group, x, y))
    title = "Collectives: measured, and the fitted latency and rate"
    return themed(alt.concat(*panels, columns=COLUMNS), title, _where(report))


def _panel(found: Sequence[Collective], x: Encoding, y: Encoding) -> Layer:
    group = found[0].group
    points = [
        {"name": BOOK_NAMES[row.kind], "x": time.array_bytes, "y": time.seconds.median_s * 1e6}
        for row in found
        for time in row.times
    ]
    colors = dict(zip((BOOK_NAMES[kind] for kind in COLLECTIVES), PALETTE, strict=False))
    color = color_by("name", colors, orient="bottom", symbolType="circle", symbolOpacity=1)
    dots = plot(points).mark_point(filled=True, size=45, opacity=0.9).encode(x=x, y=y, color=color)
    name = f"{group.size} devices" if group.axis == "group" else f"{group.axis}, {group.size} devices"
    fitted = lines({BOOK_NAMES[row.kind]: _fitted(row) for row in found}, x, y, color, strokeWidth=1.8)
    return panel(*fitted, dots, size=PANEL_PX, title=name)


def _fitted(one: Collective) -> Points:
    """Returns points of latency + bytes / rate between the smallest and largest size: bent on logarithmic axes."""
    first, last = one.times[0], one.times[-1]
    sizes = np.geomspace(first.array_bytes, last.array_bytes, LINE_POINTS + 1)
    seconds = np.interp(sizes, (first.array_bytes, last.array_bytes), (first.fitted_s, last.fitted_s))
    return list(zip(sizes.tolist(), (1e6 * seconds).tolist(), strict=True))
