"""What is no product for the matrix units: log-space products and L1 distances beside a product of the same sizes."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import msgspec

from meshwright.bench.devices import Bench, Block
from meshwright.bench.figures.elementwise import vector_peak
from meshwright.bench.figures.matmul import product_flops
from meshwright.bench.timing import Budget, Timing, time_together

OPS: dict[str, int] = {"log-space": 6, "L1 distance": 3}
"""Vector operations for each of the m k n pairs. Log-space: add and maximum, then add again, subtract, exponential,
add; L1: subtract, magnitude, add. An exponential counts as one, though it takes several."""


class Distance(msgspec.Struct, frozen=True, kw_only=True):
    """One way to combine [m,k] and [k,n]. ``flops_per_s`` counts 2 m k n for all of them; ``ratio`` is the time over
    that of the product. Predicted from the matrix and the vector rates, None where they are not known."""

    what: str
    m: int
    k: int
    n: int
    seconds: Timing
    flops_per_s: float
    ratio: float | None
    predicted_s: float | None
    predicted_ratio: float | None


class DistancePart(msgspec.Struct, frozen=True, kw_only=True):
    """Product, log-space product and L1 distance, and what was left out and why."""

    distances: tuple[Distance, ...] = ()
    left_out: tuple[str, ...] = ()


def measure_distance(
    bench: Bench, budget: Budget, *, matmul_rate: float | None = None, vector_rate: float | None = None
) -> DistancePart:
    """All three in turns in float32, with predictions from rates that were measured (or else the data sheet's)."""
    size = 128 if bench.emulated else 1024
    rates = {
        "matmul": matmul_rate or bench.chip.peak_flops.get("fp32"),
        "vector": vector_rate or vector_peak(bench.chip),
    }
    block = Block(shape=(size, size))
    calls = {what: bench.call(body, [block, block]) for what, body in BODIES.items()}
    times = time_together(calls, budget, max_repeats=15)
    product = times.found.get("matmul")
    predicted = predicted_seconds(size, **rates)
    found = []
    for what, seconds in times.found.items():
        found.append(
            Distance(
                what=what, m=size, k=size, n=size, seconds=seconds,
                flops_per_s=product_flops(size, size, size) / seconds.median_s,
                ratio=seconds.median_s / product.median_s if product else None,
                predicted_s=predicted[what],
                predicted_ratio=_ratio(predicted[what], predicted["matmul"]),
            )
        )  # fmt: skip
    return DistancePart(distances=tuple(found), left_out=tuple(f"{w}: {why}" for w, why in times.why_not.items()))


def predicted_seconds(size: int, *, matmul: float | None, vector: float | None) -> dict[str, float | None]:
    """2 n^3 over the matrix rate; vector operations at half the vector FLOP/s, where a multiply-add counts twice."""
    pairs = float(size) ** 3
    found: dict[str, float | None] = {"matmul": 2 * pairs / matmul if matmul else None}
    for what, ops in OPS.items():
        found[what] = ops * pairs / (vector / 2) if vector else None
    return found


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def log_space(a: jax.Array, b: jax.Array) -> jax.Array:
    """log of the product of exp a and exp b."""
    return jax.nn.logsumexp(a[:, :, None] + b[None, :, :], axis=1)


def l1_distance(a: jax.Array, b: jax.Array) -> jax.Array:
    """Sum of the magnitudes of differences between rows of a and columns of b."""
    return jnp.sum(jnp.abs(a[:, :, None] - b[None, :, :]), axis=1)


BODIES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "matmul": _matmul,
    "log-space": log_space,
    "L1 distance": l1_distance,
}
