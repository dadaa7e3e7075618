"""Dispatch steps: tokens go into slots of their experts, or are packed by expert if they stay on their device."""

from jaxtyping import Array

from meshwright.algebra.steps import Step
from meshwright.nn.context import Context
from meshwright.nn.experts import slots
from meshwright.nn.experts.products import packs_tokens
from meshwright.nn.ops import of_arrays
from meshwright.nn.ops.route import slot_capacity


def dispatch(context: Context, step: Step, h: Array, chosen: Array) -> slots.ExpertSlots:
    """Returns tokens in the slots of all experts, or packed by expert."""
    num_experts, capacity = context.model.num_experts, slot_capacity(context, step, h)
    if packs_tokens(context, step, num_slots=num_experts * capacity):
        return slots.ragged_dispatch(h, chosen, num_experts=num_experts)
    return slots.dispatch(h, chosen, num_experts=num_experts, capacity=capacity)


STEPS = {"dispatch": dispatch, "dispatch_backward": of_arrays(slots.dispatch_backward)}
