"""Writes new positions into a cache."""

from jaxtyping import Array

from meshwright.algebra.steps import Step
from meshwright.nn import cache
from meshwright.nn.cache import LayerCache
from meshwright.nn.context import Context


def cache_write(context: Context, step: Step, before: LayerCache, values: Array, slots: Array) -> LayerCache:
    """Writes the values of each row into its slots, whose numbers count through all pages."""
    flat_values = values.reshape(-1, *values.shape[2:])
    return cache.write_slots(before, flat_values, slots.reshape(-1), *step.inputs[0].axes[:2])


STEPS = {"cache_write": cache_write}
