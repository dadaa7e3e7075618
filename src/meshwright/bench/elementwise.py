"""Benchmark parts for vector units and memory: chains of multiply-adds, distances of matrices, copies."""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Array

from meshwright.bench import results, workloads
from meshwright.bench.devices import Bench, Runner, Workload
from meshwright.bench.fit import crossing
from meshwright.bench.timing import rounds_for
from meshwright.core.units import format_bytes
from meshwright.cost.formulas.roofline import critical_repeats, vector_peak
from meshwright.spec.chip import Chip


def measure_distance(runner: Runner) -> results.DistancePart:
    """Measures all `DISTANCES` in alternation in float32. Predictions take the measured rate of products, else the data
    sheet's; and the data sheet's rate of vector units, else the measured one."""
    side = runner.bench.sizes.distance
    elementwise_part: results.ElementwisePart | None = runner.found.get("elementwise")
    vector_rate = (elementwise_part and elementwise_part.vector_flops_per_s) or vector_peak(runner.bench.chip)
    seconds_of = predicted_seconds(side, runner.bench.platform, matmul=runner.product_rate("fp32"), vector=vector_rate)
    timings = runner.time(
        {name: workloads.distance_workload(name, side) for name in workloads.DISTANCES}, max_repeats=15
    )
    product_timing, predicted_product_s = timings.get("matmul"), seconds_of["matmul"]
    distances = []
    for name, timing in timings.items():
        predicted_s = seconds_of[name]
        distances.append(
            results.Distance(
                what=name, m=side, k=side, n=side, seconds=timing,
                flops_per_s=workloads.product_flops(side, side, side) / timing.median_s,
                ratio=timing.median_s / product_timing.median_s if product_timing else None,
                predicted_s=predicted_s,
                predicted_ratio=predicted_s / predicted_product_s if predicted_s and predicted_product_s else None,
            )
        )  # fmt: skip
    return results.DistancePart(distances=tuple(distances))


def predicted_seconds(
    size: int, platform: str, *, matmul: float | None, vector: float | None
) -> dict[str, float | None]:
    """Returns predicted seconds of `DISTANCES` by name; ``matmul`` and ``vector`` are FLOP/s, None if unknown."""
    seconds_by_name: dict[str, float | None] = {}
    for name, (_, work) in workloads.DISTANCES.items():
        ops_per_s, ops = (
            (matmul, 2) if work is None else (vector and vector / 2, work[0] + work[1] * workloads.EXP_OPS[platform])
        )
        seconds_by_name[name] = ops * float(size) ** 3 / ops_per_s if ops_per_s else None
    return seconds_by_name


FUSED = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
ENOUGH = 6.0
"""The sweep of chains ends at one that takes this multiple of a single multiply-add's time."""
MADE_BYTES_PER_S = 1e9
"""Roughly the rate at which a host writes memory for the first time."""


def measure_elementwise(runner: Runner) -> results.ElementwisePart:
    """Measures fused chains until one takes several times as long as one multiply-add, then short unfused chains."""
    bench, elements = runner.bench, chain_elements(runner.bench, runner.left_s)
    arrays: list[Array] = []
    fused: list[results.ChainTime] = []
    fused_runner = runner.share(0.6)
    for repeats in FUSED:
        # The first chain also has to make the array on every device.
        sub_runner, workload = fused_runner.share(0.3 if fused else 0.6), workloads.chain_workload(elements, repeats)
        timing = sub_runner.time_one(bench.call(workload, arrays), f"{repeats} and more multiply-adds", max_repeats=10)
        if not timing:
            break
        fused.append(_chain(workload, repeats, timing, fused=True))
        if timing.median_s > ENOUGH * fused[0].seconds.median_s:
            break
    eager_workloads = {n: workloads.chain_workload(elements, n, fused=False) for n in bench.sizes.eager}
    timings = runner.time(
        {n: bench.call(workload, arrays) for n, workload in eager_workloads.items()}, "{} op by op", max_repeats=10
    )
    eager_chains = [_chain(eager_workloads[n], n, timing, fused=False) for n, timing in timings.items()]
    return results.ElementwisePart(
        elements=elements, cache_bytes=bench.cache_bytes, chains=(*fused, *eager_chains), **_doubling(fused, bench.chip)
    )


