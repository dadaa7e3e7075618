"""What `bench` prints: a table for each part, and what was not measured."""

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from meshwright.cli.output import or_dash, print_fact, print_table, print_text
from meshwright.core.units import format_bytes, format_flops, format_seconds

if TYPE_CHECKING:
    from meshwright.bench.results import BenchReport

BUSY = "all devices busy, figures of one"


def print_report(report: "BenchReport") -> None:
    """Every part that was asked for, in the order of measuring."""
    print_fact("measured", f"{report.machine}, {report.date}; {BUSY}")
    versions = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    print_fact("with", f"{versions}; {report.took_s:.0f} s of {report.seconds:.0f}")
    if report.platform == "cpu":
        print_fact(
            "load before", f"{report.load:.1f} on {os.cpu_count()} cores: rates of a quiet machine need one near 0"
        )
    click.echo()
    for name, show in SHOWN.items():
        part = getattr(report, name)
        if part is not None:
            _print_notes([*show(part), *left_out_lines(part.left_out)])


def _print_notes(lines: list[str]) -> None:
    """What stands under a table, and an empty line after it as tables have."""
    for line in lines:
        print_text(line)
    if lines:
        click.echo()


def left_out_lines(lines: Sequence[str]) -> list[str]:
    """What was not measured, things with the same reason together."""
    reasons: dict[str, list[str]] = {}
    for line in lines:
        thing, _, why = line.rpartition(": ")
        reasons.setdefault(why, []).append(thing)
    return [f"not measured ({why}): {'; '.join(things)}" if all(things) else why for why, things in reasons.items()]


def _rate(value: float) -> str:
    return f"{format_bytes(value)}/s"


def _share(value: float) -> str:
    return f"{value:.1%}"


def _times(value: float) -> str:
    return f"{value:.3g}"


def _spread(timing: Any) -> str:
    return f"{timing.spread:.0%}"


def _columns(rows: list[list[Any]], names: list[str]) -> tuple[list[str], list[list[Any]]]:
    """Without the columns in which nothing is known."""
    kept = [i for i in range(len(names)) if any(row[i] not in (None, "-") for row in rows)]
    return [names[i] for i in kept], [[row[i] for i in kept] for row in rows]


def _print(names: list[str], rows: list[list[Any]], title: str) -> None:
    if rows:
        columns, cells = _columns(rows, names)
        print_table(columns, cells, title)
    else:
        print_text(title)


def _matmul(part: Any) -> list[str]:
    rows = [
        [p.dtype, p.n, format_seconds(p.seconds.median_s), _spread(p.seconds), format_flops(p.flops_per_s),
         or_dash(p.share_of_peak, _share)]
        for p in part.sweep
    ]  # fmt: skip
    _print(["dtype", "side", "time", "spread", "rate", "HFU"], rows, "Square products")
    edges = [
        [e.tile, e.product.n, format_seconds(e.product.seconds.median_s), format_flops(e.product.flops_per_s),
         _times(e.relative), _times(e.predicted)]
        for e in part.edges
    ]  # fmt: skip
    if edges:
        names = ["tile", "side", "time", "rate", "relative", "filled up"]
        _print(names, edges, f"Beside whole tiles, {part.edges[0].product.dtype}")
        return ["relative: to the rate of whole tiles; filled up: what computing whole tiles would leave of it"]
    return []


def _contents(part: Any) -> list[str]:
    normal = {p.dtype: p.seconds.median_s for p in part.products if p.contents == "normal"}
    rows = [
        [p.dtype, p.contents, p.n, format_seconds(p.seconds.median_s), _spread(p.seconds), format_flops(p.flops_per_s),
         _times(normal[p.dtype] / p.seconds.median_s) if p.dtype in normal else None]
        for p in part.products
    ]  # fmt: skip
    _print(["dtype", "numbers", "side", "time", "spread", "rate", "speed-up"], rows, "Contents of a product")
    return []


def _mlp(part: Any) -> list[str]:
    rows = [
        [m.tokens, f"{m.d_model} x {m.d_ff}", format_seconds(m.seconds.median_s), _spread(m.seconds),
         format_flops(m.flops_per_s), or_dash(m.mfu, _share), or_dash(m.of_matmul, _share)]
        for m in part.mlps
    ]  # fmt: skip
    dtype = f", {part.mlps[0].dtype}" if part.mlps else ""
    names = ["tokens", "D x F", "time", "spread", "rate", "MFU", "of products'"]
    _print(names, rows, f"Gated MLP forward and backward{dtype}")
    return []


