"""Writes new positions into a cache."""

import jax.numpy as jnp
from jaxtyping import Array

from meshwright.algebra.steps import Step
from meshwright.nn import cache
from meshwright.nn.cache import LayerCache
from meshwright.nn.context import Context


def cache_write(
    context: Context, step: Step, before: LayerCache, values: Array, where: Array, *pages: Array
) -> LayerCache:
    """Writes a prompt, or one more position of each row; ``pages`` are a page table."""
    if step.details.paged:
        if step.details.prompt:
            # -1 for padding: its page may belong to another sequence.
            own = jnp.arange(values.shape[1], dtype=where.dtype)[None]
            where = jnp.where(own <= where[:, None], own, -1)
        return cache.write_pages(before, values, where, *pages)
    write = cache.write_prompt if step.details.prompt else cache.write_position
    return write(before, values, where)


STEPS = {"cache_write": cache_write}
