"""Routing: weights and slots of each token, and the counts that losses on the router need."""

import jax

from meshwright.algebra.steps import Step
from meshwright.nn.context import Context
from meshwright.nn.experts import router
from meshwright.nn.experts.balance import balance_backward, routing_counts
from meshwright.nn.experts.slots import expert_capacity


def slot_capacity(context: Context, step: Step, tokens: jax.Array) -> int:
    """Slots per expert for the tokens of a block [B, T, ...]."""
    return expert_capacity(context.model, tokens.shape[0] * tokens.shape[1], step.details.capacity)


def route(context: Context, step: Step, scores: jax.Array) -> tuple[jax.Array, ...]:
    """Weights and slots of each token; and what the device counts, where the step has a result for it."""
    capacity = slot_capacity(context, step, scores)
    gates, chosen = router.route(scores, context.model, capacity=capacity)
    if len(step.more) == 1:
        return gates, chosen
    return gates, chosen, routing_counts(scores, chosen, capacity=capacity)


def route_backward(
    context: Context, step: Step, dgates: jax.Array, scores: jax.Array, chosen: jax.Array, *routing: jax.Array
) -> jax.Array:
    """Cotangent of the scores, from the weights and from the losses on the router."""
    model, details = context.model, step.details
    dscores = router.route_backward(dgates, scores, chosen, model, capacity=slot_capacity(context, step, scores))
    weights = {"balance": details.balance / details.microbatches, "z": details.z / details.microbatches}
    if not routing or not any(weights.values()):
        return dscores
    more = balance_backward(scores, routing[0], experts_per_token=model.experts_per_token, **weights)
    return dscores + more.astype(scores.dtype)


STEPS = {"route": route, "route_backward": route_backward}
