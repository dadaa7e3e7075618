"""Tokens go into slots of their experts, or are packed by expert, as their weights are."""

from jaxtyping import Array

from meshwright.algebra.steps import Step
from meshwright.nn.context import Context
from meshwright.nn.experts import slots


def dispatch(context: Context, step: Step, h: Array, chosen: Array, like: slots.ExpertSlots) -> slots.ExpertSlots:
    """Returns tokens in slots, or packed by expert, as their weights are."""
    return slots.dispatch(h, chosen, like)


def dispatch_backward(context: Context, step: Step, dslots: slots.ExpertSlots, chosen: Array, *tokens: Array) -> Array:
    """Sums the cotangents of each token's slots."""
    return slots.combine(dslots, chosen)


STEPS = {"dispatch": dispatch, "dispatch_backward": dispatch_backward}
