"""New positions written into a cache."""

import jax
import jax.numpy as jnp

from meshwright.algebra.steps import Step
from meshwright.nn import cache
from meshwright.nn.cache import LayerCache
from meshwright.nn.context import Context


def cache_write(
    context: Context, step: Step, before: LayerCache, values: jax.Array, where: jax.Array, *pages: jax.Array
) -> LayerCache:
    """The layer's cache after the positions of a prompt, or one more of each row; ``pages`` are a page table."""
    if step.details.paged:
        return cache.write_pages(before, values, _positions(values, where) if step.details.prompt else where, *pages)
    write = cache.write_prompt if step.details.prompt else cache.write_position
    return write(before, values, where)


def _positions(values: jax.Array, last: jax.Array) -> jax.Array:
    """The position of each of the values of a prompt; -1 behind its last: another sequence may have that page."""
    own = jnp.arange(values.shape[1], dtype=last.dtype)[None]
    return jnp.where(own <= last[:, None], own, -1)


STEPS = {"cache_write": cache_write}
