"""Pictures of a benchmark: the measured roofline, sweeps of sizes, the knee of the batch, collectives."""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from meshwright.algebra.steps import BOOK_NAMES
from meshwright.bench.results import ELEMENT_BYTES, BenchReport, Collective, Product
from meshwright.bench.workloads import FLOPS_EACH, layer_flops, weight_shards
from meshwright.core.dims import COLLECTIVES, DTYPE_BYTES
from meshwright.core.units import counted, format_flops
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
    draw_by_name = {
        "roofline.png": _roofline,
        "matmul.png": _matmul,
        "elementwise.png": _elementwise,
        "batch.png": _batch_times,
        "throughput.png": _throughput,
        "collectives.png": _collectives,
    }
    figure_by_name = {name: draw(report) for name, draw in draw_by_name.items()}
    return {name: figure for name, figure in figure_by_name.items() if figure is not None}


def _where(report: BenchReport) -> str:
    return f"{report.machine}, {report.date[:10]}"


def _roofline(report: BenchReport) -> Figure | None:
    """Draws products, multiply-add chains and layers under the data sheet's rates, or this run's where it has none.

    Returns None if no product or no copy was measured."""
    products = report.matmul.sweep if report.matmul else ()
    largest_copy = report.copy.largest() if report.copy else None
    main_sweep = [product for product in products if product.dtype == products[0].dtype]
    if not main_sweep or largest_copy is None:
        return None
    datasheet = chip(report.chip)
    points = _points(report, main_sweep)
    peak, byte_rate, origin = datasheet.peak_flops.get(main_sweep[0].dtype), datasheet.hbm_bytes_per_s, "the data sheet"
    if peak is None or byte_rate is None:
        peak, byte_rate, origin = max(point.flops_per_s for point in points), largest_copy.bytes_per_s, "this run"
    device_words = "an emulated device" if report.platform == "cpu" else f"one {report.device_kind}"
    title = f"Measured on {device_words}, under the rates of {origin}"
    return roofline_figure(peak_flops_per_s=peak, link_bytes_per_s={"memory": byte_rate}, points=points, title=title)


