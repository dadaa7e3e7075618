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
        return cache.write_pages(before, values, _positions(values, where) if step.details.prompt else where, *pages)
    write = cache.write_prompt if step.details.prompt else cache.write_position
    return write(before, values, where)


def _positions(values: Array, last: Array) -> Array:
    """Returns the positions of a prompt, -1 for padding: its page may belong to another sequence."""
    own = jnp.arange(values.shape[1], dtype=last.dtype)[None]
    return jnp.where(own <= last[:, None], own, -1)


STEPS = {"cache_write": cache_write}
