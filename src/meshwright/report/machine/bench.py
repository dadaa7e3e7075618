"""Pictures of a benchmark: the roofline with what was measured, sweeps of sizes, the knee of the batch."""

from collections.abc import Sequence

import msgspec

from meshwright.bench.results import ELEMENT_BYTES, BatchPart, BenchReport, Product
from meshwright.bench.workloads import FLOPS_EACH, layer_flops, weight_shards
from meshwright.core.dims import DTYPE_BYTES
from meshwright.core.units import format_count, format_flops
from meshwright.report.curves import Curve, Mark, curves_figure
from meshwright.report.figure import Spec, si_scale
from meshwright.report.machine.bench_collectives import collectives_figure
from meshwright.report.roofline import RooflinePoint, roofline_figure
from meshwright.spec.chip import chip

__all__ = ["bench_figures"]


def bench_figures(report: BenchReport) -> dict[str, Spec]:
    """File name -> picture, for every part that has enough points."""
    made = {
        "roofline.png": _roofline(report),
        "matmul.png": _matmul(report),
        "elementwise.png": _elementwise(report),
        "batch.png": _batch_times(report),
        "throughput.png": _throughput(report),
        "collectives.png": collectives_figure(report.collectives, subtitle=_where(report))
        if report.collectives and report.collectives.collectives
        else None,
    }
    return {name: spec for name, spec in made.items() if spec is not None}


def _with_ticks(spec: Spec, values: Sequence[float]) -> Spec:
    """A picture of curves whose horizontal axis is labelled at the sizes that were measured."""
    axis = spec["layer"][0]["encoding"]["x"]["axis"]
    axis |= {
        "values": sorted({*values}),
        "labelExpr": "format(datum.value, ',d')",
        "labelOverlap": True,
        "labelFlush": False,
    }
    return spec


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
    shapes = [shard.shape for shard in weight_shards(part.sizes, part.dtype)]
    elements = sum(rows * columns + tokens * (rows + columns) for rows, columns in shapes)
    return elements * DTYPE_BYTES[part.dtype]


def _matmul(report: BenchReport) -> Spec | None:
    sweep = report.matmul.sweep if report.matmul else ()
    if not sweep:
        return None
    curves = [
        Curve(
            name=dtype,
            x=tuple(p.n for p in sweep if p.dtype == dtype),
            y=tuple(p.flops_per_s for p in sweep if p.dtype == dtype),
        )
        for dtype in dict.fromkeys(p.dtype for p in sweep)
    ]
    peaks = chip(report.chip).peak_flops
    marks = [
        Mark(axis="y", value=peaks[c.name], text=f"{c.name} peak {format_flops(peaks[c.name])}")
        for c in curves
        if c.name in peaks
    ]
    spec = curves_figure(
        curves, x_title="side of a square product", y_title="FLOP/s of a device", title="Square products",
        subtitle=_where(report), marks=_apart(marks),
    )  # fmt: skip
    return _with_ticks(spec, [p.n for p in sweep])


def _apart(marks: list[Mark]) -> list[Mark]:
    """One mark for peaks that are alike, whose words would lie on each other."""
    kept: list[Mark] = []
    for mark in marks:
        near = next((i for i, other in enumerate(kept) if abs(other.value / mark.value - 1) < 0.25), None)
        if near is None:
            kept.append(mark)
        else:
            text = f"{mark.text.split()[0]}, {kept[near].text}"
            kept[near] = msgspec.structs.replace(kept[near], text=text)
    return kept


def _elementwise(report: BenchReport) -> Spec | None:
    part = report.elementwise
    if part is None or len([c for c in part.chains if c.fused]) < 2:
        return None
    scale, unit = si_scale(max(c.seconds.median_s for c in part.chains), "s")
    curves = [
        Curve(
            name=name,
            x=tuple(c.repeats for c in part.chains if c.fused == fused),
            y=tuple(c.seconds.median_s / scale for c in part.chains if c.fused == fused),
        )
        for name, fused in (("one kernel", True), ("op by op", False))
        if any(c.fused == fused for c in part.chains)
    ]
    marks = []
    most = max(curves[0].x)
    if part.doubles_at:
        marks.append(Mark(axis="x", value=part.doubles_at, text=f"time doubles at {part.doubles_at:.3g}"))
    if part.predicted_at and 1 < part.predicted_at < most:
        marks.append(Mark(axis="x", value=part.predicted_at, text=f"predicted {part.predicted_at:.3g}", at="end"))
    spec = curves_figure(
        curves, x_title="multiply-adds of every element", y_title=f"time ({unit})",
        title="How many multiply-adds fit before the time doubles", subtitle=_where(report), marks=marks,
    )  # fmt: skip
    return _with_ticks(spec, curves[0].x)


def _knee_marks(part: BatchPart) -> list[Mark]:
    marks = []
    first, last = part.layers[0].tokens, part.layers[-1].tokens
    if part.knee:
        marks.append(Mark(axis="x", value=part.knee.at, text=f"knee {part.knee.at:.3g}"))
    if part.predicted_knee and first < part.predicted_knee < last:
        text = f"critical batch {part.predicted_knee:.3g}"
        marks.append(Mark(axis="x", value=part.predicted_knee, text=text, at="end"))
    return marks


def _batch_times(report: BenchReport) -> Spec | None:
    part = report.batch
    if part is None or len(part.layers) < 2:
        return None
    scale, unit = si_scale(max(layer.seconds.median_s for layer in part.layers), "s")
    tokens = tuple(float(layer.tokens) for layer in part.layers)
    curves = [Curve(name="measured", x=tokens, y=tuple(layer.seconds.median_s / scale for layer in part.layers))]
    knee = part.knee
    if knee:
        xs = tuple(sorted({*tokens, knee.at}))
        curves.append(Curve(name="fitted", x=xs, y=tuple(max(knee.floor, knee.slope * x) / scale for x in xs)))
    spec = curves_figure(
        curves, x_title="tokens of a device", y_title=f"time of a layer ({unit})",
        title="Time of a layer against the batch", subtitle=_where(report), marks=_knee_marks(part),
    )  # fmt: skip
    return _with_ticks(spec, [layer.tokens for layer in part.layers])


def _throughput(report: BenchReport) -> Spec | None:
    part = report.batch
    if part is None or len(part.layers) < 2:
        return None
    curve = Curve(
        name=f"{part.dtype} layer",
        x=tuple(layer.tokens for layer in part.layers),
        y=tuple(layer.tokens_per_us for layer in part.layers),
    )
    spec = curves_figure(
        [curve], x_title="tokens of a device", y_title="tokens per us", title="Tokens per us of a layer",
        subtitle=_where(report), marks=_knee_marks(part),
    )  # fmt: skip
    return _with_ticks(spec, [layer.tokens for layer in part.layers])
