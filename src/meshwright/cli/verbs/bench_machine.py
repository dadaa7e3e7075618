"""`meshwright bench`: measures the devices at hand and writes a calibration to plan with."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from meshwright.bench import results
from meshwright.cli.output import or_dash, say
from meshwright.cli.verb import MeshSizes, Options, argument, option, verb
from meshwright.core.dims import COLLECTIVES
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.files import cache_folder
from meshwright.core.units import format_bytes, format_flops, format_seconds
from meshwright.report.answer import Answer, Fact, Facts, Piece, Table, TableColumns
from meshwright.spec.calibration import Calibration, save_calibration
from meshwright.spec.chip import chip as find_chip
from meshwright.spec.cluster import parse_cluster

if TYPE_CHECKING:
    import jax

RATES = ("matmul", "mlp", "copy", "collectives", "attention")
"""Parts whose rates a calibration holds."""


class Given(Options):
    what: tuple[str, ...] = argument()
    on: str | None = option("Emulated devices, such as cpu:8; by default all devices that JAX has.")
    seconds: float = option("Seconds for all parts.", type=click.FloatRange(min=0.5), default=60.0)
    dtypes: str | None = option("Element types of products, the main one first: bf16,fp8,int8.")
    mesh: MeshSizes | None = option("Measure collectives over its axes: fsdp=4,tensor=2.")
    chip_name: str | None = option("Name of the devices' chip in the catalogue, if it is not recognised.", "--chip")
    out: Path | None = option("Write a calibration (TOML) for plan.", "-o", "--out")
    png: Path | None = option("Draw into this folder.", metavar="FOLDER")


@verb(Given, needs="run")
def command(given: Given) -> Answer:
    """Measure the devices at hand: WHAT of matmul mlp elementwise contents distance copy batch collectives attention
    overhead, all by default. Every part has a share of the seconds; what does not fit is listed as not measured.

    meshwright bench --on cpu:8 -o rates.toml, then meshwright plan MODEL --on cpu:8 --calibration rates.toml.
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


# -- what is printed: a table for each part, and what was not measured ------------------------------------

number, share, percent = "{:.3g}".format, "{:.1%}".format, "{:.0%}".format
TIMED: TableColumns = {"time": "seconds.median_s", "spread": ("seconds.spread", percent)}
PRODUCT: TableColumns = {**TIMED, "rate": "flops_per_s"}


def report_text(report: results.BenchReport) -> Iterator[Piece]:
    """Yields every measured part, in the order of measuring."""
    yield Fact("measured", f"{report.machine}, {report.date}; all devices busy, figures of one")
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    yield Fact("with", f"{versions}; {report.took_s:.0f} s of {report.seconds:.0f}")
    if report.platform == "cpu":
        load_text = f"{report.load:.1f} on {os.cpu_count()} cores"
        yield Fact("load before", f"{load_text}: rates of a quiet machine need one near 0")
    yield ""
    for name, show_part in SHOWN.items():
        part = getattr(report, name)
        if part is not None:
            pieces = [*show_part(part), *left_out_lines(part.left_out)]
            yield from pieces
            if any(isinstance(piece, str) for piece in pieces[1:]):
                yield ""


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


def _matmul_text(part: results.MatmulPart) -> Iterator[Piece]:
    columns: TableColumns = {"dtype": "dtype", "side": "n", **PRODUCT, "HFU": ("share_of_peak", share)}
    yield _table("Square products", part.sweep, columns)
    if not part.edges:
        return
    columns = {
        "tile": "tile",
        "side": "product.n",
        "time": "product.seconds.median_s",
        "rate": "product.flops_per_s",
        "relative": ("relative", number),
        "filled up": ("predicted", number),
    }
    yield _table(f"Beside whole tiles, {part.edges[0].product.dtype}", part.edges, columns)
    yield "relative: to the rate of whole tiles; filled up: the same if partial tiles cost as much as whole ones"


def _contents_text(part: results.ContentsPart) -> Iterator[Piece]:
    normal_s_by_type = {row.dtype: row.seconds.median_s for row in part.products if row.contents == "normal"}

    def speed_up(product: Any) -> float | None:
        return normal_s_by_type[product.dtype] / product.seconds.median_s if product.dtype in normal_s_by_type else None

    first_columns: TableColumns = {"dtype": "dtype", "numbers": "contents", "side": "n"}
    yield _table(
        "Contents of a product", part.products, {**first_columns, **PRODUCT, "speed-up": (speed_up, number, "speed_up")}
    )


def _mlp_text(part: results.MlpPart) -> Iterator[Piece]:
    title = ", ".join(["Gated MLP forward and backward", *(mlp.dtype for mlp in part.mlps[:1])])
    size_columns: TableColumns = {
        "tokens": "tokens",
        "D x F": (lambda mlp: [mlp.d_model, mlp.d_ff], "{0[0]} x {0[1]}".format, "d_model_d_ff"),
    }
    share_columns: TableColumns = {"MFU": ("mfu", share), "of products'": ("of_matmul", share)}
    yield _table(title, part.mlps, {**size_columns, **PRODUCT, **share_columns})


