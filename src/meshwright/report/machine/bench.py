"""Pictures of a benchmark: the roofline with what was measured, sweeps of sizes, the knee of the batch."""

from collections.abc import Sequence

import msgspec
import numpy as np

from meshwright.bench.figures.batch import BatchPart, layer_flops, weight_blocks
from meshwright.bench.figures.collectives import Collective
from meshwright.bench.figures.elementwise import ELEMENT_BYTES, FLOPS_EACH
from meshwright.bench.figures.matmul import Product
from meshwright.bench.machine import COLLECTIVES
from meshwright.bench.run import BenchReport
from meshwright.core.dims import DTYPE_BYTES
from meshwright.core.units import format_count, format_flops
from meshwright.report.curves import curves_figure
from meshwright.report.figure import PALETTE, Channel, Layer, Spec, alt, headline, si_scale, themed
from meshwright.report.marks import Curve, Mark, color_by, lines, log_axis, plot
from meshwright.report.roofline import RooflinePoint, roofline_figure
from meshwright.spec.chip import chip

PANEL_PX = {"width": 250, "height": 300}
COLUMNS = 3
LINE_POINTS = 40
NAMES = {
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "all_reduce": "AllReduce",
    "all_to_all": "AllToAll",
    "permute": "Permute",
}


def bench_figures(report: BenchReport) -> dict[str, Spec]:
    """File name -> picture, for every part that has enough points."""
    parts = {
        "roofline.png": _roofline,
        "matmul.png": _matmul,
        "elementwise.png": _elementwise,
        "batch.png": _batch_times,
        "throughput.png": _throughput,
        "collectives.png": _collectives,
    }
    made = {name: draw(report) for name, draw in parts.items()}
    return {name: figure for name, figure in made.items() if figure is not None}


def _where(report: BenchReport) -> str:
    return f"{report.machine}, {report.date[:10]}"


def _roofline(report: BenchReport) -> Spec | None:
    """Products, chains of multiply-adds and layers over their FLOPs per byte, under the data sheet's rates, or those of
    this run where there are none."""
    products = report.matmul.sweep if report.matmul else ()
    largest = report.copy.largest() if report.copy else None
    main = [p for p in products if p.dtype == products[0].dtype]
    if not main or largest is None:
        return None
    sheet = chip(report.chip)
    points = [*_product_points(main), *_chain_points(report), *_layer_points(report.batch)]
    peak, memory, whose = sheet.peak_flops.get(main[0].dtype), sheet.hbm_bytes_per_s, "the data sheet"
    if peak is None or memory is None:
        peak, memory, whose = max(point.flops_per_s for point in points), largest.bytes_per_s, "this run"
    what = "an emulated device" if report.platform == "cpu" else f"one {report.device_kind}"
    title = f"Measured on {what}, under the rates of {whose}"
    return roofline_figure(peak_flops_per_s=peak, link_bytes_per_s={"memory": memory}, points=points, title=title)


def _product_points(products: list[Product]) -> list[RooflinePoint]:
    """The smallest and the largest of a sweep."""
    return [
        RooflinePoint(
            label=f"{p.dtype} product of {p.n}",
            intensity=2 * p.n**3 / (3 * p.n**2 * DTYPE_BYTES[p.dtype]),
            flops_per_s=p.flops_per_s,
        )
        for p in ([products[0], products[-1]] if len(products) > 1 else products)
    ]


def _chain_points(report: BenchReport) -> list[RooflinePoint]:
    chains = [c for c in report.elementwise.chains if c.fused] if report.elementwise else []
    return [
        RooflinePoint(
            label="1 multiply-add" if c.repeats == 1 else f"{c.repeats} fused",
            intensity=FLOPS_EACH * c.repeats / (2 * ELEMENT_BYTES),
            flops_per_s=c.flops_per_s,
        )
        for c in chains[::2]
    ]


