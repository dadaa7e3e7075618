"""Attention of one block of queries and one block of keys: the running softmax and its derivative.

Each row is a query; the queries of all heads that share a key head form one matrix. Scores, exponentials and sums are
in float32 whatever the arrays are. Source of the running form and of its derivative: Dao, FlashAttention-2 (2023).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from meshwright.nn.attention.tiles import Tile, TileRule

Queries = Float[Array, "*lead R H"]
KeyRows = Float[Array, "*lead S H"]
ValueRows = Float[Array, "*lead S Hv"]
Keys = tuple[KeyRows, ValueRows]
MixedRows = Float[Array, "*lead R Hv"]
ScoreBlock = Float[Array, "*lead R S"]
PerRow = Float[Array, "*lead R"]
HeadQueries = Float[Array, "B T N H"]
HeadKeys = Float[Array, "B S K H"]
KeyValues = Float[Array, "B S K Hv"]
HeadValues = Float[Array, "B T N Hv"]
AttentionResult = tuple[HeadValues, Float[Array, "B T N"]]
"""The weighted values of each query, and the log-sum-exp of its scores in float32."""
QkvCotangents = tuple[HeadQueries, HeadKeys, KeyValues]
"""Cotangents of queries, keys and values."""
BackwardInputs = tuple[Array, ...]
"""Inputs of a backward pass in addition to q, k, v: cotangent of the result [B, T, N, Hv], the result, its log-sum-exp
[B, T, N], and the cotangent of the log-sum-exp if there is one."""

Learned = dict[str, tuple[Array | None, ...]]
"""Floating-point arrays that a score rule reads, or their cotangents, by field of the rule; None for other arrays."""

LOWEST = -1e30
"""Initial maximum of a row; finite, because the difference of two infinities is NaN."""


class RunningSoftmax(NamedTuple):
    """Per row: the largest score so far, the sum of exponentials relative to it, the values' sum weighted by these."""

    peak: PerRow
    total: PerRow
    mixed: MixedRows


def scaled(q: Queries, scale: float) -> tuple[Queries, float]:
    """Returns scaled queries and a scale of 1 if that is exact enough, else both unchanged.

    Scaling queries takes R H products, scaling scores R S. Queries in bfloat16 would lose bits unless the scale is a
    power of two."""
    if q.dtype == jnp.float32 or np.frexp(scale)[0] == 0.5:
        return q * jnp.asarray(scale, q.dtype), 1.0
    return q, scale


def times(a: Queries, b: KeyRows) -> ScoreBlock:
    """Returns a b^T in float32: the product of every row of ``a`` with every row of ``b``."""
    return jnp.matmul(a, jnp.swapaxes(b, -1, -2), preferred_element_type=jnp.float32)


def weighted_sums(p: ScoreBlock, v: ValueRows) -> MixedRows:
    """Returns the sums of the rows of ``v``, weighted by ``p``."""
    # rounded to the operands' dtype before the product, as in FlashAttention-2
    return jnp.matmul(p.astype(v.dtype), v, preferred_element_type=jnp.float32)


def begin(q: Queries, width: int) -> RunningSoftmax:
    """Returns the running softmax of queries ``q`` before any key, for values of ``width``."""
    rows = q.shape[:-1]
    return RunningSoftmax(
        jnp.full(rows, LOWEST, jnp.float32), jnp.zeros(rows, jnp.float32), jnp.zeros((*rows, width), jnp.float32)
    )


def attend(
    before: RunningSoftmax | None,
    q: Queries,
    keys: Keys,
    scale: float,
    rule: TileRule,
    tile: Tile,
    *,
    is_masked: bool,
) -> RunningSoftmax:
    """Adds a block of (keys, values) to the running softmax ``before``, or begins one if that is None; without
    ``is_masked`` every row sees every key."""
    scores = times(q, keys[0])
    if scale != 1.0:
        scores = scores * scale
    if rule.score is not None:
        scores = rule.score(scores, tile)
    if is_masked and rule.mask is not None:
        scores = jnp.where(rule.mask(tile), scores, -jnp.inf)
    # finite also where nothing is seen yet: exp(-inf - LOWEST) is 0, where exp(-inf + inf) is NaN
    peak = jnp.maximum(LOWEST if before is None else before.peak, scores.max(-1))
    p = jnp.exp(scores - peak[..., None])
    if before is None:
        return RunningSoftmax(peak, p.sum(-1), weighted_sums(p, keys[1]))
    fade = jnp.exp(before.peak - peak)
    return RunningSoftmax(
        peak, before.total * fade + p.sum(-1), before.mixed * fade[..., None] + weighted_sums(p, keys[1])
    )


