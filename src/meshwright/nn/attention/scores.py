"""Attention of one block of queries and one block of keys: the running softmax and its derivative.

Each row is a query; the queries of all heads that share a key head form one matrix. Scores, exponentials and sums are
in float32 whatever the arrays are. Source of the running form and of its derivative: Dao, FlashAttention-2 (2023).
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
KeyRows = Float[Array, "*lead S H"]
ValueRows = Float[Array, "*lead S Hv"]
Keys = tuple[KeyRows, ValueRows]
MixedRows = Float[Array, "*lead R Hv"]
ScoreBlock = Float[Array, "*lead R S"]
PerRow = Float[Array, "*lead R"]
Seen = Bool[Array, "*lead R S"] | None
HeadQueries = Float[Array, "B T N H"]
HeadKeys = Float[Array, "B S K H"]
KeyValues = Float[Array, "B S K Hv"]
HeadValues = Float[Array, "B T N Hv"]
AttentionResult = tuple[HeadValues, Float[Array, "B T N"]]
"""The weighted values of each query, and the log-sum-exp of its scores in float32."""
QkvCotangents = tuple[HeadQueries, HeadKeys, KeyValues]
"""Cotangents of queries, keys and values."""
BackwardInputs = tuple[HeadValues, HeadValues, Float[Array, "B T N"]]
"""Inputs of a backward pass besides queries, keys and values: cotangent of the result, result, log-sum-exp."""

LOWEST = -1e30
"""Initial maximum of a row; finite, because the difference of two infinities is NaN."""


class RunningSoftmax(NamedTuple):
    """Per row: the largest score so far, the sum of exponentials relative to it, and the values weighted by these."""

    peak: PerRow
    total: PerRow
    mixed: MixedRows


def scaled(q: Queries, call: AttentionCall) -> tuple[Queries, AttentionCall]:
    """Returns scaled queries and a call of scale 1 where that is exact enough, else both as given.

    Queries take R H products, scores R S. Queries in bfloat16 would lose bits unless the scale is a power of two.
    """
    if q.dtype == jnp.float32 or np.frexp(call.scale)[0] == 0.5:
        return q * jnp.asarray(call.scale, q.dtype), replace(call, scale=1.0)
    return q, call


def times(a: Queries, b: KeyRows) -> ScoreBlock:
    """Returns the products of every row of ``a`` with every row of ``b``."""
    return jnp.matmul(a, jnp.swapaxes(b, -1, -2), preferred_element_type=jnp.float32)


def weighted_sums(p: ScoreBlock, v: ValueRows) -> MixedRows:
    """Returns the sums of the rows of ``v``, weighted by ``p``."""
    return jnp.matmul(p.astype(v.dtype), v, preferred_element_type=jnp.float32)


def scores(a: Queries, b: KeyRows, call: AttentionCall) -> ScoreBlock:
    """Returns the products scaled and soft-capped."""
    raw = times(a, b)
    if call.scale != 1.0:
        raw = raw * call.scale
    return capped(raw, call.softcap)


def begin(sinks: PerRow | None, q: Queries, width: int) -> RunningSoftmax:
    """Returns the state before any key: empty, or with each row's sink, which adds weight but no value."""
    rows = q.shape[:-1]
    peak = jnp.full(rows, LOWEST, jnp.float32) if sinks is None else sinks
    total = jnp.full(rows, 0.0 if sinks is None else 1.0, jnp.float32)
    return RunningSoftmax(peak, total, jnp.zeros((*rows, width), jnp.float32))


def attend(before: RunningSoftmax, q: Queries, keys: Keys, call: AttentionCall, seen: Seen = None) -> RunningSoftmax:
    """Adds a block of (keys, values) to the running softmax; without ``seen`` every row sees every key."""
    peak, p = _exponentials(before.peak, q, keys[0], call, seen)
    fade = jnp.exp(before.peak - peak)
    return RunningSoftmax(
        peak, before.total * fade + p.sum(-1), before.mixed * fade[..., None] + weighted_sums(p, keys[1])
    )


def attend_once(sinks: PerRow | None, q: Queries, keys: Keys, call: AttentionCall, seen: Seen = None) -> RunningSoftmax:
    """Equals `attend` after `begin`, without multiplying the zeros of `begin`."""
    peak, p = _exponentials(LOWEST if sinks is None else sinks, q, keys[0], call, seen)
    total = p.sum(-1) if sinks is None else p.sum(-1) + jnp.exp(sinks - peak)
    return RunningSoftmax(peak, total, weighted_sums(p, keys[1]))


def _exponentials(
    least: PerRow | float, q: Queries, k: Array, call: AttentionCall, seen: Seen
) -> tuple[PerRow, ScoreBlock]:
    """Returns the largest score of each row, at least ``least``, and the exponentials of scores relative to it."""
    found = scores(q, k, call)
    if seen is not None:
        found = jnp.where(seen, found, -jnp.inf)
    peak = jnp.maximum(least, found.max(-1))
    return peak, jnp.exp(found - peak[..., None])


def finish(running: RunningSoftmax) -> tuple[MixedRows, PerRow]:
    """Returns result and log-sum-exp in float32; zeros and minus infinity for a row that saw no key."""
    some = running.total > 0
    total = jnp.where(some, running.total, 1.0)
    return running.mixed / total[..., None], jnp.where(some, running.peak + jnp.log(total), -jnp.inf)


def score_cotangents(
    rows: Sequence[Array], keys: Keys, call: AttentionCall, seen: Bool[Array, "*lead S R"] | None = None
) -> tuple[Float[Array, "*lead S R"], Float[Array, "*lead S R"]]:
    """Returns weights P = exp(s - lse) and score cotangents P (dP - delta) (x slope of the cap), with keys as rows.

    ``rows`` are (q, dout, lse, delta). With keys as rows three of the four products that follow have no transposed left
    factor. XLA's library for CPUs does not take one: its fallback runs at less than half the rate.
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


def transposed(k: KeyRows) -> Float[Array, "*lead H S"]:
    """Transposes keys in memory; without the barrier XLA would fold this into the product."""
    return lax.optimization_barrier(jnp.swapaxes(k, -1, -2))


def safe(lse: PerRow) -> PerRow:
    """Replaces the log-sum-exp of rows that saw no key by 0: their masked weights would be inf - inf otherwise."""
    return jnp.where(lse == -jnp.inf, 0.0, lse)


def row_products(dout: HeadValues, o: HeadValues) -> Float[Array, "B T N"]:
    """Returns delta, the sum over each row of cotangent times result, in float32."""
    return jnp.sum(dout.astype(jnp.float32) * o.astype(jnp.float32), axis=-1)


def sink_cotangents(sinks: Float[Array, " N"], given: BackwardInputs) -> Float[Array, " N"]:
    """Returns minus the sum over rows of exp(sink - lse) delta: a sink takes weight and adds no value."""
    dout, o, lse = given
    weights = jnp.exp(sinks.astype(jnp.float32)[None, None] - lse)
    return -jnp.sum(weights * row_products(dout, o), axis=(0, 1)).astype(sinks.dtype)