def _layer_points(part: BatchPart | None) -> list[RooflinePoint]:
    layers = part.layers if part else ()
    if not layers or part is None:
        return []
    chosen = {0: layers[0], len(layers) // 2: layers[len(layers) // 2], len(layers) - 1: layers[-1]}
    return [
        RooflinePoint(
            label=f"layer, {format_count(layer.tokens)} token{'s' if layer.tokens > 1 else ''}",
            intensity=layer_flops(part.sizes, layer.tokens) / _layer_bytes(part, layer.tokens),
            flops_per_s=layer.flops_per_s,
        )
        for layer in chosen.values()
    ]


def _layer_bytes(part: BatchPart, tokens: int) -> float:
    """Operands and results of every product of a layer."""
    shapes = [block.shape for block in weight_blocks(part.sizes, part.dtype)]
    elements = sum(rows * columns + tokens * (rows + columns) for rows, columns in shapes)
    return elements * DTYPE_BYTES[part.dtype]


def _matmul(report: BenchReport) -> Spec | None:
    sweep = report.matmul.sweep if report.matmul else ()
    if not sweep:
        return None
    by_dtype: dict[str, list[Product]] = {}
    for product in sweep:
        by_dtype.setdefault(product.dtype, []).append(product)
    curves = [
        Curve(name=dtype, x=tuple(p.n for p in products), y=tuple(p.flops_per_s for p in products))
        for dtype, products in by_dtype.items()
    ]
    peaks = {dtype: peak for dtype, peak in chip(report.chip).peak_flops.items() if dtype in by_dtype}
    marks: list[Mark] = []
    for dtype in (dtype for dtype in by_dtype if dtype in peaks):
        near = next((mark for mark in marks if abs(mark.value / peaks[dtype] - 1) < 0.25), None)
        if near is None:
            marks.append(Mark(axis="y", value=peaks[dtype], text=f"{dtype} peak {format_flops(peaks[dtype])}"))
        else:
            # One mark for peaks that are alike, whose words would lie on each other.
            marks[marks.index(near)] = msgspec.structs.replace(near, text=f"{dtype}, {near.text}")
    return curves_figure(
        curves,
        x_title="side of a square product",
        y_title="FLOP/s of a device",
        title="Square products",
        subtitle=_where(report),
        marks=marks,
        x_ticks=[p.n for p in sweep],
    )


def _elementwise(report: BenchReport) -> Spec | None:
    part = report.elementwise
    chains = part.chains if part else ()
    fused, eager = ([chain for chain in chains if chain.fused is wanted] for wanted in (True, False))
    if part is None or len(fused) < 2:
        return None
    scale, unit = si_scale(max(chain.seconds.median_s for chain in chains), "s")
    curves = [
        Curve(
            name=name,
            x=tuple(chain.repeats for chain in chosen),
            y=tuple(chain.seconds.median_s / scale for chain in chosen),
        )
        for name, chosen in (("one kernel", fused), ("op by op", eager))
        if chosen
    ]
    marks = []
    if part.doubles_at:
        marks.append(Mark(axis="x", value=part.doubles_at, text=f"time doubles at {part.doubles_at:.3g}"))
    if part.predicted_at and 1 < part.predicted_at < max(curves[0].x):
        marks.append(Mark(axis="x", value=part.predicted_at, text=f"predicted {part.predicted_at:.3g}", at="end"))
    return curves_figure(
        curves,
        x_title="multiply-adds of every element",
        y_title=f"time ({unit})",
        title="How many multiply-adds fit before the time doubles",
        subtitle=_where(report),
        marks=marks,
        x_ticks=curves[0].x,
    )


def _batch_times(report: BenchReport) -> Spec | None:
    layers = report.batch.layers if report.batch else ()
    scale, unit = si_scale(max((layer.seconds.median_s for layer in layers), default=0.0), "s")
    tokens = tuple(float(layer.tokens) for layer in layers)
    curves = [Curve(name="measured", x=tokens, y=tuple(layer.seconds.median_s / scale for layer in layers))]
    knee = report.batch.knee if report.batch else None
    if knee:
        xs = tuple(sorted({*tokens, knee.at}))
        curves.append(Curve(name="fitted", x=xs, y=tuple(max(knee.floor, knee.slope * x) / scale for x in xs)))
    return _over_batch(report, curves, f"time of a layer ({unit})", "Time of a layer against the batch")


def _throughput(report: BenchReport) -> Spec | None:
    layers = report.batch.layers if report.batch else ()
    name = f"{report.batch.dtype} layer" if report.batch else ""
    curve = Curve(name=name, x=tuple(one.tokens for one in layers), y=tuple(one.tokens_per_us for one in layers))
    return _over_batch(report, [curve], "tokens per us", "Tokens per us of a layer")


def _over_batch(report: BenchReport, curves: Sequence[Curve], y_title: str, title: str) -> Spec | None:
    """Curves over the tokens of a device with the measured and the predicted knee; None for less than two layers."""
    part = report.batch
    if part is None or len(part.layers) < 2:
        return None
    tokens = [layer.tokens for layer in part.layers]
    marks = []
    if part.knee:
        marks.append(Mark(axis="x", value=part.knee.at, text=f"knee {part.knee.at:.3g}"))
    if part.predicted_knee and tokens[0] < part.predicted_knee < tokens[-1]:
        text = f"critical batch {part.predicted_knee:.3g}"
        marks.append(Mark(axis="x", value=part.predicted_knee, text=text, at="end"))
    return curves_figure(
        curves,
        x_title="tokens of a device",
        y_title=y_title,
        title=title,
        subtitle=_where(report),
        marks=marks,
        x_ticks=tokens,
    )


# -- collectives ----------------------------------------------------------------------------------------


def _collectives(report: BenchReport) -> Spec | None:
    """Seconds over bytes, points with the fitted lines; a panel of equal axes for each group of devices."""
    found = report.collectives.collectives if report.collectives else ()
    if not found:
        return None
    sizes = [time.array_bytes for one in found for time in one.times]
    # An axis of microseconds: the smallest collectives take a few, the largest some thousands.
    times = [us for one in found for time in one.times for us in (time.seconds.median_s * 1e6, time.fitted_s * 1e6)]
    x = log_axis(alt.X, "x", (min(sizes) / 1.5, max(sizes) * 1.5), "bytes of the array")
    groups: dict[tuple[str, int], list[Collective]] = {}
    for one in found:
        groups.setdefault((one.group.axis, one.group.size), []).append(one)
    panels = []
    for number, own in enumerate(groups.values()):
        title = None if number % COLUMNS else "time (us)"
        y = log_axis(alt.Y, "y", (min(times) / 1.5, max(times) * 1.5), title)
        panels.append(_panel(own, x, y))
    title = "Collectives: measured, and the fitted latency and rate"
    return themed(alt.concat(*panels, columns=COLUMNS), title, _where(report))


def _panel(found: Sequence[Collective], x: Channel, y: Channel) -> Layer:
    group = found[0].group
    points = [
        {"name": NAMES[one.kind], "x": time.array_bytes, "y": time.seconds.median_s * 1e6}
        for one in found
        for time in one.times
    ]
    colors = dict(zip((NAMES[kind] for kind in COLLECTIVES), PALETTE, strict=False))
    color = color_by("name", colors, orient="bottom", symbolType="circle", symbolOpacity=1)
    dots = plot(points).mark_point(filled=True, size=45, opacity=0.9).encode(x=x, y=y, color=color)
    name = f"{group.size} devices" if group.axis == "group" else f"{group.axis}, {group.size} devices"
    chart = alt.layer(*lines([_fitted(one) for one in found], x, y, color, strokeWidth=1.8), dots)
    return chart.properties(title=headline(name, fontSize=13, anchor="middle", offset=6), **PANEL_PX)


def _fitted(one: Collective) -> Curve:
    """The fitted line between the smallest and the largest size: of latency and rate, so that it bends on log axes."""
    first, last = one.times[0], one.times[-1]
    sizes = np.geomspace(first.array_bytes, last.array_bytes, LINE_POINTS + 1)
    seconds = np.interp(sizes, (first.array_bytes, last.array_bytes), (first.fitted_s, last.fitted_s))
    return Curve(name=NAMES[one.kind], x=tuple(sizes.tolist()), y=tuple((1e6 * seconds).tolist()))
