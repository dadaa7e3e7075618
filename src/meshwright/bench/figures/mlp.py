"""A gated MLP forward and backward: what of the rate of plain products is left in a layer of a training step."""

import jax
import msgspec

from meshwright.bench.devices import Bench, Block
from meshwright.bench.figures.matmul import MatmulPart
from meshwright.bench.machine import mlp_flops
from meshwright.bench.timing import Budget, Timing, time_together
from meshwright.nn.ops.activations import silu_mul

EMULATED_SHAPES = ((512, 256, 704), (1024, 512, 1408))
SHAPES = ((4096, 4096, 14336), (16384, 4096, 14336))
"""Tokens, model width and feed-forward width."""


class Mlp(msgspec.Struct, frozen=True, kw_only=True):
    """An MLP of a device. ``mfu`` counts its model FLOPs against the data sheet's peak, ``of_matmul`` against the
    fastest square product."""

    dtype: str
    tokens: int
    d_model: int
    d_ff: int
    seconds: Timing
    flops_per_s: float
    mfu: float | None
    of_matmul: float | None


class MlpPart(msgspec.Struct, frozen=True, kw_only=True):
    """The MLPs, and what was left out and why."""

    mlps: tuple[Mlp, ...] = ()
    left_out: tuple[str, ...] = ()


def measure_mlp(bench: Bench, budget: Budget, matmul: MatmulPart) -> MlpPart:
    """Every shape forward and backward, the smallest first."""
    best = matmul.best(bench.main_dtype)
    found, left = [], []
    shapes = EMULATED_SHAPES if bench.emulated else SHAPES
    for number, shape in enumerate(shapes):
        call = bench.call(_both_passes, _blocks(shape, bench.main_dtype))
        times = time_together({"": call}, budget.share(1 / (len(shapes) - number)))
        if times.why_not:
            left.append(f"MLP of {' x '.join(map(str, shape))}: {times.why_not['']}")
        else:
            found.append(_mlp(bench, shape, times.found[""], best.flops_per_s if best else None))
    return MlpPart(mlps=tuple(found), left_out=tuple(left))


def _blocks(shape: tuple[int, int, int], dtype: str) -> list[Block]:
    m, k, n = shape
    sizes = ((m, k), (k, n), (k, n), (n, k), (m, k))
    scales = (1.0, k**-0.5, k**-0.5, n**-0.5, 1.0)
    return [Block(shape=size, dtype=dtype, scale=scale) for size, scale in zip(sizes, scales, strict=True)]


def _both_passes(
    x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, ...]:
    """The result and the gradients of the input and of all three weights."""

    def forward(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        hidden = silu_mul((x @ gate)[None], (x @ up)[None])[0]
        return hidden @ down

    out, backward = jax.vjp(forward, x, gate, up, down)
    return out, *backward(cotangent)


def _mlp(bench: Bench, shape: tuple[int, int, int], seconds: Timing, matmul_rate: float | None) -> Mlp:
    rate = mlp_flops(shape) / seconds.median_s
    peak = bench.chip.peak_flops.get(bench.main_dtype)
    return Mlp(
        dtype=bench.main_dtype, tokens=shape[0], d_model=shape[1], d_ff=shape[2], seconds=seconds, flops_per_s=rate,
        mfu=rate / peak if peak else None, of_matmul=rate / matmul_rate if matmul_rate else None,
    )  # fmt: skip
