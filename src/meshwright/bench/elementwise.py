"""Parts that measure vector units and memory: chains of multiply-adds, distances beside a product, copies."""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Array

from meshwright.bench.devices import Bench, Runner, Workload
from meshwright.bench.fit import crossing
from meshwright.bench.results import (
    ELEMENT_BYTES,
    ChainTime,
    Copy,
    CopyKind,
    CopyPart,
    Distance,
    DistancePart,
    ElementwisePart,
    Timing,
)
from meshwright.bench.timing import rounds_for
from meshwright.bench.workloads import (
    DISTANCES,
    EXP_OPS,
    FLOPS_EACH,
    SILU_BYTES,
    chain_workload,
    copy_workload,
    distance_workload,
    product_flops,
)
from meshwright.core.units import format_bytes
from meshwright.cost.formulas.roofline import critical_repeats
from meshwright.spec.chip import Chip, vector_peak


def measure_distance(runner: Runner) -> DistancePart:
    """Measures all `DISTANCES` in alternation in float32. Predictions take the measured rate of products, else the data
    sheet's; and the data sheet's rate of vector units, else the measured one."""
    size = runner.bench.sizes.distance
    elementwise: ElementwisePart | None = runner.found.get("elementwise")
    vector = (elementwise and elementwise.vector_flops_per_s) or vector_peak(runner.bench.chip)
    predicted = predicted_seconds(size, runner.bench.platform, matmul=runner.product_rate("fp32"), vector=vector)
    times = runner.time({what: distance_workload(what, size) for what in DISTANCES}, max_repeats=15)
    product, base = times.get("matmul"), predicted["matmul"]
    distances = []
    for what, seconds in times.items():
        expected = predicted[what]
        distances.append(
            Distance(
                what=what, m=size, k=size, n=size, seconds=seconds,
                flops_per_s=product_flops(size, size, size) / seconds.median_s,
                ratio=seconds.median_s / product.median_s if product else None,
                predicted_s=expected,
                predicted_ratio=expected / base if expected and base else None,
            )
        )  # fmt: skip
    return DistancePart(distances=tuple(distances))


def predicted_seconds(
    size: int, platform: str, *, matmul: float | None, vector: float | None
) -> dict[str, float | None]:
    """Returns seconds by name: 2 n^3 over the matrix rate; vector operations over half the vector FLOP/s; else None."""
    seconds: dict[str, float | None] = {}
    for what, (_, work) in DISTANCES.items():
        rate, ops = (matmul, 2) if work is None else (vector and vector / 2, work[0] + work[1] * EXP_OPS[platform])
        seconds[what] = ops * float(size) ** 3 / rate if rate else None
    return seconds


FUSED = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
ENOUGH = 6.0
"""Multiple of the time of one multiply-add at which the sweep ends."""
MADE_BYTES_PER_S = 1e9
"""Roughly the rate at which a host writes memory for the first time."""


def measure_elementwise(runner: Runner) -> ElementwisePart:
    """Measures fused chains until one takes several times as long as one multiply-add, then short unfused chains."""
    bench, elements = runner.bench, chain_elements(runner.bench, runner.left_s)
    array: list[Array] = []
    fused: list[ChainTime] = []
    fusing = runner.share(0.6)
    for repeats in FUSED:
        # The first chain also has to make the array on every device.
        mine, workload = fusing.share(0.3 if fused else 0.6), chain_workload(elements, repeats)
        seconds = mine.time_one(bench.call(workload, array), f"{repeats} and more multiply-adds", max_repeats=10)
        if not seconds:
            break
        fused.append(_chain(workload, repeats, seconds, fused=True))
        if seconds.median_s > ENOUGH * fused[0].seconds.median_s:
            break
    eager = {n: chain_workload(elements, n, fused=False) for n in bench.sizes.eager}
    times = runner.time(
        {n: bench.call(workload, array) for n, workload in eager.items()}, "{} op by op", max_repeats=10
    )
    chains = [_chain(eager[n], n, seconds, fused=False) for n, seconds in times.items()]
    return ElementwisePart(
        elements=elements, cache_bytes=bench.cache_bytes, chains=(*fused, *chains), **_doubling(fused, bench.chip)
    )


