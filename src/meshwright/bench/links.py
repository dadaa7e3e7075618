"""Benchmark parts for collectives by group and size, and for launches of programs from the host."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from meshwright.bench.devices import Bench, Runner
from meshwright.bench.fit import FittedLine, fit_line
from meshwright.bench.results import Collective, CollectivesPart, CollectiveTime, Group, Launch, OverheadPart
from meshwright.bench.timing import Call, time_together
from meshwright.bench.workloads import COLLECTIVE_FUNCTIONS, collective_workload, groups_of
from meshwright.core.dims import CollectiveKind
from meshwright.core.errors import InputError
from meshwright.cost.network.collectives import collective_time, group_rates, received_share
from meshwright.cost.network.placement import place_axes
from meshwright.spec.calibration import CollectiveRate
from meshwright.spec.cluster import make_cluster

MIN_SIZES = 5
LEAST_LATENCY_S = 1e-7
MOST_BYTES_PER_S = 1e15


def measure_collectives(runner: Runner) -> CollectivesPart:
    """Measures every kind of collective over every group of devices. Groups of most devices come first, so that a short
    budget still has a rate of every kind."""
    groups = groups_of(len(runner.bench.devices), runner.bench.axes)
    if not groups:
        runner.left_out.append("collectives: one device has none")
    groups_and_kinds = [(group, kind) for group in groups for kind in COLLECTIVE_FUNCTIONS]
    collectives = [_collective(sub_runner, kind, group) for (group, kind), sub_runner in runner.each(groups_and_kinds)]
    return CollectivesPart(collectives=tuple(collective for collective in collectives if collective))


def _collective(runner: Runner, kind: CollectiveKind, group: Group) -> Collective | None:
    workload_by_size = {n: collective_workload(kind, group, n) for n in runner.bench.sizes.collective_bytes}
    timings, reason_by_size = time_together(
        {n: runner.bench.call(workload) for n, workload in workload_by_size.items()}, runner.budget, max_repeats=15
    )
    if len(timings) < MIN_SIZES:
        reason = f"{len(timings)} of the {MIN_SIZES} sizes that a line needs ({next(iter(reason_by_size.values()))})"
        runner.left_out.append(f"{kind} over {group.axis}={group.size}: {reason}")
        return None
    line = fit_line(list(timings), [timing.median_s for timing in timings.values()])
    times = tuple(
        CollectiveTime(
            array_bytes=n,
            seconds=timing,
            fitted_s=line.at(n),
            datasheet_s=datasheet_seconds(runner.bench, kind, group, n),
        )
        for n, timing in timings.items()
    )
    return Collective(kind=kind, group=group, times=times, rate=rate_of(kind, group.size, line), fit_error=line.error)


def rate_of(kind: CollectiveKind, size: int, line: FittedLine) -> CollectiveRate:
    """Converts a line of seconds over array bytes to a rate: the latency, and the bytes/s that a device receives."""
    seconds_per_byte = max(line.slope / received_share(kind, size), 1 / MOST_BYTES_PER_S)
    return CollectiveRate(
        kind=kind, group_size=size, latency_s=max(line.start, LEAST_LATENCY_S), bytes_per_s=1 / seconds_per_byte
    )


def datasheet_seconds(bench: Bench, kind: CollectiveKind, group: Group, array_bytes: float) -> float | None:
    """Returns the seconds of a collective by the data sheet, in one switched domain; None for other topologies."""
    if bench.chip.topology != "switched" or bench.chip.nvlink_bytes_per_s is None:
        return None
    try:
        placement = place_axes(make_cluster(bench.chip, (len(bench.devices), 1)), group.mesh)[0]
    except InputError:
        return None
    return float(collective_time(kind, array_bytes, group_rates(placement, (group.axis,))))


NUM_ARGUMENTS = (1, 16, 64, 256)
LAUNCHES = 20


def measure_overhead(runner: Runner) -> OverheadPart:
    """Times a nearly empty program with several numbers of arguments, on the first device: seconds per launch of many
    before one wait, and seconds of one launch with its wait."""
    call_by_name = {}
    for num_args in NUM_ARGUMENTS:
        arrays = tuple(jax.device_put(jnp.float32(number), runner.bench.devices[0]) for number in range(num_args))
        call_by_name[f"launch {num_args}"] = _launches(arrays, LAUNCHES)
        call_by_name[f"wait {num_args}"] = _launches(arrays, 1)
    timings = runner.time(call_by_name, "{} arguments")
    rows = [
        Launch(num_arguments=num_args, launch=timings[f"launch {num_args}"], wait=timings[f"wait {num_args}"])
        for num_args in NUM_ARGUMENTS
        if {f"launch {num_args}", f"wait {num_args}"} <= timings.keys()
    ]
    line = fit_line([row.num_arguments for row in rows], [row.launch.median_s for row in rows]) if rows else None
    return OverheadPart(launches=tuple(rows), line=line)


def _launches(arrays: tuple[Array, ...], num_launches: int) -> Call:
    # A jitted function per number of arguments: with several programs it would look one up at each launch.
    program = jax.jit(lambda *values: values[0] + 1)

    def run(*given: Array) -> Array | None:
        result: Array | None = None
        for _ in range(num_launches):
            result = program(*given)
        return result

    return Call(run=run, arguments=lambda repeat: arrays, rounds=num_launches)
