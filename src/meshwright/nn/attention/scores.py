"""One block of queries against one block of keys: softmax that can go on, and its derivative.

Rows are a query each; the queries of all heads that share a key head stand in one matrix. Scores, exponentials and
sums are in float32 whatever the arrays are. Source of the running form and of its derivative: FlashAttention-2.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from meshwright.nn.activations import capped
from meshwright.nn.attention.visibility import AttentionCall

Queries = Float[Array, "*lead R H"]
Keys = tuple[Float[Array, "*lead S H"], Float[Array, "*lead S Hv"]]
PerRow = Float[Array, "*lead R"]
Seen = Bool[Array, "*lead R S"] | None
Mixed = tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]
"""The values that each query mixes, and the log-sum-exp of its scores in float32."""
Cotangents = tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K Hv"]]
"""Of queries, keys and values."""
Given = tuple[Float[Array, "B T N Hv"], Float[Array, "B T N Hv"], Float[Array, "B T N"]]
"""What a backward pass is given besides queries, keys and values: the cotangent of the result, the result, and its
log-sum-exp."""

LOWEST = -1e30
"""Stands for the largest score of a row that has seen nothing; finite, so that differences of two are not NaN."""


class Running(NamedTuple):
    """Largest score so far, sum of exponentials relative to it, and the values weighed by these, of each row."""

    peak: PerRow
    total: PerRow
    mixed: Float[Array, "*lead R Hv"]


def scaled(q: Queries, call: AttentionCall) -> tuple[Queries, AttentionCall]:
    """Queries times the scale, and a call with none left, where the product is exact enough to be made early.

    It is R H products in place of R S. Queries in bfloat16 would lose bits by a scale that is no power of two.
    """
    if q.dtype == jnp.float32 or np.frexp(call.scale)[0] == 0.5:
        return q * jnp.asarray(call.scale, q.dtype), replace(call, scale=1.0)
    return q, call


def times(a: Float[Array, "*lead R H"], b: Float[Array, "*lead S H"]) -> Float[Array, "*lead R S"]:
    """Products of every row of ``a`` with every row of ``b``."""
    return jnp.matmul(a, jnp.swapaxes(b, -1, -2), preferred_element_type=jnp.float32)


def weighed(p: Float[Array, "*lead R S"], v: Float[Array, "*lead S Hv"]) -> Float[Array, "*lead R Hv"]:
    """Sums of the rows of ``v`` by the weights ``p``."""
    return jnp.matmul(p.astype(v.dtype), v, preferred_element_type=jnp.float32)


def scores(
    a: Float[Array, "*lead R H"], b: Float[Array, "*lead S H"], call: AttentionCall
) -> Float[Array, "*lead R S"]:
    """Products as the softmax takes them: scaled, and bent to stay inside the soft cap."""
    raw = times(a, b)
    if call.scale != 1.0:
        raw = raw * call.scale
    return capped(raw, call.softcap)


def begin(sinks: PerRow | None, q: Queries, width: int) -> Running:
    """Before any key: nothing, or the extra logit of each row, which weighs in but mixes nothing."""
    rows = q.shape[:-1]
    peak = jnp.full(rows, LOWEST, jnp.float32) if sinks is None else sinks
    total = jnp.full(rows, 0.0 if sinks is None else 1.0, jnp.float32)
    return Running(peak, total, jnp.zeros((*rows, width), jnp.float32))


def attend(before: Running, q: Queries, keys: Keys, call: AttentionCall, seen: Seen = None) -> Running:
    """The running softmax with one more block of (keys, values); without ``seen`` every row sees all of them."""
    peak, p = _exponentials(before.peak, q, keys[0], call, seen)
    fade = jnp.exp(before.peak - peak)
    return Running(peak, before.total * fade + p.sum(-1), before.mixed * fade[..., None] + weighed(p, keys[1]))


def attend_once(sinks: PerRow | None, q: Queries, keys: Keys, call: AttentionCall, seen: Seen = None) -> Running:
    """`attend` after `begin`, without the work on what is zero yet."""
    peak, p = _exponentials(LOWEST if sinks is None else sinks, q, keys[0], call, seen)
    total = p.sum(-1) if sinks is None else p.sum(-1) + jnp.exp(sinks - peak)
    return Running(peak, total, weighed(p, keys[1]))


def _exponentials(
    least: PerRow | float, q: Queries, k: Array, call: AttentionCall, seen: Seen
) -> tuple[PerRow, Float[Array, "*lead R S"]]:
    """The largest score of each row, at least ``least``, and the exponentials of scores relative to it."""
    found = scores(q, k, call)
    if seen is not None:
        found = jnp.where(seen, found, -jnp.inf)
    peak = jnp.maximum(least, found.max(-1))
    return peak, jnp.exp(found - peak[..., None])


def finish(running: Running) -> tuple[Float[Array, "*lead R Hv"], PerRow]:
    """Result and log-sum-exp in float32; zeros and minus infinity for a row that saw nothing."""
    some = running.total > 0
    total = jnp.where(some, running.total, 1.0)
    return running.mixed / total[..., None], jnp.where(some, running.peak + jnp.log(total), -jnp.inf)


def score_cotangents(
    rows: Sequence[Array], keys: Keys, call: AttentionCall, seen: Bool[Array, "*lead S R"] | None = None
) -> tuple[Float[Array, "*lead S R"], Float[Array, "*lead S R"]]:
    """Weights P = exp(s - lse) and cotangents of products P (dP - delta), both with keys as rows.

    ``rows`` are (q, dout, lse, delta). Keys as rows because three of the four products that follow then have no
    transposed left factor, which XLA's library for CPUs does not take: its fallback runs at less than half the rate.
    """
    (q, dout, lse, delta), (k, v) = rows, keys
    found = scores(k, q, call)
    p = jnp.exp(found - lse[..., None, :])
    if seen is not None:
        p = jnp.where(seen, p, 0.0)
    ds = p * (times(v, dout) - delta[..., None, :])
    if call.softcap is not None:
        ds = ds * (1.0 - jnp.square(found / call.softcap))
    return p, ds


def turned(k: Float[Array, "*lead S H"]) -> Float[Array, "*lead H S"]:
    """Keys as columns, made in memory: without the barrier the product would take them transposed (see above)."""
    return lax.optimization_barrier(jnp.swapaxes(k, -1, -2))


def safe(lse: PerRow) -> PerRow:
    """Log-sum-exp with zero for rows that saw nothing: their weights are masked, and must not be inf - inf before."""
    return jnp.where(lse == -jnp.inf, 0.0, lse)


def row_products(dout: Float[Array, "B T N Hv"], o: Float[Array, "B T N Hv"]) -> Float[Array, "B T N"]:
    """The delta of the derivative: the sum over a row of cotangent times result, in float32."""
    return jnp.sum(dout.astype(jnp.float32) * o.astype(jnp.float32), axis=-1)


def sink_cotangents(sinks: Float[Array, " N"], given: Given) -> Float[Array, " N"]:
    """Minus the sum over rows of exp(sink - lse) delta: the sink's weight, whose product with values is zero."""
    dout, o, lse = given
    weights = jnp.exp(sinks.astype(jnp.float32)[None, None] - lse)
    return -jnp.sum(weights * row_products(dout, o), axis=(0, 1)).astype(sinks.dtype)
