"""Writes new positions into a cache."""

from jaxtyping import Array

from meshwright.algebra.steps import Step
from meshwright.nn import cache
from meshwright.nn.cache import LayerCache
from meshwright.nn.context import Context


def cache_write(context: Context, step: Step, before: LayerCache, values: Array, slots: Array) -> LayerCache:
    """Writes one position of each row into its slot, counted through all pages."""
    return cache.write_slots(before, values[:, 0], slots[:, 0], *step.inputs[0].axes[:2])


STEPS = {"cache_write": cache_write}
