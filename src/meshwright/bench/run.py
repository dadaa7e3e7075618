"""All figures of the devices at hand within a number of seconds, and the record that is kept of them."""

import datetime
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import msgspec

from meshwright import __version__
from meshwright.bench.chip import chip_of_kind
from meshwright.bench.devices import DEFAULT_DTYPES, JAX_DTYPES, Bench, machine_name
from meshwright.bench.figures.attention import AttentionPart, measure_attention
from meshwright.bench.figures.batch import BatchPart, measure_batch
from meshwright.bench.figures.collectives import CollectivesPart, measure_collectives
from meshwright.bench.figures.copy import CopyPart, measure_copy
from meshwright.bench.figures.distance import DistancePart, measure_distance
from meshwright.bench.figures.elementwise import ElementwisePart, measure_elementwise
from meshwright.bench.figures.matmul import ContentsPart, MatmulPart, measure_contents, measure_matmul
from meshwright.bench.figures.mlp import MlpPart, measure_mlp
from meshwright.bench.figures.overhead import OverheadPart, measure_overhead
from meshwright.bench.timing import NO_TIME, Budget, budget_of
from meshwright.core.errors import CannotRunError, InputError, nearest
from meshwright.nn.attention.platform import platform_of
from meshwright.spec.chip import chip as find_chip

WEIGHTS: dict[str, float] = {
    "overhead": 1,
    "matmul": 4,
    "mlp": 2,
    "elementwise": 3,
    "contents": 1,
    "distance": 1,
    "copy": 1.5,
    "batch": 2,
    "collectives": 5,
    "attention": 2,
}
"""Parts in the order in which they are measured, and their shares of the seconds. Later ones are predicted from rates
that earlier ones found."""