def _elementwise(part: Any) -> list[str]:
    from meshwright.bench.figures.elementwise import describe_array

    fused = {c.repeats: c for c in part.chains if c.fused}
    eager = {c.repeats: c for c in part.chains if not c.fused}
    rows = []
    for repeats in sorted(fused | eager):
        one, several = fused.get(repeats), eager.get(repeats)
        rows.append([
            repeats,
            or_dash(one, lambda c: format_seconds(c.seconds.median_s)),
            or_dash(one, lambda c: _rate(c.bytes_per_s)),
            or_dash(one, lambda c: format_flops(c.flops_per_s)),
            or_dash(several, lambda c: format_seconds(c.seconds.median_s)),
            _times(several.seconds.median_s / one.seconds.median_s) if one and several else None,
        ])  # fmt: skip
    names = ["multiply-adds", "one kernel", "bytes", "rate", "op by op", "ratio"]
    _print(names, rows, f"Multiply-adds on an array of {describe_array(part)}")
    notes = []
    if part.doubles_at or part.predicted_at:
        measured = or_dash(part.doubles_at, lambda n: f"{n:.3g} multiply-adds")
        notes.append(f"time doubles at {measured}, predicted {or_dash(part.predicted_at, _times)}")
    if part.vector_flops_per_s:
        notes.append(f"vector rate {format_flops(part.vector_flops_per_s)}: {part.vector_source}")
    return notes


def _distance(part: Any) -> list[str]:
    rows = [
        [d.what, d.n, format_seconds(d.seconds.median_s), format_flops(d.flops_per_s), or_dash(d.ratio, _times),
         or_dash(d.predicted_s, format_seconds), or_dash(d.predicted_ratio, _times)]
        for d in part.distances
    ]  # fmt: skip
    names = ["", "m=k=n", "time", "2mkn/time", "x matmul", "predicted", "x matmul"]
    _print(names, rows, "What is no product, beside one, fp32")
    return []


def _copy(part: Any) -> list[str]:
    rows = [
        [c.kind, format_bytes(c.array_bytes), format_seconds(c.seconds.median_s), _spread(c.seconds),
         _rate(c.bytes_per_s)]
        for c in part.copies
    ]  # fmt: skip
    _print(["", "array", "time", "spread", "read and written"], rows, "Memory")
    return []


def _batch(part: Any) -> list[str]:
    rows = [
        [layer.tokens, format_seconds(layer.seconds.median_s), _spread(layer.seconds), f"{layer.tokens_per_us:.3g}",
         format_flops(layer.flops_per_s)]
        for layer in part.layers
    ]  # fmt: skip
    sizes = " ".join(f"{dim}={size}" for dim, size in part.sizes.items())
    _print(["tokens", "time", "spread", "tokens/us", "rate"], rows, f"Layer forward, {part.dtype}, {sizes}")
    knee = or_dash(part.knee, lambda k: f"{k.at:.3g} tokens (points off the fit by {k.error:.0%} in the median)")
    predicted = or_dash(part.predicted_knee, lambda n: f"{n:.3g}")
    from_rates = "FLOP/s of the fastest product over bytes/s of the largest copy, x bytes of a weight / 2"
    return [f"knee at {knee}", f"critical batch {predicted}: {from_rates}"] if part.layers else []


def _collectives(part: Any) -> list[str]:
    rows = []
    for one in part.collectives:
        large = one.times[-1]
        rows.append([
            one.kind, f"{one.group.axis}={one.group.size}",
            format_seconds(one.rate.latency_s), _rate(one.rate.bytes_per_s), f"{one.fit_error:.0%}",
            format_seconds(large.seconds.median_s), format_seconds(large.fitted_s),
            or_dash(large.datasheet_s, format_seconds),
        ])  # fmt: skip
    names = ["kind", "group", "latency", "received", "off", "largest", "fitted", "data sheet"]
    _print(names, rows, "Collectives: lines through every size")
    if not part.collectives:
        return []
    sizes = ", ".join(format_bytes(time.array_bytes) for time in part.collectives[0].times)
    return [f"sizes {sizes}; off: median distance of the points from the line; largest: time of the largest size"]


def _attention(part: Any) -> list[str]:
    rows = [
        [t.length, t.batch, format_seconds(t.forward.median_s), format_flops(t.forward_flops_per_s),
         format_seconds(t.both.median_s), format_flops(t.both_flops_per_s), or_dash(t.share_of_peak, _share)]
        for t in part.times
    ]  # fmt: skip
    names = ["length", "batch", "forward", "rate", "both", "rate", "HFU"]
    _print(names, rows, f"Attention, {part.dtype}, forward and both passes")
    return []


def _overhead(part: Any) -> list[str]:
    rows = [
        [one.num_arguments, format_seconds(one.launch.median_s), _spread(one.launch), format_seconds(one.wait.median_s)]
        for one in part.launches
    ]
    _print(["arguments", "launch", "spread", "launch and wait"], rows, "Host time of a launch")
    if not part.line:
        return []
    return [f"{format_seconds(part.line.start)}, and {format_seconds(part.line.slope)} for each argument"]


SHOWN: dict[str, Callable[[Any], list[str]]] = {
    "matmul": _matmul,
    "mlp": _mlp,
    "elementwise": _elementwise,
    "contents": _contents,
    "distance": _distance,
    "copy": _copy,
    "batch": _batch,
    "collectives": _collectives,
    "attention": _attention,
    "overhead": _overhead,
}
"""Part -> what prints its table and gives the notes under it."""
