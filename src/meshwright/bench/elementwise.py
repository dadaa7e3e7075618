"""What is no product: multiply-adds until the time doubles, sums of pairs beside a product, memory."""

from collections.abc import Sequence
from typing import Any

import jax

from meshwright.bench.cases import (
    DISTANCES,
    FLOPS_EACH,
    SILU_BYTES,
    chain_case,
    copy_case,
    distance_case,
    product_flops,
)
from meshwright.bench.devices import Bench, Case, Runner
from meshwright.bench.fit import crossing
from meshwright.bench.results import (
    ELEMENT_BYTES,
    Chain,
    Copy,
    CopyKind,
    CopyPart,
    Distance,
    DistancePart,
    ElementwisePart,
    Timing,
)
from meshwright.bench.timing import rounds_for
from meshwright.core.errors import InputError
from meshwright.core.units import format_bytes
from meshwright.cost.formulas.roofline import critical_repeats
from meshwright.spec.chip import Chip, vector_peak_from_anatomy


def measure_distance(runner: Runner) -> DistancePart:
    """All three in turns in float32, with predictions from rates that were measured (or else the data sheet's)."""
    size = runner.bench.sizes.distance
    elementwise: ElementwisePart | None = runner.found.get("elementwise")
    vector = (elementwise and elementwise.vector_flops_per_s) or vector_peak(runner.bench.chip)
    predicted = predicted_seconds(size, matmul=runner.product_rate("fp32"), vector=vector)
    times = runner.time({what: distance_case(what, size) for what in DISTANCES}, max_repeats=15)
    product, base = times.get("matmul"), predicted["matmul"]
    found = []
    for what, seconds in times.items():
        expected = predicted[what]
        found.append(
            Distance(
                what=what, m=size, k=size, n=size, seconds=seconds,
                flops_per_s=product_flops(size, size, size) / seconds.median_s,
                ratio=seconds.median_s / product.median_s if product else None,
                predicted_s=expected,
                predicted_ratio=expected / base if expected and base else None,
            )
        )  # fmt: skip
    return DistancePart(distances=tuple(found))


def predicted_seconds(size: int, *, matmul: float | None, vector: float | None) -> dict[str, float | None]:
    """2 n^3 over the matrix rate; vector operations at half the vector FLOP/s, where a multiply-add counts twice."""
    rates = {what: (matmul, 2) if ops is None else (vector and vector / 2, ops) for what, (_, ops) in DISTANCES.items()}
    return {what: ops * float(size) ** 3 / rate if rate else None for what, (rate, ops) in rates.items()}


FUSED = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
ENOUGH = 6.0
"""Times the time of one multiply-add from which the sweep is over."""
MADE_BYTES_PER_S = 1e9
"""About what a host copies into memory that it has not touched yet."""


def measure_elementwise(runner: Runner) -> ElementwisePart:
    """Fused chains until they are several times slower than one multiply-add, then short ones op by op."""
    bench, elements = runner.bench, chain_elements(runner.bench, runner.left_s)
    array: list[jax.Array] = []
    fused: list[Chain] = []
    fusing = runner.share(0.6)
    for repeats in FUSED:
        # The first one also makes the array and brings it to every device.
        mine, case = fusing.share(0.3 if fused else 0.6), chain_case(elements, repeats)
        seconds = mine.time_one(bench.call(case, array), f"{repeats} and more multiply-adds", max_repeats=10)
        if not seconds:
            break
        fused.append(_chain(case, repeats, seconds, fused=True))
        if seconds.median_s > ENOUGH * fused[0].seconds.median_s:
            break
    eager = {n: chain_case(elements, n, fused=False) for n in bench.sizes.eager}
    times = runner.time({n: bench.call(case, array) for n, case in eager.items()}, "{} op by op", max_repeats=10)
    chains = [_chain(eager[n], n, seconds, fused=False) for n, seconds in times.items()]
    return ElementwisePart(
        elements=elements, cache_bytes=bench.cache_bytes, chains=(*fused, *chains), **_doubling(fused, bench.chip)
    )


