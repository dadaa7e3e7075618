"""One block of queries against one block of keys: softmax that can go on, and its derivative.

Rows are a query each; the queries of all heads that share a key head stand in one matrix. Scores, exponentials and
sums are in float32 whatever the arrays are. Source of the running form and of its derivative: FlashAttention-2.
"""

from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from meshwright.nn.attention.visibility import Rule

LOWEST = -1e30
"""Stands for the largest score of a row that has seen nothing; finite, so that differences of two are not NaN."""


class Running(NamedTuple):
    """Largest score so far, sum of exponentials relative to it, and the values weighed by these, of each row."""

    peak: Float[Array, "*lead R"]
    total: Float[Array, "*lead R"]
    mixed: Float[Array, "*lead R Hv"]


def scaled(q: Float[Array, "*lead R H"], rule: Rule) -> tuple[Float[Array, "*lead R H"], Rule]:
    """Queries times the scale, and a rule with none left, where the product is exact enough to be made early.

    It is R H products in place of R S. Queries in bfloat16 would lose bits by a scale that is no power of two.
    """
    if q.dtype == jnp.float32 or np.frexp(rule.scale)[0] == 0.5:
        return q * jnp.asarray(rule.scale, q.dtype), replace(rule, scale=1.0)
    return q, rule


def times(a: Float[Array, "*lead R H"], b: Float[Array, "*lead S H"]) -> Float[Array, "*lead R S"]:
    """Products of every row of ``a`` with every row of ``b``."""
    return jnp.matmul(a, jnp.swapaxes(b, -1, -2), preferred_element_type=jnp.float32)


def weighed(p: Float[Array, "*lead R S"], v: Float[Array, "*lead S Hv"]) -> Float[Array, "*lead R Hv"]:
    """Sums of the rows of ``v`` by the weights ``p``."""
    return jnp.matmul(p.astype(v.dtype), v, preferred_element_type=jnp.float32)


def scores(a: Float[Array, "*lead R H"], b: Float[Array, "*lead S H"], rule: Rule) -> Float[Array, "*lead R S"]:
    """Products as the softmax takes them: scaled, and bent to stay inside the soft cap."""
    raw = times(a, b)
    if rule.scale != 1.0:
        raw = raw * rule.scale
    return raw if rule.softcap is None else rule.softcap * jnp.tanh(raw / rule.softcap)


def begin(sinks: Float[Array, "*lead R"] | None, q: Float[Array, "*lead R H"], width: int) -> Running:
    """Before any key: nothing, or the extra logit of each row, which weighs in but mixes nothing."""
    rows = q.shape[:-1]
    peak = jnp.full(rows, LOWEST, jnp.float32) if sinks is None else sinks
    total = jnp.full(rows, 0.0 if sinks is None else 1.0, jnp.float32)
    return Running(peak, total, jnp.zeros((*rows, width), jnp.float32))


def attend(
    before: Running,
    q: Float[Array, "*lead R H"],
    k: Float[Array, "*lead S H"],
    v: Float[Array, "*lead S Hv"],
    rule: Rule,
    seen: Bool[Array, "*lead R S"] | None = None,
) -> Running:
    """The running softmax with one more block of keys; without ``seen`` every row sees all of them."""
    found = scores(q, k, rule)
    if seen is not None:
        found = jnp.where(seen, found, -jnp.inf)
    peak = jnp.maximum(before.peak, found.max(-1))
    p = jnp.exp(found - peak[..., None])
    fade = jnp.exp(before.peak - peak)
    return Running(peak, before.total * fade + p.sum(-1), before.mixed * fade[..., None] + weighed(p, v))


def attend_once(
    sinks: Float[Array, "*lead R"] | None,
    q: Float[Array, "*lead R H"],
    k: Float[Array, "*lead S H"],
    v: Float[Array, "*lead S Hv"],
    rule: Rule,
    seen: Bool[Array, "*lead R S"] | None = None,
) -> Running:
    """`attend` after `begin`, without the work on what is zero yet."""
    found = scores(q, k, rule)
    if seen is not None:
        found = jnp.where(seen, found, -jnp.inf)
    peak = jnp.maximum(found.max(-1), LOWEST if sinks is None else sinks)
    p = jnp.exp(found - peak[..., None])
    total = p.sum(-1) if sinks is None else p.sum(-1) + jnp.exp(sinks - peak)
    return Running(peak, total, weighed(p, v))


def finish(running: Running) -> tuple[Float[Array, "*lead R Hv"], Float[Array, "*lead R"]]:
    """Result and log-sum-exp in float32; zeros and minus infinity for a row that saw nothing."""
    some = running.total > 0
    total = jnp.where(some, running.total, 1.0)
    return running.mixed / total[..., None], jnp.where(some, running.peak + jnp.log(total), -jnp.inf)


def score_cotangents(
    q: Float[Array, "*lead R H"],
    k: Float[Array, "*lead S H"],
    v: Float[Array, "*lead S Hv"],
    dout: Float[Array, "*lead R Hv"],
    lse: Float[Array, "*lead R"],
    delta: Float[Array, "*lead R"],
    rule: Rule,
    seen: Bool[Array, "*lead S R"] | None = None,
) -> tuple[Float[Array, "*lead S R"], Float[Array, "*lead S R"]]:
    """Weights P = exp(s - lse) and cotangents of products P (dP - delta), both with keys as rows.

    Keys as rows because three of the four products that follow then have no transposed left factor, which XLA's
    library for CPUs does not take: its fallback runs at less than half the rate.
    """
    found = scores(k, q, rule)
    p = jnp.exp(found - lse[..., None, :])
    if seen is not None:
        p = jnp.where(seen, p, 0.0)
    ds = p * (times(v, dout) - delta[..., None, :])
    if rule.softcap is not None:
        ds = ds * (1.0 - jnp.square(found / rule.softcap))
    return p, ds


def turned(k: Float[Array, "*lead S H"]) -> Float[Array, "*lead H S"]:
    """Keys as columns, made in memory: without the barrier the product would take them transposed (see above)."""
    return lax.optimization_barrier(jnp.swapaxes(k, -1, -2))


def safe(lse: Float[Array, "*lead R"]) -> Float[Array, "*lead R"]:
    """Log-sum-exp with zero for rows that saw nothing: their weights are masked, and must not be inf - inf before."""
    return jnp.where(lse == -jnp.inf, 0.0, lse)


def row_products(dout: Float[Array, "B T N Hv"], o: Float[Array, "B T N Hv"]) -> Float[Array, "B T N"]:
    """The delta of the derivative: the sum over a row of cotangent times result, in float32."""
    return jnp.sum(dout.astype(jnp.float32) * o.astype(jnp.float32), axis=-1)


def sink_cotangents(
    sinks: Float[Array, " N"], lse: Float[Array, "B T N"], delta: Float[Array, "B T N"]
) -> Float[Array, " N"]:
    """Minus the sum over rows of exp(sink - lse) delta: the sink's weight, whose product with values is zero."""
    weights = jnp.exp(sinks.astype(jnp.float32)[None, None] - lse)
    return -jnp.sum(weights * delta, axis=(0, 1)).astype(sinks.dtype)