LEAST_REST = 0.1
"""Share of the seconds that must be left for measuring parts again that ran out of theirs."""


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, on what, and when. A part that was not asked for is None.

    ``load`` is the mean number of threads that wanted to run in the minute before (Unix's load average).
    """

    machine: str
    device_kind: str
    platform: str
    num_devices: int
    chip: str
    date: str
    versions: dict[str, str]
    seconds: float
    took_s: float
    load: float = 0.0
    memory_bytes: float
    mesh: dict[str, int] = {}
    matmul: MatmulPart | None = None
    mlp: MlpPart | None = None
    elementwise: ElementwisePart | None = None
    contents: ContentsPart | None = None
    distance: DistancePart | None = None
    copy: CopyPart | None = None
    batch: BatchPart | None = None
    collectives: CollectivesPart | None = None
    attention: AttentionPart | None = None
    overhead: OverheadPart | None = None


def make_bench(
    devices: Sequence[jax.Device],
    *,
    chip: str | None = None,
    dtypes: Sequence[str] = (),
    axes: Mapping[str, int] | None = None,
    seed: int = 0,
) -> Bench:
    """The devices with their data sheet: the chip named, or that which the devices say they are."""
    for dtype in dtypes:
        if dtype not in JAX_DTYPES:
            raise InputError(f"{dtype!r} is no element type of products.{nearest(dtype, JAX_DTYPES)}")
    found = find_chip(chip) if chip else chip_of_kind(devices[0].device_kind)
    size = 1
    for axis_size in (axes or {}).values():
        size *= axis_size
    if axes and size != len(devices):
        shape = ",".join(f"{axis}={n}" for axis, n in axes.items())
        raise CannotRunError(
            f"mesh {shape} has {size} devices and there are {len(devices)}. Give a mesh of {len(devices)}."
        )
    chosen = tuple(dict.fromkeys(dtypes)) or DEFAULT_DTYPES.get(platform_of(devices[0]), ("fp32",))
    return Bench(devices=tuple(devices), chip=found, dtypes=chosen, seed=seed, axes=dict(axes or {}))


def run_bench(
    bench: Bench, what: Sequence[str] = (), *, seconds: float = 60.0, say: Callable[[str], None] = lambda line: None
) -> BenchReport:
    """Every part asked for (all of them by default), each within its share of the seconds that are left."""
    check_parts(what)
    wanted = [name for name in WEIGHTS if not what or name in what]
    budget, started, load = budget_of(seconds), time.perf_counter(), os.getloadavg()[0]
    found: dict[str, Any] = {}
    for number, name in enumerate(wanted):
        left = sum(WEIGHTS[later] for later in wanted[number:])
        say(f"{number + 1}/{len(wanted)} {name}, {budget.left_s:.0f} s left")
        found[name] = MEASURES[name](bench, budget.share(WEIGHTS[name] / left), found)
    _try_again(bench, budget, found, seconds, say)
    return BenchReport(
        machine=machine_name(bench),
        device_kind=bench.devices[0].device_kind,
        platform=bench.platform,
        num_devices=len(bench.devices),
        chip=bench.chip.name,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions={"meshwright": __version__, "jax": jax.__version__, "python": platform.python_version()},
        seconds=seconds,
        took_s=time.perf_counter() - started,
        load=load,
        memory_bytes=bench.memory_bytes,
        mesh=dict(bench.axes),
        **found,
    )


def _try_again(bench: Bench, budget: Budget, found: dict[str, Any], seconds: float, say: Callable[[str], None]) -> None:
    """Parts that ran out of time once more, with what the others left; the one that holds more is kept."""
    short = [name for name, part in found.items() if any(line.endswith(NO_TIME) for line in part.left_out)]
    for number, name in enumerate(short):
        if budget.left_s < LEAST_REST * seconds:
            return
        left = sum(WEIGHTS[later] for later in short[number:])
        say(f"{name} again, {budget.left_s:.0f} s left")
        again = MEASURES[name](bench, budget.share(WEIGHTS[name] / left), found)
        if num_figures(again) > num_figures(found[name]):
            found[name] = again


def num_figures(part: msgspec.Struct) -> int:
    """Rows that a part holds, those of what was left out aside."""
    rows = [getattr(part, name) for name in part.__struct_fields__ if name != "left_out"]
    return sum(len(row) for row in rows if isinstance(row, tuple))


def check_parts(what: Sequence[str]) -> None:
    """Refuse a part that there is not."""
    for name in what:
        if name not in WEIGHTS:
            raise InputError(f"bench has no part {name!r}.{nearest(name, WEIGHTS)}")


Found = Mapping[str, Any]
"""Parts by name that were measured before."""


def matmul_rate(found: Found, dtype: str) -> float | None:
    """FLOP/s of the fastest product of an element type, None where none was measured."""
    part: MatmulPart | None = found.get("matmul")
    best = part.best(dtype) if part else None
    return best.flops_per_s if best else None


def memory_rate(found: Found) -> float | None:
    """Bytes/s of the copy of the largest array, None where none was measured."""
    part: CopyPart | None = found.get("copy")
    largest = part.largest() if part else None
    return largest.bytes_per_s if largest else None


def _contents(bench: Bench, budget: Budget, found: Found) -> ContentsPart:
    rates = {dtype: matmul_rate(found, dtype) or bench.chip.peak_flops.get(dtype) for dtype in bench.dtypes}
    return measure_contents(bench, budget, rates)


def _distance(bench: Bench, budget: Budget, found: Found) -> DistancePart:
    part: ElementwisePart | None = found.get("elementwise")
    vector = part.vector_flops_per_s if part else None
    return measure_distance(bench, budget, matmul_rate=matmul_rate(found, "fp32"), vector_rate=vector)


def _batch(bench: Bench, budget: Budget, found: Found) -> BatchPart:
    rate = matmul_rate(found, bench.main_dtype) or bench.chip.peak_flops.get(bench.main_dtype)
    return measure_batch(bench, budget, matmul_rate=rate, memory_rate=memory_rate(found) or bench.chip.hbm_bytes_per_s)


MEASURES: dict[str, Callable[[Bench, Budget, Found], Any]] = {
    "matmul": lambda bench, budget, found: measure_matmul(bench, budget),
    "mlp": lambda bench, budget, found: measure_mlp(bench, budget, found.get("matmul") or MatmulPart()),
    "elementwise": lambda bench, budget, found: measure_elementwise(bench, budget),
    "contents": _contents,
    "distance": _distance,
    "copy": lambda bench, budget, found: measure_copy(bench, budget),
    "batch": _batch,
    "collectives": lambda bench, budget, found: measure_collectives(bench, budget),
    "attention": lambda bench, budget, found: measure_attention(bench, budget),
    "overhead": lambda bench, budget, found: measure_overhead(bench, budget),
}