def chain_elements(bench: Bench, seconds: float) -> int:
    """float32 elements of a device, a power of two: four times its cache, where that is a 20th of its memory.

    Emulated devices get fewer where the host would take more than a sixth of the seconds to make all their arrays.
    """
    wanted = max(4 * bench.cache_bytes, bench.sizes.chain_bytes)
    if bench.emulated:
        wanted = min(wanted, max(2.0**20, MADE_BYTES_PER_S * seconds / 6 / len(bench.devices)))
    elements = int(min(wanted, bench.memory_bytes / 20)) // ELEMENT_BYTES
    return int(2 ** (elements.bit_length() - 1))


def _chain(case: Case, repeats: int, seconds: Timing, *, fused: bool) -> Chain:
    moved = 2 * ELEMENT_BYTES * case.blocks[0].shape[0] * case.launches
    return Chain(
        repeats=repeats,
        fused=fused,
        seconds=seconds,
        flops_per_s=case.work / seconds.median_s,
        bytes_per_s=moved / seconds.median_s,
    )


def _doubling(fused: Sequence[Chain], chip: Chip) -> dict[str, Any]:
    """Where the time doubles, measured and predicted."""
    if not fused:
        return {}
    sheet, first_s = vector_peak(chip), fused[0].seconds.median_s
    rate = sheet or _steepest(fused)
    source = f"data sheet of {chip.name}" if sheet else "measured, from what each further multiply-add takes"
    return {
        "doubles_at": crossing([c.repeats for c in fused], [c.seconds.median_s for c in fused], 2 * first_s),
        "predicted_at": doubling_repeats(rate, fused[0].bytes_per_s) if rate else None,
        "vector_flops_per_s": rate,
        "vector_source": source if rate else "",
    }


def doubling_repeats(vector_flops_per_s: float, bytes_per_s: float) -> float:
    """Multiply-adds that take twice as long as reading and writing an element: 2 x C x bytes / (W x FLOPs)."""
    ops_per_s = vector_flops_per_s / FLOPS_EACH
    return float(2 * critical_repeats(ops_per_s, bytes_per_s, bytes_per_element=2 * ELEMENT_BYTES))


def vector_peak(chip: Chip) -> float | None:
    """FLOP/s of a chip's vector units by its data sheet; None where it does not say."""
    try:
        return chip.vector_flops if chip.vector_flops is not None else vector_peak_from_anatomy(chip)
    except InputError:
        return None


def _steepest(fused: Sequence[Chain]) -> float | None:
    """FLOP/s of the last multiply-adds of the sweep; None where all of them hide behind memory."""
    if len(fused) < 2 or fused[-1].seconds.median_s < 2 * fused[0].seconds.median_s:
        return None
    before, last = fused[-2], fused[-1]
    added_s = last.seconds.median_s - before.seconds.median_s
    return (last.flops_per_s * last.seconds.median_s - before.flops_per_s * before.seconds.median_s) / added_s


SMALLEST, LARGEST = 2**16, 2**32
"""Bytes of an array."""
LEAST_ROUNDS = 8
"""So that entering and leaving the loop over rounds does not count."""


def measure_copy(runner: Runner) -> CopyPart:
    """Sizes by fours as far as memory and the budget allow, and a silu over a few MiB, as layers have."""
    most = min(LARGEST, runner.bench.memory_bytes / runner.bench.sizes.largest_copy)
    sizes = [SMALLEST * 4**power for power in range(16) if SMALLEST * 4**power <= most]
    return CopyPart(copies=(*_copies(runner.share(0.3), "silu", [SILU_BYTES]), *_copies(runner, "copy", sizes)))


def _copies(runner: Runner, kind: CopyKind, sizes: Sequence[int]) -> list[Copy]:
    """Growing sizes; where one cannot be measured the larger ones are left out with it."""
    found: list[Copy] = []
    for size, mine in runner.each(sizes):
        rate = found[-1].bytes_per_s if found else 1e9
        rounds = max(LEAST_ROUNDS, rounds_for(2 * size / rate, target_s=min(0.01, runner.left_s / 20), most=256))
        case = copy_case(kind, size, rounds)
        seconds = mine.time_one(case, f"{kind} of {format_bytes(size)} and more", max_repeats=10)
        if not seconds:
            break
        found.append(Copy(kind=kind, array_bytes=size, seconds=seconds, bytes_per_s=case.work / seconds.median_s))
    return found
