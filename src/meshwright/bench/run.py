"""Runs the parts of a benchmark within a number of seconds and makes the report."""

import datetime
import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import msgspec

from meshwright import __version__
from meshwright.bench import products
from meshwright.bench.devices import DEFAULT_DTYPES, JAX_DTYPES, Bench, Runner
from meshwright.bench.elementwise import measure_copy, measure_distance, measure_elementwise
from meshwright.bench.links import measure_collectives, measure_overhead
from meshwright.bench.results import BenchReport, Part
from meshwright.bench.timing import NO_TIME, budget_of
from meshwright.core.errors import CannotRunError, InputError, nearest
from meshwright.core.progress import working
from meshwright.nn.attention.platform import platform_of
from meshwright.spec.chip import chip as find_chip
from meshwright.spec.chip import chip_of_kind

PARTS: dict[str, tuple[float, Callable[[Runner], Part]]] = {
    "overhead": (1, measure_overhead),
    "matmul": (4, products.measure_matmul),
    "mlp": (2, products.measure_mlp),
    "elementwise": (3, measure_elementwise),
    "contents": (1, products.measure_contents),
    "distance": (1, measure_distance),
    "copy": (1.5, measure_copy),
    "batch": (2, products.measure_batch),
    "collectives": (5, measure_collectives),
    "attention": (2, products.measure_attention),
}
"""Parts in the order of measuring, with their shares of the seconds. Later predictions use rates of earlier parts."""

LEAST_REST = 0.1
"""Share of the seconds that must be left to repeat a part that ran out of time."""


def make_bench(
    devices: Sequence[jax.Device],
    *,
    chip: str | None = None,
    dtypes: Sequence[str] = (),
    axes: Mapping[str, int] | None = None,
) -> Bench:
    """Returns the devices with the data sheet of the named chip, or of the chip that they report. Raises InputError for
    an unknown element type, CannotRunError if ``axes`` have another number of devices."""
    for dtype in dtypes:
        if dtype not in JAX_DTYPES:
            raise InputError(f"{dtype!r} is no element type of products.{nearest(dtype, JAX_DTYPES)}")
    benched_chip = find_chip(chip) if chip else chip_of_kind(devices[0].device_kind)
    axes = dict(axes or {})
    size = math.prod(axes.values())
    if axes and size != len(devices):
        words = ",".join(f"{axis}={n}" for axis, n in axes.items())
        raise CannotRunError(f"{words} has {size} devices and there are {len(devices)}. Give a mesh of {len(devices)}.")
    chosen_dtypes = tuple(dict.fromkeys(dtypes)) or DEFAULT_DTYPES.get(platform_of(devices[0]), ("fp32",))
    return Bench(devices=tuple(devices), chip=benched_chip, dtypes=chosen_dtypes, axes=axes)


def check_parts(what: Sequence[str]) -> None:
    """Raises InputError for an unknown part."""
    for name in what:
        if name not in PARTS:
            raise InputError(f"bench has no part {name!r}.{nearest(name, PARTS)}")


def run_bench(bench: Bench, what: Sequence[str] = (), *, seconds: float = 60.0) -> BenchReport:
    """Measures the requested parts (default: all), each within its share of the seconds left.

    Parts that ran out of time are repeated in the seconds that remain; the result with more rows is kept."""
    check_parts(what)
    budget, start_s, load_average = budget_of(seconds), time.perf_counter(), os.getloadavg()[0]
    part_by_name: dict[str, Any] = {}

    def measure(names: Sequence[str]) -> Part:
        """Measures the first of ``names``, within its share of the seconds that all of them have left."""
        budget_share = PARTS[names[0]][0] / sum(PARTS[name][0] for name in names)
        runner = Runner(bench=bench, budget=budget.share(budget_share), found=part_by_name)
        work.what, work.done = f"measuring {names[0]}, seconds", round(seconds - budget.left_s)
        part = PARTS[names[0]][1](runner)
        return msgspec.structs.replace(part, left_out=tuple(runner.left_out))

    part_names = [name for name in PARTS if not what or name in what]
    with working("measuring", round(seconds)) as work:
        for part_index, name in enumerate(part_names):
            part_by_name[name] = measure(part_names[part_index:])
        is_cut = {name: any(text.endswith(NO_TIME) for text in part.left_out) for name, part in part_by_name.items()}
        cut_names = [name for name in part_names if is_cut[name]]
        for part_index, name in enumerate(cut_names):
            if budget.left_s < LEAST_REST * seconds:
                break
            repeated_part = measure(cut_names[part_index:])
            if num_rows(repeated_part) > num_rows(part_by_name[name]):
                part_by_name[name] = repeated_part
    return BenchReport(
        machine=bench.name,
        device_kind=bench.devices[0].device_kind,
        platform=bench.platform,
        num_devices=len(bench.devices),
        chip=bench.chip.name,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions={"meshwright": __version__, "jax": jax.__version__, "python": platform.python_version()},
        seconds=seconds,
        took_s=time.perf_counter() - start_s,
        load=load_average,
        memory_bytes=bench.memory_bytes,
        mesh=dict(bench.axes),
        **part_by_name,
    )


def num_rows(part: Part) -> int:
    """Returns the number of measurements of a part."""
    field_values = (value for name, value in msgspec.structs.asdict(part).items() if name != "left_out")
    return sum(len(value) for value in field_values if isinstance(value, tuple))
