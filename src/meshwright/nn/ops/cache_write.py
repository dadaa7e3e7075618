"""Writes new positions into a cache."""

from jaxtyping import Array

from meshwright.algebra.ops.cached_attention import split_slots
from meshwright.algebra.steps import Step
from meshwright.nn import cache
from meshwright.nn.cache import LayerCache, OwnSlots
from meshwright.nn.context import Context


def cache_write(context: Context, step: Step, before: LayerCache, values: Array, where: Array) -> LayerCache:
    """Writes prompts up to ``where`` [B], or one position of each row, ``where`` [B, 1]: of packed rows these are slots
    of all pages together."""
    if step.details.packed:
        return cache.write_slots(before, values[:, 0], where[:, 0], *step.inputs[0].axes[:2])
    write = cache.write_prompt if step.details.prompt else cache.write_position
    return write(before, values, where, OwnSlots.of(before, split_slots(step)))


STEPS = {"cache_write": cache_write}