def _points(report: BenchReport, products: Sequence[Product]) -> list[RooflinePoint]:
    """Returns the smallest and largest product, every second fused chain, and the first, middle and last layer."""
    points = []
    for product in dict.fromkeys((products[0], products[-1])):
        intensity = 2 * product.n / (3 * DTYPE_BYTES[product.dtype])
        points.append(RooflinePoint(f"{product.dtype} product of {product.n}", intensity, product.flops_per_s))
    for chain in [chain for chain in report.elementwise.chains if chain.fused][::2] if report.elementwise else []:
        label = "1 multiply-add" if chain.repeats == 1 else f"{chain.repeats} fused"
        points.append(RooflinePoint(label, FLOPS_EACH * chain.repeats / (2 * ELEMENT_BYTES), chain.flops_per_s))
    batch = report.batch
    if batch is None or not batch.layers:
        return points
    for layer in dict.fromkeys((batch.layers[0], batch.layers[len(batch.layers) // 2], batch.layers[-1])):
        num_tokens = layer.tokens
        # The operands and the result of every product move once.
        shapes = [shard.shape for shard in weight_shards(batch.sizes, batch.dtype)]
        num_elements = sum(rows * columns + num_tokens * (rows + columns) for rows, columns in shapes)
        intensity = layer_flops(batch.sizes, num_tokens) / (num_elements * DTYPE_BYTES[batch.dtype])
        label = f"layer, {counted(num_tokens, 'token')}"
        points.append(RooflinePoint(label, intensity, layer.flops_per_s))
    return points


def _matmul(report: BenchReport) -> Figure | None:
    sweep = report.matmul.sweep if report.matmul else ()
    if not sweep:
        return None
    points_by_dtype: dict[str, list[tuple[float, float]]] = {}
    for product in sweep:
        points_by_dtype.setdefault(product.dtype, []).append((product.n, product.flops_per_s))
    peaks = {dtype: peak for dtype, peak in chip(report.chip).peak_flops.items() if dtype in points_by_dtype}
    peak_lines = [
        ReferenceLine(axis="y", value=peak, text=f"{dtype} peak {format_flops(peak)}") for dtype, peak in peaks.items()
    ]
    return curves_figure(
        points_by_dtype,
        x_title="side of a square product",
        y_title="FLOP/s of a device",
        title="Square products",
        subtitle=_where(report),
        references=peak_lines,
        x_ticks=[p.n for p in sweep],
    )


def _elementwise(report: BenchReport) -> Figure | None:
    elementwise = report.elementwise
    chains = elementwise.chains if elementwise else ()
    fused_chains, eager_chains = ([chain for chain in chains if chain.fused is is_fused] for is_fused in (True, False))
    if elementwise is None or len(fused_chains) < 2:
        return None
    scale, unit = si_scale(max(chain.seconds.median_s for chain in chains), "s")
    curves = {
        name: [(chain.repeats, chain.seconds.median_s / scale) for chain in chains_of_curve]
        for name, chains_of_curve in (("one kernel", fused_chains), ("op by op", eager_chains))
        if chains_of_curve
    }
    reference_lines = []
    if elementwise.doubles_at:
        reference_lines.append(_at(elementwise.doubles_at, "time doubles at"))
    if elementwise.predicted_at and 1 < elementwise.predicted_at < fused_chains[-1].repeats:
        reference_lines.append(_at(elementwise.predicted_at, "predicted", "end"))
    return curves_figure(
        curves,
        x_title="multiply-adds of every element",
        y_title=f"time ({unit})",
        title="How many multiply-adds fit before the time doubles",
        subtitle=_where(report),
        references=reference_lines,
        x_ticks=[chain.repeats for chain in fused_chains],
    )


def _at(value: float, label: str, at: Literal["start", "end"] = "start") -> ReferenceLine:
    return ReferenceLine(axis="x", value=value, text=f"{label} {value:.3g}", at=at)


def _batch_times(report: BenchReport) -> Figure | None:
    layers, knee = (report.batch.layers, report.batch.knee) if report.batch else ((), None)
    scale, unit = si_scale(max((layer.seconds.median_s for layer in layers), default=0.0), "s")
    curves = {"measured": [(float(layer.tokens), layer.seconds.median_s / scale) for layer in layers]}
    if knee:
        token_counts = sorted({knee.at, *(float(layer.tokens) for layer in layers)})
        curves["fitted"] = [(tokens, max(knee.floor, knee.slope * tokens) / scale) for tokens in token_counts]
    return _over_batch(report, curves, f"time of a layer ({unit})", "Time of a layer against the batch")


def _throughput(report: BenchReport) -> Figure | None:
    layers, curve_name = (report.batch.layers, f"{report.batch.dtype} layer") if report.batch else ((), "")
    curves = {curve_name: [(layer.tokens, layer.tokens_per_us) for layer in layers]}
    return _over_batch(report, curves, "tokens per us", "Tokens per us of a layer")


def _over_batch(report: BenchReport, curves: Mapping[str, Points], y_title: str, title: str) -> Figure | None:
    """Draws curves over tokens per device with the measured and predicted knee; None for fewer than two layers."""
    batch = report.batch
    if batch is None or len(batch.layers) < 2:
        return None
    token_counts = [layer.tokens for layer in batch.layers]
    reference_lines = []
    if batch.knee:
        reference_lines.append(_at(batch.knee.at, "knee"))
    if batch.predicted_knee and token_counts[0] < batch.predicted_knee < token_counts[-1]:
        reference_lines.append(_at(batch.predicted_knee, "critical batch", "end"))
    return curves_figure(
        curves,
        x_title="tokens of a device",
        y_title=y_title,
        title=title,
        subtitle=_where(report),
        references=reference_lines,
        x_ticks=token_counts,
    )


# -- collectives ----------------------------------------------------------------------------------------


def _collectives(report: BenchReport) -> Figure | None:
    """Draws measured time over bytes with the fitted lines: a panel per group, on equal axes. None if not measured."""
    rows = report.collectives.collectives if report.collectives else ()
    if not rows:
        return None
    array_sizes = [time.array_bytes for row in rows for time in row.times]
    times_us = [us for row in rows for time in row.times for us in (time.seconds.median_s * 1e6, time.fitted_s * 1e6)]
    x = log_axis(alt.X, "x", (min(array_sizes) / 1.5, max(array_sizes) * 1.5), "bytes of the array")
    rows_by_group: dict[tuple[str, int], list[Collective]] = {}
    for row in rows:
        rows_by_group.setdefault((row.group.axis, row.group.size), []).append(row)
    panels = []
    for panel_index, group_rows in enumerate(rows_by_group.values()):
        title = None if panel_index % COLUMNS else "time (us)"
        y = log_axis(alt.Y, "y", (min(times_us) / 1.5, max(times_us) * 1.5), title)
        panels.append(_panel(group_rows, x, y))
    title = "Collectives: measured, and the fitted latency and rate"
    return themed(alt.concat(*panels, columns=COLUMNS), title, _where(report))


def _panel(rows: Sequence[Collective], x: Encoding, y: Encoding) -> Layer:
    group = rows[0].group
    points = [
        {"name": BOOK_NAMES[row.kind], "x": time.array_bytes, "y": time.seconds.median_s * 1e6}
        for row in rows
        for time in row.times
    ]
    color_by_name = dict(zip((BOOK_NAMES[kind] for kind in COLLECTIVES), PALETTE, strict=False))
    color = color_by("name", color_by_name, orient="bottom", symbolType="circle", symbolOpacity=1)
    dots = plot(points).mark_point(filled=True, size=45, opacity=0.9).encode(x=x, y=y, color=color)
    panel_title = f"{group.size} devices" if group.axis == "group" else f"{group.axis}, {group.size} devices"
    fitted_lines = lines({BOOK_NAMES[row.kind]: _fitted(row) for row in rows}, x, y, color, strokeWidth=1.8)
    return panel(*fitted_lines, dots, size=PANEL_PX, title=panel_title)


def _fitted(collective: Collective) -> Points:
    """Returns points (bytes, us) of the fitted line, which is bent on logarithmic axes, over the measured sizes."""
    smallest, largest = collective.times[0], collective.times[-1]
    array_sizes = np.geomspace(smallest.array_bytes, largest.array_bytes, LINE_POINTS + 1)
    times_s = np.interp(array_sizes, (smallest.array_bytes, largest.array_bytes), (smallest.fitted_s, largest.fitted_s))
    return list(zip(array_sizes.tolist(), (1e6 * times_s).tolist(), strict=True))
