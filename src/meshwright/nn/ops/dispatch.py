"""Dispatch steps: tokens go into slots of their experts, or are packed by expert."""

from jaxtyping import Array

from meshwright.algebra.ops.dispatch import moves_of_slots
from meshwright.algebra.steps import Step
from meshwright.nn.context import Context
from meshwright.nn.experts import slots
from meshwright.nn.experts.exchange import routed
from meshwright.nn.experts.products import packs_tokens
from meshwright.nn.ops.route import slot_capacity


def dispatch(context: Context, step: Step, h: Array, chosen: Array) -> slots.ExpertSlots:
    """Returns tokens in the slots of all experts, or packed by expert."""
    num_experts, capacity = context.model.num_experts, slot_capacity(context, step, h)
    block = next((block for block in context.derived.blocks if block.block.name == step.block), None)
    moves = moves_of_slots((*block.forward, *block.backward)) if block else ()
    if block is None or not packs_tokens(context, moves, num_slots=num_experts * capacity):
        return slots.dispatch(h, chosen, num_experts=num_experts, capacity=capacity)
    packed = slots.ragged_dispatch(h, chosen, num_experts=num_experts)
    exchange = next((move.axes for move in moves if move.op == "all_to_all"), ())
    together = dict.fromkeys((*step.result.axes_of("C"), *(axis for move in moves for axis in move.axes)))
    return routed(packed, exchange, together=tuple(together)) if exchange else packed


def dispatch_backward(context: Context, step: Step, dslots: slots.ExpertSlots, chosen: Array, *tokens: Array) -> Array:
    """Sums the cotangents of each token's slots."""
    return slots.dispatch_backward(dslots, chosen)


STEPS = {"dispatch": dispatch, "dispatch_backward": dispatch_backward}
