"""Bytes/s of memory: arrays of growing size read and written on every device at once."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import msgspec
from jax import lax

from meshwright.bench.devices import Bench, Block, KeptArrays
from meshwright.bench.machine import MEMORY_ELEMENTS
from meshwright.bench.timing import Budget, Timing, rounds_for, time_together
from meshwright.core.units import format_bytes

SMALLEST, LARGEST = 2**16, 2**32
"""Bytes of an array."""
ELEMENT_BYTES = 4

LEAST_ROUNDS = 8
"""So that entering and leaving the loop over rounds does not count."""

Kind = Literal["copy", "silu"]


class Copy(msgspec.Struct, frozen=True, kw_only=True):
    """An array of a device read and written once; ``bytes_per_s`` counts both. "silu" has an exponential on the way."""

    kind: Kind
    array_bytes: int
    seconds: Timing
    bytes_per_s: float


class CopyPart(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes, and what was left out and why."""

    copies: tuple[Copy, ...] = ()
    left_out: tuple[str, ...] = ()

    def largest(self, kind: Kind = "copy") -> Copy | None:
        """The copy of the largest array."""
        return max((c for c in self.copies if c.kind == kind), key=lambda c: c.array_bytes, default=None)


def measure_copy(bench: Bench, budget: Budget) -> CopyPart:
    """Sizes by fours as far as memory and the budget allow, and a silu over a few MiB, as layers have."""
    silu, left = _sizes(bench, "silu", [MEMORY_ELEMENTS * ELEMENT_BYTES], budget.share(0.3))
    most = min(LARGEST, bench.memory_bytes / (64 if bench.emulated else 8))
    sizes = [SMALLEST * 4**power for power in range(16) if SMALLEST * 4**power <= most]
    found, more = _sizes(bench, "copy", sizes, budget)
    return CopyPart(copies=(*silu, *found), left_out=(*left, *more))


def _sizes(bench: Bench, kind: Kind, sizes: list[int], budget: Budget) -> tuple[list[Copy], list[str]]:
    """Growing sizes; where one cannot be measured the larger ones are left out with it."""
    found: list[Copy] = []
    rate = 1e9
    for number, size in enumerate(sizes):
        rounds = max(LEAST_ROUNDS, rounds_for(2 * size / rate, target_s=min(0.01, budget.left_s / 20), most=256))
        blocks, body = [Block(shape=(size // ELEMENT_BYTES,))], passes(kind, rounds)
        # A few MiB are written anew, as a layer's results are; large arrays in their own memory.
        call = bench.call(body, blocks) if kind == "silu" else KeptArrays(bench, blocks).call(body)
        mine = budget.share(1 / (len(sizes) - number) if number < len(sizes) - 1 else 1)
        times = time_together({"": call}, mine, max_repeats=10)
        if times.why_not:
            return found, [f"{kind} of {format_bytes(size)} and more: {times.why_not['']}"]
        seconds = times.found[""].over(rounds)
        rate = 2 * size / seconds.median_s
        found.append(Copy(kind=kind, array_bytes=size, seconds=seconds, bytes_per_s=rate))
    return found, []


def passes(kind: Kind, rounds: int) -> Callable[[jax.Array], jax.Array]:
    """An array read and written ``rounds`` times; the addition keeps the compiler from leaving any out."""

    def once(_: Any, x: jax.Array) -> jax.Array:
        return jax.nn.silu(x) + 0.5 if kind == "silu" else x + 1.0

    return lambda x: lax.fori_loop(0, rounds, once, x)
