"""New positions written into a cache."""

import jax

from meshwright.algebra.steps import Step
from meshwright.nn import cache
from meshwright.nn.cache import LayerCache
from meshwright.nn.context import Context


def cache_write(context: Context, step: Step, before: LayerCache, values: jax.Array, where: jax.Array) -> LayerCache:
    """The layer's cache after the positions of a prompt, or one more of each row."""
    write = cache.write_prompt if step.details.prompt else cache.write_position
    return write(before, values, where)


STEPS = {"cache_write": cache_write}
