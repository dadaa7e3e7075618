"""The report of `bench`: a table for each part, and what was not measured."""

import os
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

from meshwright.bench import results
from meshwright.cli.output import or_dash
from meshwright.core.units import format_bytes, format_flops, format_seconds
from meshwright.report.answer import Fact, Piece, Table

BUSY = "all devices busy, figures of one"

Value = str | Callable[[Any], Any]
BenchColumn = tuple[str, Value] | tuple[str, Value, Callable[[Any], str]]
"""A heading, the value of a row (an attribute path or a function), and its format."""

number, share, percent = "{:.3g}".format, "{:.1%}".format, "{:.0%}".format


def rate(value: float) -> str:
    """Formats bytes per second."""
    return f"{format_bytes(value)}/s"


TIME: BenchColumn = ("time", "seconds.median_s", format_seconds)
SPREAD: BenchColumn = ("spread", "seconds.spread", percent)
FLOPS: BenchColumn = ("rate", "flops_per_s", format_flops)


def report_text(report: results.BenchReport) -> Iterator[Piece]:
    """Yields every measured part, in the order of measuring."""
    yield Fact("measured", f"{report.machine}, {report.date}; {BUSY}")
    versions = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    yield Fact("with", f"{versions}; {report.took_s:.0f} s of {report.seconds:.0f}")
    if report.platform == "cpu":
        load = f"{report.load:.1f} on {os.cpu_count()} cores"
        yield Fact("load before", f"{load}: rates of a quiet machine need one near 0")
    yield ""
    for name, show in SHOWN.items():
        part = getattr(report, name)
        if part is not None:
            pieces = [*show(part), *left_out_lines(part.left_out)]
            yield from pieces
            if any(isinstance(piece, str) for piece in pieces[1:]):
                yield ""


def left_out_lines(lines: Sequence[str]) -> list[str]:
    """Returns a line for each reason, with everything that was not measured for it."""
    reasons: dict[str, list[str]] = {}
    for line in lines:
        thing, _, why = line.rpartition(": ")
        reasons.setdefault(why, []).append(thing)
    return [f"not measured ({why}): {'; '.join(things)}" if all(things) else why for why, things in reasons.items()]


def _text(title: str, rows: Sequence[Any], *columns: BenchColumn) -> Iterator[Piece]:
    """Yields a table without columns of unknown values; without rows its title alone."""
    known = []
    for heading, what, *show in columns:
        values = [(attrgetter(what) if isinstance(what, str) else what)(row) for row in rows]
        if any(value is not None for value in values):
            known.append((heading, [show[0](value) if show and value is not None else value for value in values]))
    if known:
        yield Table([heading for heading, _ in known], list(zip(*(cells for _, cells in known), strict=True)), title)
    else:
        yield title


def _matmul_text(part: results.MatmulPart) -> Iterator[Piece]:
    side = ("dtype", "dtype"), ("side", "n")
    yield from _text("Square products", part.sweep, *side, TIME, SPREAD, FLOPS, ("HFU", "share_of_peak", share))
    if not part.edges:
        return
    yield from _text(
        f"Beside whole tiles, {part.edges[0].product.dtype}",
        part.edges,
        ("tile", "tile"),
        ("side", "product.n"),
        ("time", "product.seconds.median_s", format_seconds),
        ("rate", "product.flops_per_s", format_flops),
        ("relative", "relative", number),
        ("filled up", "predicted", number),
    )
    yield "relative: to the rate of whole tiles; filled up: what computing whole tiles would leave of it"


def _contents_text(part: results.ContentsPart) -> Iterator[Piece]:
    normal = {p.dtype: p.seconds.median_s for p in part.products if p.contents == "normal"}
    speed_up = ("speed-up", lambda p: normal[p.dtype] / p.seconds.median_s if p.dtype in normal else None, number)
    numbers = ("dtype", "dtype"), ("numbers", "contents"), ("side", "n")
    yield from _text("Contents of a product", part.products, *numbers, TIME, SPREAD, FLOPS, speed_up)


def _mlp_text(part: results.MlpPart) -> Iterator[Piece]:
    title = ", ".join(["Gated MLP forward and backward", *(mlp.dtype for mlp in part.mlps[:1])])
    sizes = ("tokens", "tokens"), ("D x F", lambda mlp: f"{mlp.d_model} x {mlp.d_ff}")
    shares = ("MFU", "mfu", share), ("of products'", "of_matmul", share)
    yield from _text(title, part.mlps, *sizes, TIME, SPREAD, FLOPS, *shares)


