"""Routing: weights and slots of each token, and the counts that losses on the router need."""

import jax

from meshwright.algebra.steps import Step
from meshwright.nn.context import Context
from meshwright.nn.experts import router
from meshwright.nn.experts import rows as experts
from meshwright.nn.experts.balance import balance_backward, routing_counts


def slot_capacity(context: Context, step: Step, tokens: jax.Array) -> int:
    """Slots per expert for the tokens of a block [B, T, ...]."""
    model = context.model
    return experts.expert_capacity(
        tokens.shape[0] * tokens.shape[1],
        num_experts=model.num_experts,
        experts_per_token=model.experts_per_token,
        capacity_factor=step.details.capacity,
    )


def route(context: Context, step: Step, scores: jax.Array) -> tuple[jax.Array, ...]:
    """Weights and slots of each token; and what the device counts, where the step has a result for it."""
    capacity = slot_capacity(context, step, scores)
    gates, chosen = router.route(scores, router.router_form(context.model), capacity=capacity)
    if len(step.more) == 1:
        return gates, chosen
    return gates, chosen, routing_counts(scores, chosen, capacity=capacity)


def route_backward(
    context: Context, step: Step, dgates: jax.Array, scores: jax.Array, chosen: jax.Array, *routing: jax.Array
) -> jax.Array:
    """Cotangent of the scores, from the weights and from the losses on the router."""
    form = router.router_form(context.model)
    dscores = router.route_backward(dgates, scores, chosen, form, capacity=slot_capacity(context, step, scores))
    details = step.details
    weights = {"balance": details.balance, "z": details.z} if routing else {}
    weights = {name: weight / details.microbatches for name, weight in weights.items()}
    if not any(weights.values()):
        return dscores
    more = balance_backward(scores, routing[0], experts_per_token=form.experts_per_token, **weights)
    return dscores + more.astype(scores.dtype)


STEPS = {"route": route, "route_backward": route_backward}
