"""Dispatch: tokens into slots of their experts, or packed by expert where they stay on their device."""

import jax

from meshwright.algebra.steps import Step
from meshwright.nn.context import Context
from meshwright.nn.experts import ragged
from meshwright.nn.experts import rows as experts
from meshwright.nn.experts.ragged import Ragged
from meshwright.nn.experts.slots import packs_tokens
from meshwright.nn.ops.route import slot_capacity


def dispatch(context: Context, step: Step, h: jax.Array, chosen: jax.Array) -> jax.Array | Ragged:
    """Tokens in the slots of all experts, or packed by expert where they stay on their device."""
    num_experts, capacity = context.model.num_experts, slot_capacity(context, step, h)
    if packs_tokens(context, step, num_slots=num_experts * capacity):
        return ragged.ragged_dispatch(h, chosen, num_experts=num_experts)
    return experts.dispatch(h, chosen, num_experts=num_experts, capacity=capacity)


def dispatch_backward(context: Context, step: Step, dslots: jax.Array | Ragged, chosen: jax.Array) -> jax.Array:
    """Cotangent of the tokens."""
    if isinstance(dslots, Ragged):
        return ragged.ragged_dispatch_backward(dslots, chosen)
    return experts.dispatch_backward(dslots, chosen)


STEPS = {"dispatch": dispatch, "dispatch_backward": dispatch_backward}
