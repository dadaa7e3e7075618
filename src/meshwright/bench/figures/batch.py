"""A small layer over growing batches: where its time begins to grow with the tokens, beside the critical batch."""

import jax
import jax.numpy as jnp
import msgspec
from jax import lax

from meshwright.bench.devices import Bench, Block
from meshwright.bench.fit import Knee, fit_knee
from meshwright.bench.timing import Budget, Call, Timing, time_together
from meshwright.core.dims import DTYPE_BYTES
from meshwright.cost.formulas.roofline import critical_batch
from meshwright.nn.ops.activations import silu_mul

EMULATED_SIZES = {"D": 512, "F": 1408, "N": 8, "K": 4, "H": 64}
SIZES = {"D": 4096, "F": 14336, "N": 32, "K": 8, "H": 128}
EMULATED_BATCHES = tuple(2**power for power in range(11))
BATCHES = tuple(2**power for power in range(14))
ROUNDS = 4
"""Layers in a call, one after the other, all of the same weights."""
EPSILON = 1e-6


class LayerTime(msgspec.Struct, frozen=True, kw_only=True):
    """One layer forward with so many tokens on a device."""

    tokens: int
    seconds: Timing
    tokens_per_us: float
    flops_per_s: float


class BatchPart(msgspec.Struct, frozen=True, kw_only=True):
    """Times over batches; the fitted knee, and the critical batch that the measured rates predict: C/W x bytes/2."""

    sizes: dict[str, int]
    dtype: str
    layers: tuple[LayerTime, ...] = ()
    knee: Knee | None = None
    predicted_knee: float | None = None
    left_out: tuple[str, ...] = ()


def measure_batch(
    bench: Bench, budget: Budget, *, matmul_rate: float | None = None, memory_rate: float | None = None
) -> BatchPart:
    """Products of attention and a gated MLP, with norms, on doubling batches."""
    sizes = EMULATED_SIZES if bench.emulated else SIZES
    batches = EMULATED_BATCHES if bench.emulated else BATCHES
    dtype = bench.main_dtype
    found: list[LayerTime] = []
    left: list[str] = []
    weights = bench.data(weight_blocks(sizes, dtype))(0)
    for number, tokens in enumerate(batches):
        times = time_together(
            {"": _call(bench, weights, sizes, tokens)}, budget.share(2 / (len(batches) - number + 1)), max_repeats=10
        )
        if times.why_not:
            left.append(f"batches of {tokens} tokens and more: {times.why_not['']}")
            break
        found.append(_layer_time(sizes, tokens, times.found[""].over(ROUNDS)))
    both = matmul_rate and memory_rate
    return BatchPart(
        sizes=dict(sizes),
        dtype=dtype,
        layers=tuple(found),
        knee=fit_knee([layer.tokens for layer in found], [layer.seconds.median_s for layer in found]),
        predicted_knee=critical_batch(matmul_rate, memory_rate, weight_bytes=DTYPE_BYTES[dtype]) if both else None,
        left_out=tuple(left),
    )


def weight_blocks(sizes: dict[str, int], dtype: str) -> list[Block]:
    """Wq, Wk, Wv, Wo, gate, up and down of one layer."""
    width, ff = sizes["D"], sizes["F"]
    heads, kv = sizes["N"] * sizes["H"], sizes["K"] * sizes["H"]
    shapes = ((width, heads), (width, kv), (width, kv), (heads, width), (width, ff), (width, ff), (ff, width))
    return [Block(shape=shape, dtype=dtype, scale=shape[0] ** -0.5) for shape in shapes]


def layer_flops(sizes: dict[str, int], tokens: int) -> float:
    """2 for every weight and token."""
    return 2.0 * tokens * sum(rows * columns for rows, columns in (b.shape for b in weight_blocks(sizes, "fp32")))


def _call(bench: Bench, weights: tuple[jax.Array, ...], sizes: dict[str, int], tokens: int) -> Call:
    stream = bench.data([Block(shape=(tokens, sizes["D"]), dtype=bench.main_dtype)])(0)
    return Call(run=bench.program(_layers), arguments=lambda repeat: (*stream, *weights))


def _layers(x: jax.Array, *weights: jax.Array) -> jax.Array:
    return lax.fori_loop(0, ROUNDS, lambda _, y: _layer(y, *weights), x)


def _layer(x: jax.Array, *weights: jax.Array) -> jax.Array:
    """Heads are not mixed: the mean of queries, keys and values stands in for attention."""
    query, key, value, out, gate, up, down = weights
    h = _norm(x)
    group = query.shape[1] // key.shape[1]
    mixed = h @ query + jnp.tile(h @ key + h @ value, (1, group))
    x = x + mixed @ out
    h = _norm(x)
    return _norm(x + silu_mul((h @ gate)[None], (h @ up)[None])[0] @ down)


def _norm(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + EPSILON)).astype(x.dtype)


def _layer_time(sizes: dict[str, int], tokens: int, seconds: Timing) -> LayerTime:
    return LayerTime(
        tokens=tokens,
        seconds=seconds,
        tokens_per_us=tokens / seconds.median_s * 1e-6,
        flops_per_s=layer_flops(sizes, tokens) / seconds.median_s,
    )