def _elementwise_text(part: results.ElementwisePart) -> Iterator[Piece]:
    fused_at, eager_at = ({c.repeats: c for c in part.chains if c.fused == is_fused} for is_fused in (True, False))
    rows = [{"repeats": n, "fused": fused_at.get(n), "eager": eager_at.get(n)} for n in sorted(fused_at | eager_at)]
    cache_text = f", cache {format_bytes(part.cache_bytes)}" if part.cache_bytes else ""
    title = f"Multiply-adds on an array of {format_bytes(part.elements * results.ELEMENT_BYTES)} a device{cache_text}"

    def times_fused(row: Facts) -> float | None:
        fused, eager = row["fused"], row["eager"]
        return float(eager.seconds.median_s / fused.seconds.median_s) if fused and eager else None

    columns: TableColumns = {
        "multiply-adds": ("repeats", None, "multiply-adds"),
        "one kernel": ("fused.seconds.median_s", None, "fused_s"),
        "bytes": "fused.bytes_per_s",
        "rate": "fused.flops_per_s",
        "op by op": ("eager.seconds.median_s", None, "eager_s"),
        "ratio": (times_fused, number),
    }
    yield _table(title, rows, columns)
    if part.doubles_at or part.predicted_at:
        measured_text = or_dash(part.doubles_at, lambda n: f"{n:.3g} multiply-adds")
        yield f"time doubles at {measured_text}, predicted {or_dash(part.predicted_at, number)}"
    if part.vector_flops_per_s:
        yield f"vector rate {format_flops(part.vector_flops_per_s)}: {part.vector_source}"


def _distance_text(part: results.DistancePart) -> Iterator[Piece]:
    columns: TableColumns = {
        "": "what",
        "m=k=n": "n",
        **TIMED,
        "2mkn/time": "flops_per_s",
        "x matmul": ("ratio", number),
        "predicted": "predicted_s",
        "x matmul, predicted": ("predicted_ratio", number),
    }
    yield _table("Combinations of two matrices beside their product, fp32", part.distances, columns)
    if any(row.predicted_s for row in part.distances):
        yield "predicted: the arithmetic alone, at the vector rate with operands in registers; loads come on top"


def _copy_text(part: results.CopyPart) -> Iterator[Piece]:
    columns: TableColumns = {"": "kind", "array": "array_bytes", **TIMED}
    yield _table("Memory", part.copies, {**columns, "read and written": "bytes_per_s"})


def _batch_text(part: results.BatchPart) -> Iterator[Piece]:
    title = f"Layer forward, {part.dtype}, {' '.join(f'{dim}={size}' for dim, size in part.sizes.items())}"
    yield _table(title, part.layers, {"tokens": "tokens", "tokens/us": ("tokens_per_us", number), **PRODUCT})
    if part.layers:
        knee = or_dash(part.knee, lambda k: f"{k.at:.3g} tokens (points off the fit by {k.error:.0%} in the median)")
        yield f"knee at {knee}"
        yield (
            f"critical batch {or_dash(part.predicted_knee, number)}: FLOP/s of the fastest product over bytes/s of a "
            f"copy as large as the weights, x bytes of a weight / 2"
        )


def _collectives_text(part: results.CollectivesPart) -> Iterator[Piece]:
    columns: TableColumns = {
        "kind": "kind",
        "group": lambda row: f"{row.group.axis}={row.group.size}",
        "latency": "rate.latency_s",
        "received": "rate.bytes_per_s",
        "off": ("fit_error", percent),
        "largest": (lambda row: row.times[-1].seconds.median_s, format_seconds, "time_s"),
        "fitted": (lambda row: row.times[-1].fitted_s, format_seconds, "fitted_s"),
        "data sheet": (lambda row: row.times[-1].datasheet_s, format_seconds, "datasheet_s"),
    }
    yield _table("Collectives: lines through every size", part.collectives, columns)
    if not part.collectives:
        return
    sizes_text = ", ".join(format_bytes(time.array_bytes) for time in part.collectives[0].times)
    yield f"sizes {sizes_text}; off: median distance of the points from the line; largest: time of the largest size"


def _attention_text(part: results.AttentionPart) -> Iterator[Piece]:
    columns: TableColumns = {
        "length": "length",
        "batch": "batch",
        "forward": "forward.median_s",
        "rate": "forward_flops_per_s",
        "both": "both.median_s",
        "rate of both": "both_flops_per_s",
        "HFU": ("share_of_peak", share),
    }
    yield _table(f"Attention, {part.dtype}, forward and both passes", part.times, columns)


def _overhead_text(part: results.OverheadPart) -> Iterator[Piece]:
    columns: TableColumns = {
        "arguments": "num_arguments",
        "launch": "launch.median_s",
        "spread": ("launch.spread", percent),
        "launch and wait": "wait.median_s",
    }
    yield _table("Host time of a launch", part.launches, columns)
    if part.line:
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
