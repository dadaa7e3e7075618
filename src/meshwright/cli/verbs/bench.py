"""`meshwright bench`: measures the devices at hand and writes a calibration to plan with."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from meshwright.cli.output import say
from meshwright.cli.verb import MeshSizes, Options, argument, option, verb
from meshwright.core.dims import COLLECTIVES
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.files import cache_folder
from meshwright.report.answer import Answer
from meshwright.spec.calibration import Calibration, save_calibration
from meshwright.spec.chip import chip as find_chip
from meshwright.spec.cluster import parse_cluster

if TYPE_CHECKING:
    import jax

    from meshwright.bench.results import BenchReport

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


@verb(Given)
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
    wanted = [word.strip() for word in given.dtypes.split(",")] if given.dtypes is not None else []
    bench = make_bench(devices, chip=given.chip_name, dtypes=wanted, axes=given.mesh or {})
    keep_compiled_programs(cache_folder())
    report = run_bench(bench, given.what, seconds=given.seconds, say=say)
    facts = {**msgspec.structs.asdict(report), "calibration": given.out}
    if given.out is not None:
        save_calibration(_calibration(report, given.out), given.out)
        say(f"wrote {given.out}")
    pictures: dict[Path | None, Any] = {}
    if given.png is not None:
        from meshwright.report.machine.bench import bench_figures

        pictures = {given.png / name: lambda drawn=drawn: drawn for name, drawn in bench_figures(report).items()}
    from meshwright.cli.verbs.bench_text import report_text

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


def _calibration(report: "BenchReport", output: Path) -> Calibration:
    """Returns the calibration; for emulated devices with rates inside a step, if no other rate of a step is missing."""
    from meshwright.bench.calibration import calibration_of

    found = calibration_of(report)
    if not (found.matmul_flops_per_s or found.attention_flops_per_s or found.memory_bytes_per_s or found.collectives):
        raise CannotRunError(f"{output} is not written: no rate was measured. Give more --seconds.")
    if found.chip != "cpu":
        return found
    rates = (("matmul", found.matmul_flops_per_s), ("copy", found.memory_bytes_per_s))
    kinds = {rate.kind for rate in found.collectives if rate.group_size == report.num_devices}
    needed = COLLECTIVES if report.num_devices > 1 else ()
    missing = [*(name for name, value in rates if not value), *(kind for kind in needed if kind not in kinds)]
    if missing:
        say(f"plan needs rates that {output} lacks: {', '.join(missing)}. Give more --seconds, or more parts.")
        return found
    from meshwright.bench.machine import with_host_rates

    say("training steps under the profiler, about a minute more: emulated devices are slower inside a step")
    return with_host_rates(found, lambda line: say(f"  {line}"))
