"""Writes new positions into a cache."""

import jax.numpy as jnp
from jaxtyping import Array

from meshwright.algebra.ops.cached_attention import split_slots
from meshwright.algebra.steps import Step
from meshwright.nn import cache
from meshwright.nn.cache import LayerCache, OwnSlots
from meshwright.nn.context import Context


def cache_write(
    context: Context, step: Step, before: LayerCache, values: Array, where: Array, *pages: Array
) -> LayerCache:
    """Writes prompts up to ``where`` [B], or one position of each row, ``where`` [B, 1], by the page table if given;
    without one, ``where`` are slots of all pages together."""
    if step.details.paged and not pages:
        return cache.write_slots(before, values[:, 0], where[:, 0], step.inputs[0].axes_of("Pg"))
    if step.details.paged and step.details.prompt:
        # `write_pages` drops -1: padding must not reach a page of another sequence.
        own = jnp.arange(values.shape[1], dtype=where.dtype)[None]
        return cache.write_pages(before, values, jnp.where(own <= where[:, None], own, -1), *pages)
    if step.details.paged:
        return cache.write_pages(before, values, where, *pages)
    write = cache.write_prompt if step.details.prompt else cache.write_position
    return write(before, values, where, OwnSlots.of(before, split_slots(step)))


STEPS = {"cache_write": cache_write}
