"""What joins devices, and the host with them: collectives per group and size, and launches."""

from typing import Any

import jax
import jax.numpy as jnp

from meshwright.bench.cases import COLLECTIVES, collective_case, groups_of
from meshwright.bench.devices import Bench, Runner
from meshwright.bench.fit import Line, fit_line
from meshwright.bench.results import Collective, CollectivesPart, CollectiveTime, Group, Launch, OverheadPart
from meshwright.bench.timing import Call, time_together
from meshwright.core.errors import InputError
from meshwright.cost.network.collectives import collective_time, group_rates, place_axes, received_share
from meshwright.spec.calibration import CollectiveKind, CollectiveRate
from meshwright.spec.cluster import make_cluster

MIN_SIZES = 5
LEAST_LATENCY_S = 1e-7
MOST_BYTES_PER_S = 1e15


def measure_collectives(runner: Runner) -> CollectivesPart:
    """The largest group first, so that a short budget leaves at least one rate of every kind."""
    groups = groups_of(len(runner.bench.devices), runner.bench.axes)
    if not groups:
        runner.left_out.append("collectives: one device has none")
    wanted = [(group, kind) for group in groups for kind in COLLECTIVES]
    found = [_collective(mine, kind, group) for (group, kind), mine in runner.each(wanted)]
    return CollectivesPart(collectives=tuple(one for one in found if one))


def _collective(runner: Runner, kind: CollectiveKind, group: Group) -> Collective | None:
    cases = {n: collective_case(kind, group, n) for n in runner.bench.sizes.collective_bytes}
    times = time_together({n: runner.bench.call(case) for n, case in cases.items()}, runner.budget, max_repeats=15)
    if len(times.found) < MIN_SIZES:
        why = f"{len(times.found)} of the {MIN_SIZES} sizes that a line needs ({next(iter(times.why_not.values()))})"
        runner.left_out.append(f"{kind} over {group.axis}={group.size}: {why}")
        return None
    line = fit_line(list(times.found), [seconds.median_s for seconds in times.found.values()])
    rows = tuple(
        CollectiveTime(
            array_bytes=n,
            seconds=seconds,
            fitted_s=line.at(n),
            datasheet_s=datasheet_seconds(runner.bench, kind, group, n),
        )
        for n, seconds in times.found.items()
    )
    return Collective(kind=kind, group=group, times=rows, rate=rate_of(kind, group.size, line), fit_error=line.error)


def rate_of(kind: CollectiveKind, size: int, line: Line) -> CollectiveRate:
    """Latency, and the bytes/s that a device receives, of a line over the bytes of the array."""
    per_byte = max(line.slope / received_share(kind, size), 1 / MOST_BYTES_PER_S)
    return CollectiveRate(
        kind=kind, group_size=size, latency_s=max(line.start, LEAST_LATENCY_S), bytes_per_s=1 / per_byte
    )


def datasheet_seconds(bench: Bench, kind: CollectiveKind, group: Group, array_bytes: float) -> float | None:
    """What the chip's links would take for an array, on one switched domain; None on anything else."""
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
    """A program that does next to nothing, with all numbers of arguments in turns, in rows of launches and one at a
    time; on the first device alone."""
    calls = {}
    for count in NUM_ARGUMENTS:
        arrays = tuple(jax.device_put(jnp.float32(number), runner.bench.devices[0]) for number in range(count))
        calls[f"launch {count}"] = _launches(arrays, LAUNCHES)
        calls[f"wait {count}"] = _launches(arrays, 1)
    times = runner.time(calls, "{} arguments")
    found = [
        Launch(num_arguments=count, launch=times[f"launch {count}"], wait=times[f"wait {count}"])
        for count in NUM_ARGUMENTS
        if {f"launch {count}", f"wait {count}"} <= times.keys()
    ]
    line = fit_line([one.num_arguments for one in found], [one.launch.median_s for one in found]) if found else None
    return OverheadPart(launches=tuple(found), line=line)


def _launches(arrays: tuple[jax.Array, ...], launches: int) -> Call:
    # A new program each time: one that was launched with other arguments looks for its code first.
    program = jax.jit(lambda *given: given[0] + 1)

    def run(*given: jax.Array) -> Any:
        result = None
        for _ in range(launches):
            result = program(*given)
        return result

    return Call(run=run, arguments=lambda repeat: arrays, rounds=launches)
