"""Seconds that the host needs to start a compiled program that does next to nothing."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import msgspec

from meshwright.bench.devices import Bench
from meshwright.bench.fit import Line, fit_line
from meshwright.bench.timing import Budget, Call, Timing, time_together

NUM_ARGUMENTS = (1, 16, 64, 256)
LAUNCHES = 20


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """Host seconds of a launch: until the next one can follow (``launch``), until its result is there (``wait``)."""

    num_arguments: int
    launch: Timing
    wait: Timing


class OverheadPart(msgspec.Struct, frozen=True, kw_only=True):
    """Launches by the number of arrays that the program takes, and the line through them."""

    launches: tuple[Launch, ...] = ()
    line: Line | None = None
    left_out: tuple[str, ...] = ()


def measure_overhead(bench: Bench, budget: Budget) -> OverheadPart:
    """All numbers of arguments in turns, in rows of launches and one at a time; on the first device alone."""
    calls = {}
    for count in NUM_ARGUMENTS:
        arrays = [jax.device_put(jnp.float32(number), bench.devices[0]) for number in range(count)]
        calls[f"launch {count}"] = Call(run=_in_a_row(_nothing(), arrays, LAUNCHES))
        calls[f"wait {count}"] = Call(run=_in_a_row(_nothing(), arrays, 1))
    times = time_together(calls, budget)
    found = [
        Launch(
            num_arguments=count,
            launch=times.found[f"launch {count}"].over(LAUNCHES),
            wait=times.found[f"wait {count}"],
        )
        for count in NUM_ARGUMENTS
        if {f"launch {count}", f"wait {count}"} <= times.found.keys()
    ]
    line = fit_line([one.num_arguments for one in found], [one.launch.median_s for one in found]) if found else None
    left = [f"{what} arguments: {why}" for what, why in times.why_not.items()]
    return OverheadPart(launches=tuple(found), line=line, left_out=tuple(left))


def _nothing() -> Callable[..., jax.Array]:
    """A new program each time: one that was launched with other arguments looks for its code first."""
    return jax.jit(lambda *arrays: arrays[0] + 1)


def _in_a_row(program: Callable[..., Any], arrays: list[jax.Array], launches: int) -> Callable[[], Any]:
    def run() -> Any:
        result = None
        for _ in range(launches):
            result = program(*arrays)
        return result

    return run
