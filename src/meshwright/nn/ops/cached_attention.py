"""Attention of new positions on the keys and values of a cache."""

from typing import Any

from jaxtyping import Array

from meshwright.algebra.steps import Step
from meshwright.nn import cache
from meshwright.nn.cache import LayerCache, ScorePart
from meshwright.nn.context import Context


def cache_facts(
    context: Context, step: Step, positions: Array, cached: LayerCache, pages: Array | None
) -> dict[str, Any]:
    """Returns the visible slots, the scale and the cap of attention on a cache."""
    return {
        "seen": cache.visible_slots(positions[:, 0], cached.num_slots(pages), window=step.details.window),
        "scale": context.model.attention_scale,
        "softcap": step.details.softcap,
    }


def table_of(step: Step, others: tuple[Any, ...]) -> tuple[Array | None, tuple[Any, ...]]:
    """Returns the page table, None if the cache has no pages, and the inputs after it."""
    return (others[0], others[1:]) if step.details.paged else (None, others)


def cached_attention(
    context: Context, step: Step, q: Array, k: LayerCache, v: LayerCache, positions: Array, *others: Any
) -> Array:
    """Returns attention of one position on the layer's keys and values; ``others`` are their scales, then sinks."""
    pages, others = table_of(step, others)
    found = [other.read(pages) for other in others if isinstance(other, LayerCache)]
    sinks = next((other for other in others if not isinstance(other, LayerCache)), None)
    key_scale, value_scale = found or (None, None)
    facts = cache_facts(context, step, positions, k, pages)
    part = ScorePart(queries=q, keys=k.read(pages), scale=key_scale)
    return cache.cached_attention([part], v.read(pages), value_scale=value_scale, sinks=sinks, **facts)


STEPS = {"cached_attention": cached_attention}
