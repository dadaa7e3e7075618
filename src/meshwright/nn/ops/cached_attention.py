"""Attention of new positions on the keys and values of a cache."""

from typing import Any

import jax

from meshwright.algebra.steps import Step
from meshwright.nn import cache
from meshwright.nn.cache import LayerCache, Meeting
from meshwright.nn.context import Context


def cache_facts(context: Context, step: Step, positions: jax.Array, held: LayerCache) -> dict[str, Any]:
    return {
        "seen": cache.visible_slots(positions[:, 0], held.stack.shape[2], window=step.details.window),
        "scale": context.model.attention_scale,
        "softcap": step.details.softcap,
    }


def cached_attention(
    context: Context, step: Step, q: jax.Array, k: LayerCache, v: LayerCache, positions: jax.Array, *others: Any
) -> jax.Array:
    """Queries of one position against the layer's keys and values; others are scales of both, then sinks."""
    found = [other.read() for other in others if isinstance(other, LayerCache)]
    sinks = next((other for other in others if not isinstance(other, LayerCache)), None)
    key_scale, value_scale = found or (None, None)
    facts = cache_facts(context, step, positions, k)
    meeting = Meeting(queries=q, keys=k.read(), scale=key_scale)
    return cache.cached_attention([meeting], v.read(), value_scale=value_scale, sinks=sinks, **facts)


STEPS = {"cached_attention": cached_attention}