def finish(running: RunningSoftmax) -> tuple[MixedRows, PerRow]:
    """Returns result and log-sum-exp in float32; zeros and minus infinity for a row that saw no key."""
    has_key = running.total > 0
    exp_sum = jnp.where(has_key, running.total, 1.0)
    return running.mixed / exp_sum[..., None], jnp.where(has_key, running.peak + jnp.log(exp_sum), -jnp.inf)


def reads(held: TileRule | Tile) -> Learned:
    """Returns a rule's or tile's floating-point arrays, None for other arrays; {} unless ``learns``."""
    if not held.learns:
        return {}
    names = "heads", "rows", "columns", "tables"
    return {n: tuple(x if jnp.issubdtype(x.dtype, jnp.floating) else None for x in getattr(held, n)) for n in names}


def score_cotangents(
    rows: Sequence[Array], keys: Keys, scale: float, rule: TileRule, tile: Tile, *, is_masked: bool
) -> tuple[Float[Array, "*lead S R"], Float[Array, "*lead S R"], Learned]:
    """Returns weights P = exp(s - lse), cotangents of scores P (dP - delta) times the slope of the score rule, and the
    cotangents of the rule's arrays; keys are the rows of all of them, and of ``tile``.

    ``rows`` are (q, dout, lse, delta). With keys as rows three of the four products that follow have no transposed left
    factor, for which XLA's CPU library falls back to less than half the rate.
    """
    (q, dout, lse, delta), (k, v) = rows, keys
    scores = times(k, q)
    if scale != 1.0:
        scores = scores * scale
    pull = None
    if rule.score is not None:
        scores, pull = jax.vjp(partial(_with_reads, rule.score, tile), scores, reads(tile._replace(learns=rule.learns)))
    p = jnp.exp(scores - lse[..., None, :])
    if is_masked and rule.mask is not None:
        p = jnp.where(rule.mask(tile), p, 0.0)
    ds = p * (times(v, dout) - delta[..., None, :])
    return (p, ds, {}) if pull is None else (p, *pull(ds))


def _with_reads(score: Callable[..., Array], tile: Tile, raw_scores: Array, learned: Learned) -> Array:
    """Applies the score rule as a function of the captured arrays that get gradients."""
    arrays_by_field: dict[str, Any] = {
        name: tuple(x if y is None else y for x, y in zip(getattr(tile, name), values, strict=True))
        for name, values in learned.items()
    }
    return score(raw_scores, tile._replace(**arrays_by_field))


def transposed(k: KeyRows) -> Float[Array, "*lead H S"]:
    """Transposes keys in memory; without the barrier XLA would fold this into the product."""
    return lax.optimization_barrier(jnp.swapaxes(k, -1, -2))


def safe(lse: PerRow) -> PerRow:
    """Replaces the log-sum-exp of rows that saw no key by 0: their masked weights would be inf - inf otherwise."""
    return jnp.where(lse == -jnp.inf, 0.0, lse)


def deltas(given: BackwardInputs) -> Float[Array, "B T N"]:
    """Returns the sum over each row of cotangent times result, less the cotangent of the log-sum-exp, in float32."""
    dout, o, _, *dlse = given
    delta = jnp.sum(dout.astype(jnp.float32) * o.astype(jnp.float32), axis=-1)
    return delta - dlse[0] if dlse else delta


def with_sinks(sinks: Float[Array, " N"], o: HeadValues, lse: Array) -> AttentionResult:
    """Returns attention with an extra logit per head: a sink takes weight and adds no value."""
    total_lse = jnp.logaddexp(lse, sinks.astype(jnp.float32)[None, None])
    return (o.astype(jnp.float32) * jnp.exp(lse - total_lse)[..., None]).astype(o.dtype), total_lse


def sink_cotangents(sinks: Float[Array, " N"], given: BackwardInputs) -> Float[Array, " N"]:
    """Returns minus the sum over rows of exp(sink - lse) delta: a sink takes weight and adds no value."""
    lse = given[2]
    weights = jnp.exp(sinks.astype(jnp.float32)[None, None] - lse)
    return -jnp.sum(weights * deltas(given), axis=(0, 1)).astype(sinks.dtype)
