"""Attention with a bias per head and bucket of distances; all scores are in memory."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from meshwright.algebra.ops.attention import AttentionArrays
from meshwright.algebra.steps import Step
from meshwright.nn.activations import capped
from meshwright.nn.context import Context


def buckets(distances: Int[Array, "..."], *, count: int, far: int, causal: bool) -> Int[Array, "..."]:
    """Returns the bucket of each distance from query to key: one per small distance, then wider ones up to ``far``.

    Half of the buckets are for later keys where these are visible.

    Source: Raffel et al., Exploring the Limits of Transfer Learning (2019), section 2.1, as published with the weights.
    """
    side = jnp.zeros_like(distances)
    if not causal:
        count //= 2
        side = jnp.where(distances > 0, count, 0)
    away = jnp.maximum(-distances, 0) if causal else jnp.abs(distances)
    exact = count // 2
    ratio = jnp.log(jnp.maximum(away, 1) / exact) / jnp.log(far / exact)
    wide = jnp.minimum(exact + (ratio * (count - exact)).astype(jnp.int32), count - 1)
    return side + jnp.where(away < exact, away, wide)


def _mixed(context: Context, step: Step, arrays: AttentionArrays, *given: Any) -> tuple[Array, Array]:
    """Returns the result and its log-sum-exp from queries, keys, values and the table."""
    q, k, v, table = given
    details, keys, queries = step.details, arrays.key_positions, arrays.positions
    groups = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    distances = keys[:, None, :] - queries[:, :, None]
    bucket = buckets(distances, count=table.shape[0], far=details.distance, causal=not details.sees_all)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32) * context.model.attention_scale
    scores = capped(scores + jnp.moveaxis(table.astype(jnp.float32)[bucket], -1, 1), details.softcap)
    seen = jnp.ones_like(distances, bool) if details.sees_all else distances <= 0
    if details.window is not None:
        seen &= distances > -details.window
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - lse[..., None]).astype(v.dtype)
    return jnp.einsum("bnts,bsnh->btnh", weights, v), jnp.moveaxis(lse, 1, 2)


def relative_attention(context: Context, step: Step, *given: Array) -> tuple[Array, Array]:
    """Returns the result and its log-sum-exp."""
    arrays = AttentionArrays.of(step, given)
    return _mixed(context, step, arrays, arrays.q, arrays.k, arrays.v, arrays.sinks)


def relative_attention_backward(context: Context, step: Step, *given: Array) -> tuple[Any, ...]:
    """Returns the cotangents of queries, keys, values and the table, by the vjp of the forward function."""
    arrays = AttentionArrays.of(step, given)
    inputs = (arrays.q, arrays.k, arrays.v, arrays.sinks)
    _, vjp = jax.vjp(lambda *x: _mixed(context, step, arrays, *x)[0], *inputs)
    return tuple(vjp(arrays.given[0].astype(arrays.q.dtype)))


STEPS = {"relative_attention": relative_attention, "relative_attention_backward": relative_attention_backward}
