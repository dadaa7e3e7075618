"""Every kind of collective over every group of devices: seconds per size, and the latency and rate that fit them."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import msgspec
from jax import lax

from meshwright.bench.devices import Bench, Block
from meshwright.bench.fit import Line, fit_line
from meshwright.bench.machine import COLLECTIVES, run_collective
from meshwright.bench.timing import Budget, Timing, time_together
from meshwright.core.errors import InputError
from meshwright.cost.network.collectives import collective_time, group_rates, received_share
from meshwright.cost.network.placement import place_axes
from meshwright.spec.calibration import CollectiveKind, CollectiveRate
from meshwright.spec.cluster import make_cluster

EMULATED_BYTES = tuple(2**power for power in (12, 15, 18, 19, 20))
BYTES = tuple(2**power for power in (14, 18, 22, 25, 27, 29))
"""More large sizes than small ones: they settle the rate, which is what most of a step's collectives wait for."""
MIN_SIZES = 5
ROUNDS = 10
ELEMENT_BYTES = 4
LEAST_LATENCY_S = 1e-7
MOST_BYTES_PER_S = 1e15


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Devices that one collective joins: an axis of a mesh whose other axes all run the same at the same time."""

    axis: str
    size: int
    mesh: dict[str, int]


class CollectiveTime(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of an array of so many bytes, as the fitted line has it, and as the data sheet has it where there is
    one."""

    array_bytes: int
    seconds: Timing
    fitted_s: float
    datasheet_s: float | None


class Collective(msgspec.Struct, frozen=True, kw_only=True):
    """One kind over one group: times per size, and the line through them."""

    kind: CollectiveKind
    group: Group
    times: tuple[CollectiveTime, ...]
    rate: CollectiveRate
    fit_error: float


class CollectivesPart(msgspec.Struct, frozen=True, kw_only=True):
    """All that were measured, and what was left out and why."""

    collectives: tuple[Collective, ...] = ()
    left_out: tuple[str, ...] = ()


def measure_collectives(bench: Bench, budget: Budget) -> CollectivesPart:
    """The largest group first, so that a short budget leaves at least one rate of every kind."""
    groups = groups_of(len(bench.devices), bench.axes)
    if not groups:
        return CollectivesPart(left_out=("collectives: one device has none",))
    found, left = [], []
    wanted = [(group, kind) for group in groups for kind in COLLECTIVES]
    for number, (group, kind) in enumerate(wanted):
        one, why = _collective(bench, kind, group, budget.share(1 / (len(wanted) - number)))
        if one:
            found.append(one)
        else:
            left.append(f"{kind} over {group.axis}={group.size}: {why}")
    return CollectivesPart(collectives=tuple(found), left_out=tuple(left))


def groups_of(num_devices: int, axes: Mapping[str, int]) -> list[Group]:
    """The axes of a mesh, or every power of two that divides the number of devices; the largest first."""
    if axes:
        groups = [Group(axis=axis, size=size, mesh=dict(axes)) for axis, size in axes.items() if size > 1]
    else:
        sizes = [2**power for power in range(1, num_devices.bit_length()) if num_devices % 2**power == 0]
        groups = [Group(axis="group", size=size, mesh={"others": num_devices // size, "group": size}) for size in sizes]
    return sorted(groups, key=lambda group: -group.size)


def _collective(bench: Bench, kind: CollectiveKind, group: Group, budget: Budget) -> tuple[Collective | None, str]:
    sizes = EMULATED_BYTES if bench.emulated else BYTES
    calls = {
        str(size): bench.call(repeated(kind, group), [Block(shape=(local_elements(kind, group.size, size),))],
                              axes=group.mesh)
        for size in sizes
    }  # fmt: skip
    times = time_together(calls, budget, max_repeats=15)
    if len(times.found) < MIN_SIZES:
        why = next(iter(times.why_not.values()))
        return None, f"{len(times.found)} of the {MIN_SIZES} sizes that a line needs ({why})"
    seconds = {int(size): found.over(ROUNDS) for size, found in times.found.items()}
    line = fit_line(list(seconds), [found.median_s for found in seconds.values()])
    sheet = datasheet_seconds(bench, kind, group)
    rows = tuple(
        CollectiveTime(array_bytes=size, seconds=found, fitted_s=line.at(size), datasheet_s=sheet(size))
        for size, found in seconds.items()
    )
    rate = rate_of(kind, group.size, line)
    return Collective(kind=kind, group=group, times=rows, rate=rate, fit_error=line.error), ""


def local_elements(kind: CollectiveKind, size: int, array_bytes: int) -> int:
    """Elements that a device begins with, for an array of so many bytes on the group (what a device sends, in a
    permute)."""
    whole = array_bytes // ELEMENT_BYTES
    return whole if kind in ("reduce_scatter", "all_reduce", "permute") else whole // size


def repeated(kind: CollectiveKind, group: Group) -> Callable[[jax.Array], jax.Array]:
    """Collectives in a row, each waiting for an element of the one before."""

    def body(x: jax.Array) -> jax.Array:
        def again(_: Any, y: jax.Array) -> jax.Array:
            return y + run_collective(kind, y, group.axis)[:1] * 1e-6

        return lax.fori_loop(0, ROUNDS, again, x)

    return body


def rate_of(kind: CollectiveKind, size: int, line: Line) -> CollectiveRate:
    """Latency, and the bytes/s that a device receives, of a line over the bytes of the array."""
    per_byte = max(line.slope / received_share(kind, size), 1 / MOST_BYTES_PER_S)
    return CollectiveRate(
        kind=kind, group_size=size, latency_s=max(line.start, LEAST_LATENCY_S), bytes_per_s=1 / per_byte
    )


def datasheet_seconds(bench: Bench, kind: CollectiveKind, group: Group) -> Callable[[float], float | None]:
    """What the chip's links would take for an array, on one switched domain; None on anything else."""
    chip, count = bench.chip, len(bench.devices)
    if chip.topology != "switched" or chip.nvlink_bytes_per_s is None:
        return lambda array_bytes: None
    try:
        placement = place_axes(make_cluster(chip, (count, 1)), group.mesh)[0]
    except InputError:
        return lambda array_bytes: None
    rates = group_rates(placement, (group.axis,))
    return lambda array_bytes: float(collective_time(kind, array_bytes, rates))
