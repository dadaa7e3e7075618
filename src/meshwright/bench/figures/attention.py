"""FLOP/s of the attention that programs run, forward and backward, over sequence lengths."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import msgspec

from meshwright.algebra.ops.attention import keys_per_query
from meshwright.bench.devices import Bench, Block
from meshwright.bench.machine import ATTENTION_SHAPE, attention_flops
from meshwright.bench.timing import Budget, Timing, time_together
from meshwright.nn.attention.choice import attention, attention_backward
from meshwright.nn.attention.visibility import AttentionCall, Places

Shape = tuple[int, int, int, int, int]
"""B, T, N, K, H of a device."""

EMULATED_LENGTHS = (128, 256, 512)
LENGTHS = (1024, 2048, 4096, 8192, 16384)
TOKENS = 16384
FORWARD_PRODUCTS, ALL_PRODUCTS = 2, 7
"""Products over queries and keys: scores and mix forward; backward the scores again and four of cotangents."""


class AttentionTime(msgspec.Struct, frozen=True, kw_only=True):
    """Attention of one shape. FLOPs are those that `cost` counts: on accelerators without the keys that are masked, on
    emulated devices, whose attention is priced with its scores in memory, with them."""

    batch: int
    length: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    forward: Timing
    both: Timing
    forward_flops_per_s: float
    both_flops_per_s: float
    share_of_peak: float | None


class AttentionPart(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths, and what was left out and why."""

    dtype: str
    times: tuple[AttentionTime, ...] = ()
    left_out: tuple[str, ...] = ()


def measure_attention(bench: Bench, budget: Budget) -> AttentionPart:
    """As many tokens for every length, forward alone and both passes in turns."""
    found, left = [], []
    shapes = shapes_of(bench)
    for number, shape in enumerate(shapes):
        calls = {
            "forward": bench.call(_body(shape, both=False), _blocks(shape, bench.main_dtype)),
            "both": bench.call(_body(shape, both=True), _blocks(shape, bench.main_dtype)),
        }
        times = time_together(calls, budget.share(1 / (len(shapes) - number)), max_repeats=15)
        if times.why_not:
            left.append(f"attention over {shape[1]} positions: {next(iter(times.why_not.values()))}")
        else:
            found.append(_time(bench, shape, times.found["forward"], times.found["both"]))
    return AttentionPart(dtype=bench.main_dtype, times=tuple(found), left_out=tuple(left))


def shapes_of(bench: Bench) -> list[Shape]:
    """Sequences of growing length, together as many tokens."""
    batch, length, heads, kv_heads, width = ATTENTION_SHAPE
    if bench.emulated:
        return [(max(1, batch * length // t), t, heads, kv_heads, width) for t in EMULATED_LENGTHS]
    return [(TOKENS // t, t, 32, 8, 128) for t in LENGTHS]


def _blocks(shape: Shape, dtype: str) -> list[Block]:
    batch, length, heads, kv_heads, width = shape
    query, key = (batch, length, heads, width), (batch, length, kv_heads, width)
    return [Block(shape=size, dtype=dtype) for size in (query, key, key, query)]


def _body(shape: Shape, *, both: bool) -> Callable[..., Any]:
    batch, length, _, _, width = shape

    def body(q: jax.Array, k: jax.Array, v: jax.Array, cotangent: jax.Array) -> Any:
        places = Places(jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length)))
        call = AttentionCall(scale=width**-0.5, query=places, key=places, order="rows")
        o, lse = attention(call, q, k, v)
        return (o, *attention_backward(call, (cotangent, o, lse), q, k, v)) if both else o

    return body


def counted_flops(shape: Shape, *, causal: bool) -> float:
    """FLOPs of both passes: 14 B T T N H, or those of the keys that a query sees."""
    length = shape[1]
    share = float(keys_per_query(length, causal=True)) / length if causal else 1.0
    return attention_flops(shape) * share


def _time(bench: Bench, shape: Shape, forward: Timing, both: Timing) -> AttentionTime:
    flops = counted_flops(shape, causal=not bench.emulated)
    batch, length, heads, kv_heads, width = shape
    rate = flops / both.median_s
    peak = bench.chip.peak_flops.get(bench.main_dtype)
    return AttentionTime(
        batch=batch, length=length, num_heads=heads, num_kv_heads=kv_heads, head_dim=width, forward=forward, both=both,
        forward_flops_per_s=flops * FORWARD_PRODUCTS / ALL_PRODUCTS / forward.median_s, both_flops_per_s=rate,
        share_of_peak=rate / peak if peak else None,
    )  # fmt: skip
