"""Kinds of steps that only generation has: what each takes from its step."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.algebra.steps import Step
from meshwright.nn import cache
from meshwright.nn.cache import LayerCache, Meeting
from meshwright.nn.collectives import first_index
from meshwright.nn.context import Context
from meshwright.nn.ops import elementwise as ops
from meshwright.nn.quantisation import absmax_scale, quantise

LocalKind = Callable[..., Any]

DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "int8": jnp.int8}


def pick(context: Context, step: Step, x: jax.Array, number: jax.Array) -> jax.Array:
    """The entry of each row that is asked for; zeros where another device has it."""
    local = number - first_index(step.inputs[0].axes_of("T"), x.shape[1])
    inside = (local >= 0) & (local < x.shape[1])
    found = jnp.take_along_axis(x, jnp.where(inside, local, 0)[:, None, None], axis=1)[:, 0]
    return jnp.where(inside[:, None], found, jnp.zeros((), x.dtype))


def softcap(context: Context, step: Step, logits: jax.Array) -> jax.Array:
    """Logits drawn into the model's cap."""
    cap = context.model.logit_softcap
    assert cap is not None
    return cap * jnp.tanh(logits / cap)


def cache_write(context: Context, step: Step, before: LayerCache, values: jax.Array, where: jax.Array) -> LayerCache:
    """The layer's cache after the positions of a prompt, or one more of each row."""
    write = cache.write_prompt if "prompt" in dict(step.attributes) else cache.write_position
    return write(before, values, where)


def kv_scale(context: Context, step: Step, values: jax.Array) -> jax.Array:
    """A scale for each token and head."""
    return absmax_scale(values, (values.ndim - 1,))


def kv_quantise(context: Context, step: Step, values: jax.Array, scale: jax.Array) -> jax.Array:
    """The int8 values beside it."""
    return quantise(values, scale, (values.ndim - 1,))


def _facts(context: Context, step: Step, positions: jax.Array, held: LayerCache) -> dict[str, Any]:
    attributes = dict(step.attributes)
    window = int(attributes["window"]) if "window" in attributes else None
    return {
        "seen": cache.visible_slots(positions[:, 0], held.stack.shape[2], window=window),
        "scale": context.model.attention_scale,
        "softcap": float(attributes["softcap"]) if "softcap" in attributes else None,
    }


def cached_attention(
    context: Context, step: Step, q: jax.Array, k: LayerCache, v: LayerCache, positions: jax.Array, *others: Any
) -> jax.Array:
    """Queries of one position against the layer's keys and values; others are scales of both, then sinks."""
    found = [other.read() for other in others if isinstance(other, LayerCache)]
    sinks = next((other for other in others if not isinstance(other, LayerCache)), None)
    key_scale, value_scale = found or (None, None)
    facts = _facts(context, step, positions, k)
    meeting = Meeting(queries=q, keys=k.read(), scale=key_scale)
    return cache.cached_attention([meeting], v.read(), value_scale=value_scale, sinks=sinks, **facts)


def cached_latent_attention(
    context: Context,
    step: Step,
    ql: jax.Array,
    q: jax.Array,
    latent: LayerCache,
    shared: LayerCache,
    positions: jax.Array,
    *others: LayerCache,
) -> jax.Array:
    """Queries as the latent meets them, and their rotated parts, against one head of latents and rotated key parts."""
    facts = _facts(context, step, positions, latent)
    one_head = latent.read()[:, :, None]
    latent_scale, shared_scale = (other.read()[:, :, None] for other in others) if others else (None, None)
    meetings = [
        Meeting(queries=ql, keys=one_head, scale=latent_scale),
        Meeting(queries=q[..., context.model.qk_nope_head_dim :], keys=shared.read()[:, :, None], scale=shared_scale),
    ]
    return cache.cached_attention(meetings, one_head, value_scale=latent_scale, **facts)


def own_part(context: Context, step: Step, q: jax.Array) -> jax.Array:
    """The part of a query that is not rotated."""
    return q[..., : context.model.qk_nope_head_dim]


def quantised_embed(context: Context, step: Step, tokens: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
    """Rows of an int8 table, each times its scale, in the dtype of the stream."""
    array = step.inputs[1]
    first_row = first_index(array.axes_of(array.dims[0]), values.shape[0])
    dtype = jnp.dtype(DTYPES[context.dtype])
    # the rows of this device's part, then their scales: both are zeros for tokens outside of it
    found = ops.embed(tokens, values.astype(dtype), first_row=first_row).astype(jnp.float32)
    factors = ops.embed(tokens, scale[:, None], first_row=first_row, scale=ops.embed_scale(context.model, dtype))
    return (found * factors).astype(dtype)


CACHE_KINDS: dict[str, LocalKind] = {
    "pick": pick,
    "softcap": softcap,
    "cache_write": cache_write,
    "kv_scale": kv_scale,
    "kv_quantise": kv_quantise,
    "cached_attention": cached_attention,
    "cached_latent_attention": cached_latent_attention,
    "own_part": own_part,
    "quantised_embed": quantised_embed,
}
"""Kind -> its function of (context, step, blocks of the inputs)."""