def chain_elements(bench: Bench, seconds: float) -> int:
    """Returns the float32 elements per device, a power of two: enough to exceed the cache, at most a 20th of memory.

    Emulated devices get fewer if making all arrays would take the host more than a sixth of the seconds.
    """
    wanted = max(4 * bench.cache_bytes, bench.sizes.chain_bytes)
    if bench.emulated:
        wanted = min(wanted, max(2.0**20, MADE_BYTES_PER_S * seconds / 6 / len(bench.devices)))
    elements = int(min(wanted, bench.memory_bytes / 20)) // ELEMENT_BYTES
    return int(2 ** (elements.bit_length() - 1))


def _chain(workload: Workload, repeats: int, seconds: Timing, *, fused: bool) -> ChainTime:
    moved = 2 * ELEMENT_BYTES * workload.shards[0].shape[0] * workload.launches
    return ChainTime(
        repeats=repeats,
        fused=fused,
        seconds=seconds,
        flops_per_s=workload.work / seconds.median_s,
        bytes_per_s=moved / seconds.median_s,
    )


def _doubling(fused: Sequence[ChainTime], chip: Chip) -> dict[str, Any]:
    """Returns the fields of `ElementwisePart` on the length at which the time doubles, measured and predicted."""
    if not fused:
        return {}
    sheet, first_s = vector_peak(chip), fused[0].seconds.median_s
    rate = sheet or _fastest(fused)
    source = f"data sheet of {chip.name}" if sheet else "measured, the fastest chain"
    return {
        "doubles_at": crossing([c.repeats for c in fused], [c.seconds.median_s for c in fused], 2 * first_s),
        "predicted_at": doubling_repeats(rate, fused[0].bytes_per_s) if rate else None,
        "vector_flops_per_s": rate,
        "vector_source": source if rate else "",
    }


def doubling_repeats(vector_flops_per_s: float, bytes_per_s: float) -> float:
    """Returns the multiply-adds that take twice an element's memory time: 2 x 8 bytes x (FLOP/s / 2) / (bytes/s)."""
    ops_per_s = vector_flops_per_s / FLOPS_EACH
    return float(2 * critical_repeats(ops_per_s, bytes_per_s, bytes_per_element=2 * ELEMENT_BYTES))


def _fastest(fused: Sequence[ChainTime]) -> float | None:
    """Returns the FLOP/s of the fastest chain; None if memory hides the arithmetic: the time did not double."""
    if fused[-1].seconds.median_s < 2 * fused[0].seconds.median_s:
        return None
    return max(chain.flops_per_s for chain in fused)


SMALLEST, LARGEST = 2**16, 2**32
"""Bytes of an array."""
LEAST_ROUNDS = 8
"""Enough to make the start and end of the loop over rounds negligible."""


def measure_copy(runner: Runner) -> CopyPart:
    """Measures a silu over a few MiB, as in layers, then ever larger copies, as far as memory and budget allow."""
    most = min(LARGEST, runner.bench.memory_bytes / runner.bench.sizes.largest_copy)
    sizes = [SMALLEST * 4**power for power in range(16) if SMALLEST * 4**power <= most]
    return CopyPart(copies=(*_copies(runner.share(0.3), "silu", [SILU_BYTES]), *_copies(runner, "copy", sizes)))


def _copies(runner: Runner, kind: CopyKind, sizes: Sequence[int]) -> list[Copy]:
    """Measures increasing sizes until one cannot be measured."""
    copies, tail = list[Copy](), " and more"
    for size, mine in runner.each(sizes):
        rate = copies[-1].bytes_per_s if copies else 1e9
        rounds = max(LEAST_ROUNDS, rounds_for(2 * size / rate, target_s=min(0.01, runner.left_s / 20), most=256))
        workload = copy_workload(kind, size, rounds)
        seconds = mine.time_one(workload, f"{kind} of {format_bytes(size)}{tail * (size < sizes[-1])}", max_repeats=10)
        if not seconds:
            break
        copies.append(Copy(kind=kind, array_bytes=size, seconds=seconds, bytes_per_s=workload.work / seconds.median_s))
    return copies