def _elementwise_text(part: results.ElementwisePart) -> Iterator[Piece]:
    fused, eager = ({c.repeats: c for c in part.chains if c.fused == one} for one in (True, False))

    def of(chains: dict[int, results.ChainTime], name: str) -> Callable[[int], Any]:
        return lambda repeats: attrgetter(name)(chains[repeats]) if repeats in chains else None

    def ratio(repeats: int) -> float | None:
        both = repeats in fused and repeats in eager
        return eager[repeats].seconds.median_s / fused[repeats].seconds.median_s if both else None

    cache = f", cache {format_bytes(part.cache_bytes)}" if part.cache_bytes else ""
    yield from _text(
        f"Multiply-adds on an array of {format_bytes(part.elements * results.ELEMENT_BYTES)} a device{cache}",
        sorted(fused | eager),
        ("multiply-adds", int),
        ("one kernel", of(fused, "seconds.median_s"), format_seconds),
        ("bytes", of(fused, "bytes_per_s"), rate),
        ("rate", of(fused, "flops_per_s"), format_flops),
        ("op by op", of(eager, "seconds.median_s"), format_seconds),
        ("ratio", ratio, number),
    )
    notes = []
    if part.doubles_at or part.predicted_at:
        measured = or_dash(part.doubles_at, lambda n: f"{n:.3g} multiply-adds")
        notes.append(f"time doubles at {measured}, predicted {or_dash(part.predicted_at, number)}")
    if part.vector_flops_per_s:
        notes.append(f"vector rate {format_flops(part.vector_flops_per_s)}: {part.vector_source}")
    yield from notes


def _distance_text(part: results.DistancePart) -> Iterator[Piece]:
    yield from _text(
        "What is no product, beside one, fp32",
        part.distances,
        *(("", "what"), ("m=k=n", "n"), TIME, ("2mkn/time", "flops_per_s", format_flops)),
        ("x matmul", "ratio", number),
        ("predicted", "predicted_s", format_seconds),
        ("x matmul", "predicted_ratio", number),
    )


def _copy_text(part: results.CopyPart) -> Iterator[Piece]:
    array = ("", "kind"), ("array", "array_bytes", format_bytes)
    yield from _text("Memory", part.copies, *array, TIME, SPREAD, ("read and written", "bytes_per_s", rate))


def _batch_text(part: results.BatchPart) -> Iterator[Piece]:
    title = f"Layer forward, {part.dtype}, {' '.join(f'{dim}={size}' for dim, size in part.sizes.items())}"
    yield from _text(
        title, part.layers, ("tokens", "tokens"), TIME, SPREAD, ("tokens/us", "tokens_per_us", number), FLOPS
    )
    knee = or_dash(part.knee, lambda k: f"{k.at:.3g} tokens (points off the fit by {k.error:.0%} in the median)")
    from_rates = "FLOP/s of the fastest product over bytes/s of the largest copy, x bytes of a weight / 2"
    batch = or_dash(part.predicted_knee, number)
    if part.layers:
        yield f"knee at {knee}"
        yield f"critical batch {batch}: {from_rates}"


def _collectives_text(part: results.CollectivesPart) -> Iterator[Piece]:
    yield from _text(
        "Collectives: lines through every size",
        part.collectives,
        ("kind", "kind"),
        ("group", lambda one: f"{one.group.axis}={one.group.size}"),
        ("latency", "rate.latency_s", format_seconds),
        ("received", "rate.bytes_per_s", rate),
        ("off", "fit_error", percent),
        ("largest", lambda one: one.times[-1].seconds.median_s, format_seconds),
        ("fitted", lambda one: one.times[-1].fitted_s, format_seconds),
        ("data sheet", lambda one: one.times[-1].datasheet_s, format_seconds),
    )
    if not part.collectives:
        return
    sizes = ", ".join(format_bytes(time.array_bytes) for time in part.collectives[0].times)
    yield f"sizes {sizes}; off: median distance of the points from the line; largest: time of the largest size"


def _attention_text(part: results.AttentionPart) -> Iterator[Piece]:
    yield from _text(
        f"Attention, {part.dtype}, forward and both passes",
        part.times,
        ("length", "length"),
        ("batch", "batch"),
        ("forward", "forward.median_s", format_seconds),
        ("rate", "forward_flops_per_s", format_flops),
        ("both", "both.median_s", format_seconds),
        ("rate", "both_flops_per_s", format_flops),
        ("HFU", "share_of_peak", share),
    )


def _overhead_text(part: results.OverheadPart) -> Iterator[Piece]:
    yield from _text(
        "Host time of a launch",
        part.launches,
        ("arguments", "num_arguments"),
        ("launch", "launch.median_s", format_seconds),
        ("spread", "launch.spread", percent),
        ("launch and wait", "wait.median_s", format_seconds),
    )
    if not part.line:
        return
    yield f"{format_seconds(part.line.start)}, and {format_seconds(part.line.slope)} for each argument"


SHOWN: dict[str, Callable[[Any], Iterator[Piece]]] = {
    "matmul": _matmul_text,
    "mlp": _mlp_text,
    "elementwise": _elementwise_text,
    "contents": _contents_text,
    "distance": _distance_text,
    "copy": _copy_text,
    "batch": _batch_text,
    "collectives": _collectives_text,
    "attention": _attention_text,
    "overhead": _overhead_text,
}
"""Part -> function that gives its table and the notes under it."""
