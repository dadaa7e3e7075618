"""Multiply-adds on an array far larger than a cache: how many fit before the time doubles, fused and op by op."""

from collections.abc import Callable

import jax
import msgspec

from meshwright.bench.devices import Bench, Block, KeptArrays
from meshwright.bench.fit import crossing
from meshwright.bench.timing import Budget, Timing, time_together
from meshwright.core.errors import InputError
from meshwright.core.units import format_bytes
from meshwright.cost.formulas.roofline import critical_repeats
from meshwright.spec.chip import Chip, vector_peak_from_anatomy

FUSED = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
EAGER = (1, 2, 4, 8)
FEW_EAGER = (1, 2, 4)
ENOUGH = 6.0
"""Times the time of one multiply-add from which the sweep is over."""
MADE_BYTES_PER_S = 1e9
"""About what a host copies into memory that it has not touched yet."""
ELEMENT_BYTES = 4
FLOPS_EACH = 2
"""A multiplication and an addition."""


class Chain(msgspec.Struct, frozen=True, kw_only=True):
    """``repeats`` multiply-adds of every element: as one kernel, or as one kernel each."""

    repeats: int
    fused: bool
    seconds: Timing
    flops_per_s: float
    bytes_per_s: float


class ElementwisePart(msgspec.Struct, frozen=True, kw_only=True):
    """Chains of growing length, and how long they may be before one takes twice the time of a single multiply-add.

    Predicted as 2 x C x bytes / (W x FLOPs) under perfect overlap, with C the vector FLOP/s of ``vector_source`` and W
    the bytes/s of the shortest chain.
    """

    elements: int
    cache_bytes: float
    chains: tuple[Chain, ...] = ()
    doubles_at: float | None = None
    predicted_at: float | None = None
    vector_flops_per_s: float | None = None
    vector_source: str = ""
    left_out: tuple[str, ...] = ()


def measure_elementwise(bench: Bench, budget: Budget) -> ElementwisePart:
    """Fused chains until they are several times slower than one multiply-add, then short ones op by op."""
    elements = chain_elements(bench, budget.left_s)
    array = KeptArrays(bench, [Block(shape=(elements,)), Block(shape=(2,), contents="uniform")])
    fused, left = _fused(array, elements, budget.share(0.6))
    eager, more = _eager(array, elements, budget, few=bench.emulated)
    part = ElementwisePart(
        elements=elements, cache_bytes=bench.cache_bytes, chains=(*fused, *eager), left_out=(*left, *more)
    )
    return _with_doubling(part, bench.chip)


def chain_elements(bench: Bench, seconds: float) -> int:
    """float32 elements of a device, a power of two: four times its cache, where that is a 20th of its memory.

    Emulated devices get fewer where the host would take more than a sixth of the seconds to make all their arrays.
    """
    wanted = max(4 * bench.cache_bytes, 2.0**24 if bench.emulated else 2.0**28)
    if bench.emulated:
        wanted = min(wanted, max(2.0**20, MADE_BYTES_PER_S * seconds / 6 / len(bench.devices)))
    elements = int(min(wanted, bench.memory_bytes / 20)) // ELEMENT_BYTES
    return int(2 ** (elements.bit_length() - 1))


def _fused(array: KeptArrays, elements: int, budget: Budget) -> tuple[list[Chain], list[str]]:
    found: list[Chain] = []
    for repeats in FUSED:
        # the first one also makes the array and brings it to every device
        mine = budget.share(0.3 if found else 0.6)
        times = time_together({"": array.call(multiply_adds(repeats))}, mine, max_repeats=10)
        if times.why_not:
            return found, [f"{repeats} and more multiply-adds: {times.why_not['']}"]
        found.append(_chain(elements, repeats, True, times.found[""]))
        if found[-1].seconds.median_s > ENOUGH * found[0].seconds.median_s:
            break
    return found, []


def multiply_adds(repeats: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """x = a x + b again and again, with a and b that the compiler does not know."""

    def body(x: jax.Array, ab: jax.Array) -> jax.Array:
        factor, added = ab[0] * 1e-3, ab[1]
        for _ in range(repeats):
            x = x * factor + added
        return x

    return body


def _eager(array: KeptArrays, elements: int, budget: Budget, *, few: bool) -> tuple[list[Chain], list[str]]:
    """Chains of single kernels."""
    counts = FEW_EAGER if few else EAGER
    calls = {str(repeats): array.call(multiply_adds(1), launches=repeats) for repeats in counts}
    times = time_together(calls, budget, max_repeats=10)
    chains = [_chain(elements, int(repeats), False, seconds) for repeats, seconds in times.found.items()]
    return chains, [f"{repeats} op by op: {why}" for repeats, why in times.why_not.items()]


def _chain(elements: int, repeats: int, fused: bool, seconds: Timing) -> Chain:
    moved = 2 * ELEMENT_BYTES * elements * (1 if fused else repeats)
    return Chain(
        repeats=repeats,
        fused=fused,
        seconds=seconds,
        flops_per_s=FLOPS_EACH * repeats * elements / seconds.median_s,
        bytes_per_s=moved / seconds.median_s,
    )


def _with_doubling(part: ElementwisePart, chip: Chip) -> ElementwisePart:
    """The part with where the time doubles, measured and predicted."""
    fused = [chain for chain in part.chains if chain.fused]
    if not fused:
        return part
    xs, ys = [float(c.repeats) for c in fused], [c.seconds.median_s for c in fused]
    sheet = vector_peak(chip)
    rate = sheet or _steepest(fused)
    predicted = doubling_repeats(rate, fused[0].bytes_per_s) if rate else None
    source = f"data sheet of {chip.name}" if sheet else "measured, from what each further multiply-add takes"
    return msgspec.structs.replace(
        part,
        doubles_at=crossing(xs, ys, 2 * ys[0]),
        predicted_at=predicted,
        vector_flops_per_s=rate,
        vector_source=source if rate else "",
    )


def doubling_repeats(vector_flops_per_s: float, bytes_per_s: float) -> float:
    """Multiply-adds that take twice as long as reading and writing an element: 2 x C x bytes / (W x FLOPs)."""
    ops_per_s = vector_flops_per_s / FLOPS_EACH
    return float(2 * critical_repeats(ops_per_s, bytes_per_s, bytes_per_element=2 * ELEMENT_BYTES))


def vector_peak(chip: Chip) -> float | None:
    """FLOP/s of a chip's vector units by its data sheet; None where it does not say."""
    if chip.vector_flops is not None:
        return chip.vector_flops
    try:
        return vector_peak_from_anatomy(chip)
    except InputError:
        return None


def _steepest(fused: list[Chain]) -> float | None:
    """FLOP/s of the last multiply-adds of the sweep; None where all of them hide behind memory."""
    if len(fused) < 2 or fused[-1].seconds.median_s < 2 * fused[0].seconds.median_s:
        return None
    before, last = fused[-2], fused[-1]
    added_s = last.seconds.median_s - before.seconds.median_s
    return (last.flops_per_s * last.seconds.median_s - before.flops_per_s * before.seconds.median_s) / added_s


def describe_array(part: ElementwisePart) -> str:
    """``"67.1 MB a device, cache 33.6 MB"``."""
    cache = f", cache {format_bytes(part.cache_bytes)}" if part.cache_bytes else ""
    return f"{format_bytes(part.elements * ELEMENT_BYTES)} a device{cache}"
