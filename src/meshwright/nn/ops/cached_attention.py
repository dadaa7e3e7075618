"""Attention of new positions on the keys and values of a cache."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from meshwright.algebra.ops.cached_attention import split_slots
from meshwright.algebra.steps import Step
from meshwright.nn import cache
from meshwright.nn.cache import LayerCache, OwnAttention, OwnSlots, ScorePart
from meshwright.nn.context import Context
from meshwright.nn.ops import of_arrays


def cache_facts(
    context: Context, step: Step, positions: Array, cached: LayerCache, pages: Array | None
) -> dict[str, Any]:
    """Returns the visible slots, the scale and the cap of attention on a cache."""
    return {
        "seen": cache.visible_slots(
            positions[:, 0],
            cached.num_slots(pages),
            window=step.details.window,
            slots=OwnSlots.of(cached, split_slots(step)) if pages is None else None,
        ),
        "scale": context.model.attention_scale,
        "softcap": step.details.softcap,
    }


def table_of(step: Step, others: tuple[Any, ...]) -> tuple[Array | None, tuple[Any, ...]]:
    """Returns the page table, None if the cache has no pages, and the inputs after it."""
    return (others[0], others[1:]) if step.details.paged else (None, others)


def results_of(step: Step, found: OwnAttention) -> Array | OwnAttention:
    """Returns attention alone, unless the cache of a sequence is split over devices that share their statistics."""
    return found if step.more else found.result


def scale_by_share(own: Array, share: Array, whole: Array) -> Array:
    """Scales a device's attention by its share of each query's sum of exponentials."""
    return (own * (share / whole)[..., None]).astype(own.dtype)


def cached_attention(
    context: Context, step: Step, q: Array, k: LayerCache, v: LayerCache, positions: Array, *others: Any
) -> Array | OwnAttention:
    """Returns attention of one position on the layer's keys and values; ``others`` are their scales, then sinks."""
    pages, others = table_of(step, others)
    found = [other.read(pages) for other in others if isinstance(other, LayerCache)]
    sinks = next((other for other in others if not isinstance(other, LayerCache)), None)
    key_scale, value_scale = found or (None, None)
    facts = cache_facts(context, step, positions, k, pages)
    if sinks is not None and step.more:
        # sinks count once
        sinks = jnp.where(lax.axis_index(split_slots(step)) == 0, sinks, -jnp.inf)
    part = ScorePart(queries=q, keys=k.read(pages), scale=key_scale)
    attended = cache.cached_attention([part], v.read(pages), value_scale=value_scale, sinks=sinks, **facts)
    return results_of(step, attended)


STEPS = {"cached_attention": cached_attention, "scale_by_share": of_arrays(scale_by_share)}