def chain_elements(bench: Bench, seconds: float) -> int:
    """Returns the float32 elements per device, a power of two: enough to exceed the cache, at most a 20th of memory.

    Emulated devices get fewer if making all arrays would take the host more than a sixth of the seconds.
    """
    array_bytes = max(4 * bench.cache_bytes, bench.sizes.chain_bytes)
    if bench.emulated:
        array_bytes = min(array_bytes, max(2.0**20, MADE_BYTES_PER_S * seconds / 6 / len(bench.devices)))
    num_elements = int(min(array_bytes, bench.memory_bytes / 20)) // results.ELEMENT_BYTES
    return int(2 ** (num_elements.bit_length() - 1))


def _chain(workload: Workload, repeats: int, timing: results.Timing, *, fused: bool) -> results.ChainTime:
    moved_bytes = 2 * results.ELEMENT_BYTES * workload.shards[0].shape[0] * workload.launches
    return results.ChainTime(
        repeats=repeats,
        fused=fused,
        seconds=timing,
        flops_per_s=workload.work / timing.median_s,
        bytes_per_s=moved_bytes / timing.median_s,
    )


def _doubling(chains: Sequence[results.ChainTime], chip: Chip) -> dict[str, Any]:
    """Returns the fields of `ElementwisePart` on the length at which the time doubles, measured and predicted."""
    if not chains:
        return {}
    sheet_flops_per_s, first_chain_s = vector_peak(chip), chains[0].seconds.median_s
    vector_flops_per_s = sheet_flops_per_s or _fastest(chains)
    rate_source = f"data sheet of {chip.name}" if sheet_flops_per_s else "measured, the fastest chain"
    return {
        "doubles_at": crossing([c.repeats for c in chains], [c.seconds.median_s for c in chains], 2 * first_chain_s),
        "predicted_at": doubling_repeats(vector_flops_per_s, chains[0].bytes_per_s) if vector_flops_per_s else None,
        "vector_flops_per_s": vector_flops_per_s,
        "vector_source": rate_source if vector_flops_per_s else "",
    }


def doubling_repeats(vector_flops_per_s: float, bytes_per_s: float) -> float:
    """Returns the multiply-adds that take twice an element's memory time: 2 x 8 bytes x (FLOP/s / 2) / (bytes/s)."""
    ops_per_s = vector_flops_per_s / workloads.FLOPS_EACH
    return float(2 * critical_repeats(ops_per_s, bytes_per_s, bytes_per_element=2 * results.ELEMENT_BYTES))


def _fastest(chains: Sequence[results.ChainTime]) -> float | None:
    """Returns the FLOP/s of the fastest chain; None if the longest takes less than twice the shortest's time."""
    if chains[-1].seconds.median_s < 2 * chains[0].seconds.median_s:
        return None
    return max(chain.flops_per_s for chain in chains)


SMALLEST, LARGEST = 2**16, 2**32
"""Bytes of the smallest and of the largest array that is copied."""
LEAST_ROUNDS = 8
"""Fewest rounds of a copy in a call: enough that the loop's start and end are negligible."""


def measure_copy(runner: Runner) -> results.CopyPart:
    """Measures a silu over a few MiB, as in layers, then ever larger copies, as far as memory and budget allow."""
    max_bytes = min(LARGEST, runner.bench.memory_bytes / runner.bench.sizes.largest_copy)
    sizes_bytes = [SMALLEST * 4**power for power in range(16) if SMALLEST * 4**power <= max_bytes]
    return results.CopyPart(
        copies=(*_copies(runner.share(0.3), "silu", [workloads.SILU_BYTES]), *_copies(runner, "copy", sizes_bytes))
    )


def _copies(runner: Runner, kind: results.CopyKind, sizes: Sequence[int]) -> list[results.Copy]:
    """Measures copies of increasing ``sizes`` until one cannot be measured."""
    copies, tail = list[results.Copy](), " and more"
    for size, timer in runner.each(sizes):
        bytes_per_s = copies[-1].bytes_per_s if copies else 1e9
        rounds = max(LEAST_ROUNDS, rounds_for(2 * size / bytes_per_s, target_s=min(0.01, runner.left_s / 20), most=256))
        workload = workloads.copy_workload(kind, size, rounds)
        timing = timer.time_one(workload, f"{kind} of {format_bytes(size)}{tail * (size < sizes[-1])}", max_repeats=10)
        if not timing:
            break
        copies.append(
            results.Copy(kind=kind, array_bytes=size, seconds=timing, bytes_per_s=workload.work / timing.median_s)
        )
    return copies
