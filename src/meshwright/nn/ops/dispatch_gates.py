"""Copies the weights of chosen experts to slots, or packs them by expert; tokens are then laid out likewise."""

import jax.numpy as jnp
from jaxtyping import Array

from meshwright.algebra.ops.dispatch import moves_of_slots
from meshwright.algebra.steps import Step
from meshwright.nn.context import Context
from meshwright.nn.experts import slots
from meshwright.nn.experts.exchange import routed
from meshwright.nn.experts.products import packs_tokens
from meshwright.nn.ops import of_arrays
from meshwright.nn.ops.route import slot_capacity


def dispatch_gates(context: Context, step: Step, gates: Array, chosen: Array) -> slots.ExpertSlots:
    """Returns each choice's weight in the slots of all experts, or packed by expert as the tokens will be."""
    num_experts, capacity = context.model.num_experts, slot_capacity(context, step, gates)
    steps = next((steps for steps in context.derived.blocks if steps.block.name == step.block), None)
    moves = moves_of_slots((*steps.forward, *steps.backward)) if steps else ()
    if steps is None or not packs_tokens(context, moves, num_slots=num_experts * capacity):
        return slots.dispatch_gates(gates, chosen, jnp.zeros((num_experts, capacity), jnp.float32))
    packing = slots.packing_of(chosen, num_experts=num_experts)
    exchange_axes = next((move.axes for move in moves if move.op == "all_to_all"), ())
    round_axes = dict.fromkeys((*step.result.axes_of("C"), *(axis for move in moves for axis in move.axes)))
    packing = routed(packing, exchange_axes, together=tuple(round_axes)) if exchange_axes else packing
    return slots.dispatch_gates(gates, chosen, packing)


STEPS = {
    "dispatch_gates": dispatch_gates,
    "dispatch_gates_backward": of_arrays(lambda dslots, chosen, *gates: slots.gates_backward(dslots, chosen)),
}
