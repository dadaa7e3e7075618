"""`meshwright bench`: measures the devices at hand and writes a calibration to plan with."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from meshwright.algebra.steps import BOOK_NAMES
from meshwright.bench import results
from meshwright.cli.output import busy_words, or_dash, say
from meshwright.cli.verb import MeshSizes, Options, argument, option, verb
from meshwright.core.dims import COLLECTIVES
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.files import cache_folder
from meshwright.core.units import counted, format_bytes, format_flops, format_rate, format_seconds
from meshwright.report.answer import Answer, Condition, Detail, Fact, Facts, Piece, PlainPiece, Table, TableColumns
from meshwright.spec.calibration import Calibration, save_calibration
from meshwright.spec.chip import chip as find_chip
from meshwright.spec.cluster import parse_cluster

if TYPE_CHECKING:
    import jax

RATES = ("matmul", "mlp", "copy", "collectives", "attention")
"""Parts whose rates a calibration holds."""


class Given(Options, group="Measuring"):
    what: tuple[str, ...] = argument()
    on: str | None = option("Emulated devices, such as cpu:8; by default all devices that JAX has.")
    seconds: float = option("Seconds for all parts.", type=click.FloatRange(min=0.5), default=60.0)
    dtypes: str | None = option("Element types of products, the main one first: bf16,fp8,int8.")
    mesh: MeshSizes | None = option("Mesh over whose axes collectives run: fsdp=4,tensor=2.")
    chip_name: str | None = option(
        "The chip of the devices by its name in the catalogue, if it is not recognised.", "--chip"
    )
    out: Path | None = option(
        "Write the measured rates (TOML), for plan --calibration.", "-o", "--out", group="Results"
    )
    png: Path | None = option("Draw the figures into this folder.", metavar="FOLDER", group="Results")


@verb(Given, needs="run")
def command(given: Given) -> Answer:
    """Measure rates of the devices at hand: WHAT of matmul, mlp, elementwise, contents, distance, copy, batch,
    collectives, attention, overhead; all by default. Each part gets a share of the seconds.
    """
    # a file that could not be written is refused before minutes of measuring
    if given.out is not None and given.what and not set(given.what) & set(RATES):
        raise InputError(f"-o needs rates, and {' '.join(given.what)} has none. Add one of {' '.join(RATES)}.")
    if given.out is not None and given.out.suffix != ".toml":
        raise InputError(f"-o {given.out}: a calibration is a .toml file.")
    if given.chip_name is not None:
        find_chip(given.chip_name)
    devices = _devices(given.on)
    from meshwright.bench.run import check_parts, make_bench, run_bench
    from meshwright.parallel.mesh import keep_compiled_programs

    check_parts(given.what)
    dtypes = [word.strip() for word in given.dtypes.split(",")] if given.dtypes is not None else []
    bench = make_bench(devices, chip=given.chip_name, dtypes=dtypes, axes=given.mesh or {})
    keep_compiled_programs(cache_folder())
    report = run_bench(bench, given.what, seconds=given.seconds)
    facts = {**msgspec.structs.asdict(report), "calibration": given.out}
    if given.out is not None:
        save_calibration(_calibration(report, given.out), given.out)
        say(f"wrote {given.out}")
    pictures: dict[Path | None, Any] = {}
    if given.png is not None:
        from meshwright.report.machine.bench import bench_figures

        pictures = {given.png / name: lambda figure=figure: figure for name, figure in bench_figures(report).items()}
    return Answer(facts, report_text(report), pictures)


def _devices(on: str | None) -> "list[jax.Device]":
    cluster = parse_cluster(on) if on is not None else None
    if cluster is not None and cluster.kind != "host":
        raise InputError(
            f"--on {on}: bench measures the devices at hand. Leave --on out where they are {cluster.chip.name}, or "
            f"emulate devices on the processor with cpu:8."
        )
    import jax

    from meshwright.parallel.mesh import emulate_devices

    if cluster is not None:
        emulate_devices(cluster.num_chips)
        return jax.devices()[: cluster.num_chips]
    try:
        return jax.devices()
    except RuntimeError as error:
        raise CannotRunError(f"JAX has no devices: {str(error).splitlines()[0]}") from None


def _calibration(report: results.BenchReport, output: Path) -> Calibration:
    """Returns the calibration; for emulated devices with rates inside a step, if no other rate of a step is missing."""
    from meshwright.bench.calibration import calibration_of

    rates = calibration_of(report)
    if not (rates.matmul_flops_per_s or rates.attention_flops_per_s or rates.memory_bytes_per_s or rates.collectives):
        raise CannotRunError(f"{output} is not written: no rate was measured. Give more --seconds.")
    if rates.chip != "cpu":
        return rates
    pairs = (("matmul", rates.matmul_flops_per_s), ("copy", rates.memory_bytes_per_s))
    measured = {rate.kind for rate in rates.collectives if rate.group_size == report.num_devices}
    needed_kinds = COLLECTIVES if report.num_devices > 1 else ()
    missing = [*(name for name, value in pairs if not value), *(kind for kind in needed_kinds if kind not in measured)]
    if missing:
        say(f"plan needs rates that {output} lacks: {', '.join(missing)}. Give more --seconds, or more parts.")
        return rates
    from meshwright.bench.machine import with_host_rates

    say("training steps under the profiler, about a minute more: emulated devices are slower inside a step")
    return with_host_rates(rates, lambda line: say(f"  {line}"))


# -- what is printed: a figure or two of each part; with `--all`, and of one or two parts, their tables ---------

number, share, percent = "{:.3g}".format, "{:.1%}".format, "{:.0%}".format
TIMED: TableColumns = {"time": "seconds.median_s", "spread": ("seconds.spread", percent)}
PRODUCT: TableColumns = {**TIMED, "rate": "flops_per_s"}
MOST_TABLES = 2
"""Parts whose tables are printed without ``--all``."""


def report_text(report: results.BenchReport) -> Iterator[Piece]:
    """Yields the tables of the measured parts, or their main figures if there are many parts; then the machine."""
    parts = {name: part for name in SHOWN if (part := getattr(report, name)) is not None}
    tables: list[PlainPiece] = []
    for name, part in parts.items():
        tables += [*SHOWN[name](part), *left_out_lines(part.left_out), ""]
    if len(parts) <= MOST_TABLES:
        yield from tables
    else:
        yield from (Fact(label, text, 42) for label, text in _main_figures(report))
        yield Detail(f"the tables of {len(parts)} parts", ["", *tables])
        if num_left_out := sum(len(part.left_out) for part in parts.values()):
            yield Condition(f"{counted(num_left_out, 'figure')} not measured: --all says which and why")
    yield from busy_words(report.load)
    yield Condition(f"{report.machine}, {report.date}; figures of one device while all are busy")
    versions_text = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    yield Condition(f"{versions_text}; took {report.took_s:.0f} s of {report.seconds:g}")


def _main_figures(report: results.BenchReport) -> Iterator[tuple[str, str]]:
    """Yields (label, text) of the main figures of every measured part."""
    matmul, batch, collectives = report.matmul, report.batch, report.collectives
    for dtype in dict.fromkeys(product.dtype for product in matmul.sweep) if matmul else ():
        if matmul and (best := matmul.best(dtype)):
            hfu_text = "" if best.share_of_peak is None else f", {best.share_of_peak:.0%} of the data sheet's peak"
            yield f"fastest {dtype} product", f"{format_flops(best.flops_per_s)}, side {best.n:,}{hfu_text}"
    if report.mlp and report.mlp.mlps:
        mlp = max(report.mlp.mlps, key=lambda mlp: mlp.flops_per_s)
        yield f"gated MLP with its gradients, {mlp.dtype}", f"{format_flops(mlp.flops_per_s)}, {mlp.tokens:,} tokens"
    if report.attention and report.attention.times:
        attention = max(report.attention.times, key=lambda time: time.both_flops_per_s)
        rate_text = f"{format_flops(attention.both_flops_per_s)}, length {attention.length:,}"
        yield f"attention with its gradients, {report.attention.dtype}", rate_text
    if report.copy and (copy := report.copy.largest()):
        yield "memory, read and written", f"{format_rate(copy.bytes_per_s)}, array of {format_bytes(copy.array_bytes)}"
    if batch and batch.knee:
        yield (
            "tokens above which a layer takes longer",
            f"{batch.knee.at:.3g}, predicted {or_dash(batch.predicted_knee, number)}",
        )
    if report.elementwise and (doubles_at := report.elementwise.doubles_at):
        yield "fused multiply-adds that double the time", f"{doubles_at:.3g}"
    for row in collectives.collectives if collectives else ():
        if collectives and row.group == collectives.collectives[0].group:
            rate_text = f"{format_seconds(row.rate.latency_s)} + bytes at {format_rate(row.rate.bytes_per_s)}"
            yield f"{BOOK_NAMES[row.kind]} over {row.group.size} devices", rate_text
    if report.overhead and report.overhead.line:
        yield "host time of a launch", format_seconds(report.overhead.line.start)


def left_out_lines(lines: Sequence[str]) -> list[str]:
    """Returns a line for each reason, with everything that was not measured for that reason."""
    by_reason: dict[str, list[str]] = {}
    for line in lines:
        thing, _, why = line.rpartition(": ")
        by_reason.setdefault(why, []).append(thing)
    return [f"not measured ({why}): {'; '.join(things)}" if all(things) else why for why, things in by_reason.items()]


def _table(title: str, rows: Sequence[Any], columns: TableColumns) -> Table | str:
    """Returns a table without columns of unknown values; without rows its title alone."""
    table = Table.of(rows, columns, title).known()
    return table if table.columns else title


def _matmul_text(part: results.MatmulPart) -> Iterator[PlainPiece]:
    columns: TableColumns = {"dtype": "dtype", "side": "n", **PRODUCT, "HFU": ("share_of_peak", share)}
    yield _table("Square products", part.sweep, columns)
    if not part.edges:
        return
    columns = {
        "tile": "tile", "side": "product.n", "time": "product.seconds.median_s", "rate": "product.flops_per_s",
        "of whole tiles": ("relative", number), "predicted": ("predicted", number),
    }  # fmt: skip
    yield _table(f"Rates of partial tiles over that of whole ones, {part.edges[0].product.dtype}", part.edges, columns)
    yield "predicted: as if partial tiles cost as much as whole ones"


def _elementwise_text(part: results.ElementwisePart) -> Iterator[PlainPiece]:
    fused_at, eager_at = ({c.repeats: c for c in part.chains if c.fused == is_fused} for is_fused in (True, False))
    rows = [{"repeats": n, "fused": fused_at.get(n), "eager": eager_at.get(n)} for n in sorted(fused_at | eager_at)]
    cache_text = f", cache {format_bytes(part.cache_bytes)}" if part.cache_bytes else ""
    title = f"Multiply-adds on an array of {format_bytes(part.elements * results.ELEMENT_BYTES)} a device{cache_text}"

    def times_fused(row: Facts) -> float | None:
        fused, eager = row["fused"], row["eager"]
        return float(eager.seconds.median_s / fused.seconds.median_s) if fused and eager else None

    columns: TableColumns = {
        "multiply-adds": ("repeats", None, "multiply-adds"),
        "one kernel": ("fused.seconds.median_s", None, "fused_s"), "bytes": "fused.bytes_per_s",
        "rate": "fused.flops_per_s", "op by op": ("eager.seconds.median_s", None, "eager_s"),
        "ratio": (times_fused, number),
    }  # fmt: skip
    yield _table(title, rows, columns)
    if part.doubles_at or part.predicted_at:
        measured_text = or_dash(part.doubles_at, lambda n: f"{n:.3g} multiply-adds")
        yield f"time doubles at {measured_text}, predicted {or_dash(part.predicted_at, number)}"
    if part.vector_flops_per_s:
        yield f"vector rate {format_flops(part.vector_flops_per_s)}: {part.vector_source}"


def _batch_text(part: results.BatchPart) -> Iterator[PlainPiece]:
    title = f"Layer forward, {part.dtype}, {' '.join(f'{dim}={size}' for dim, size in part.sizes.items())}"
    yield _table(title, part.layers, {"tokens": "tokens", "tokens/us": ("tokens_per_us", number), **PRODUCT})
    if part.layers:
        knee = or_dash(part.knee, lambda k: f"{k.at:.3g} tokens (points off the fit by {k.error:.0%} in the median)")
        yield f"knee at {knee}"
        yield (
            f"critical batch {or_dash(part.predicted_knee, number)}: FLOP/s of the fastest product over bytes/s of a "
            f"copy as large as the weights, x bytes of a weight / 2"
        )


def _collectives_text(part: results.CollectivesPart) -> Iterator[PlainPiece]:
    columns: TableColumns = {
        "kind": "kind", "group": lambda row: f"{row.group.axis}={row.group.size}", "latency": "rate.latency_s",
        "received": "rate.bytes_per_s", "error": ("fit_error", percent),
        "largest": (lambda row: row.times[-1].seconds.median_s, format_seconds, "time_s"),
        "fitted": (lambda row: row.times[-1].fitted_s, format_seconds, "fitted_s"),
        "data sheet": (lambda row: row.times[-1].datasheet_s, format_seconds, "datasheet_s"),
    }  # fmt: skip
    yield _table("Collectives: lines through every size", part.collectives, columns)
    if not part.collectives:
        return
    sizes_text = ", ".join(format_bytes(time.array_bytes) for time in part.collectives[0].times)
    yield f"sizes {sizes_text}; error: median distance of the points from the line; largest: time of the largest size"


def _contents_text(part: results.ContentsPart) -> Iterator[PlainPiece]:
    normal_s = {row.dtype: row.seconds.median_s for row in part.products if row.contents == "normal"}

    def speed_up(row: Any) -> float | None:
        return normal_s[row.dtype] / row.seconds.median_s if row.dtype in normal_s else None

    columns: TableColumns = {"dtype": "dtype", "numbers": "contents", "side": "n", **PRODUCT}
    yield _table("Contents of a product", part.products, {**columns, "speed-up": (speed_up, number, "speed_up")})


def _distance_text(part: results.DistancePart) -> Iterator[PlainPiece]:
    yield _table("Combinations of two matrices beside their product, fp32", part.distances, DISTANCE)
    if any(row.predicted_s for row in part.distances):
        yield "predicted: the arithmetic alone, at the vector rate with operands in registers; loads come on top"


def _overhead_text(part: results.OverheadPart) -> Iterator[PlainPiece]:
    yield _table("Host time of a launch", part.launches, LAUNCH)
    if part.line:
        yield f"{format_seconds(part.line.start)}, and {format_seconds(part.line.slope)} for each argument"


MLP: TableColumns = {
    "tokens": "tokens", "D x F": (lambda mlp: [mlp.d_model, mlp.d_ff], "{0[0]} x {0[1]}".format, "d_model_d_ff"),
    **PRODUCT, "MFU": ("mfu", share), "of the fastest": ("of_matmul", share),
}  # fmt: skip
DISTANCE: TableColumns = {
    "": "what", "m=k=n": "n", **TIMED, "2mkn/time": "flops_per_s", "x matmul": ("ratio", number),
    "predicted": "predicted_s", "x matmul, predicted": ("predicted_ratio", number),
}  # fmt: skip
COPY: TableColumns = {"": "kind", "array": "array_bytes", **TIMED, "read and written": "bytes_per_s"}
ATTENTION: TableColumns = {
    "length": "length", "batch": "batch", "forward": "forward.median_s", "rate": "forward_flops_per_s",
    "both": "both.median_s", "rate of both": "both_flops_per_s", "HFU": ("share_of_peak", share),
}  # fmt: skip
LAUNCH: TableColumns = {
    "arguments": "num_arguments", "launch": "launch.median_s", "spread": ("launch.spread", percent),
    "launch and wait": "wait.median_s",
}  # fmt: skip
SHOWN: dict[str, Callable[[Any], Iterable[PlainPiece]]] = {
    "matmul": _matmul_text,
    "mlp": lambda part: [
        _table(", ".join(["Gated MLP, forward and backward", *(mlp.dtype for mlp in part.mlps[:1])]), part.mlps, MLP)
    ],
    "elementwise": _elementwise_text,
    "contents": _contents_text,
    "distance": _distance_text,
    "copy": lambda part: [_table("Memory", part.copies, COPY)],
    "batch": _batch_text,
    "collectives": _collectives_text,
    "attention": lambda part: [_table(f"Attention, {part.dtype}, forward and both passes", part.times, ATTENTION)],
    "overhead": _overhead_text,
}
"""Part -> function that gives its table and the notes under it."""
