"""The local kinds of routed experts: what the functions of `nn.experts.rows` take from a derived step.

Attributes of a step: ``capacity`` bounds the slots of an expert; ``balance`` and ``z`` weigh the losses on the router,
means over the ``microbatches`` of a step. Facts of the model: how many experts there are, how its routers choose.
"""

from collections.abc import Callable
from typing import Any

import jax

from meshwright.algebra.steps import Step
from meshwright.nn.context import Context
from meshwright.nn.experts import ragged, router
from meshwright.nn.experts import rows as experts
from meshwright.nn.experts.balance import balance_backward, routing_counts
from meshwright.nn.experts.ragged import Ragged
from meshwright.nn.experts.slots import packs_tokens

LocalKind = Callable[..., Any]


def _attribute(step: Step, name: str) -> float:
    return float(dict(step.attributes).get(name, 0))


def _capacity(context: Context, step: Step, tokens: jax.Array) -> int:
    """Slots per expert for the tokens of a block [B, T, ...]."""
    model = context.model
    return experts.expert_capacity(
        tokens.shape[0] * tokens.shape[1],
        num_experts=model.num_experts,
        experts_per_token=model.experts_per_token,
        capacity_factor=_attribute(step, "capacity"),
    )


def route(context: Context, step: Step, scores: jax.Array) -> tuple[jax.Array, ...]:
    """Weights and slots of each token; and what the device counts, where the step has a result for it."""
    capacity = _capacity(context, step, scores)
    gates, chosen = router.route(scores, router.router_form(context.model), capacity=capacity)
    if len(step.more) == 1:
        return gates, chosen
    return gates, chosen, routing_counts(scores, chosen, capacity=capacity)


def route_backward(
    context: Context, step: Step, dgates: jax.Array, scores: jax.Array, chosen: jax.Array, *routing: jax.Array
) -> jax.Array:
    """Cotangent of the scores, from the weights and from the losses on the router."""
    form = router.router_form(context.model)
    dscores = router.route_backward(dgates, scores, chosen, form, capacity=_capacity(context, step, scores))
    weights = {name: _attribute(step, name) / _attribute(step, "microbatches") for name in ("balance", "z") if routing}
    if not any(weights.values()):
        return dscores
    more = balance_backward(scores, routing[0], experts_per_token=form.experts_per_token, **weights)
    return dscores + more.astype(scores.dtype)


def dispatch(context: Context, step: Step, h: jax.Array, chosen: jax.Array) -> jax.Array | Ragged:
    """Tokens in the slots of all experts, or packed by expert where they stay on their device."""
    num_experts, capacity = context.model.num_experts, _capacity(context, step, h)
    if packs_tokens(context, step, num_slots=num_experts * capacity):
        return ragged.ragged_dispatch(h, chosen, num_experts=num_experts)
    return experts.dispatch(h, chosen, num_experts=num_experts, capacity=capacity)


def dispatch_backward(context: Context, step: Step, dslots: jax.Array | Ragged, chosen: jax.Array) -> jax.Array:
    """Cotangent of the tokens."""
    if isinstance(dslots, Ragged):
        return ragged.ragged_dispatch_backward(dslots, chosen)
    return experts.dispatch_backward(dslots, chosen)


def combine(context: Context, step: Step, slots: jax.Array | Ragged, gates: jax.Array, chosen: jax.Array) -> jax.Array:
    """Weighted sums per token."""
    if isinstance(slots, Ragged):
        return ragged.ragged_combine(slots, gates, chosen)
    return experts.combine(slots, gates, chosen)


def combine_backward(
    context: Context, step: Step, dout: jax.Array, slots: jax.Array | Ragged, gates: jax.Array, chosen: jax.Array
) -> tuple[jax.Array | Ragged, jax.Array]:
    """Cotangents of slots and weights."""
    if isinstance(slots, Ragged):
        return ragged.ragged_combine_backward(dout, slots, gates, chosen)
    return experts.combine_backward(dout, slots, gates, chosen)


EXPERT_KINDS: dict[str, LocalKind] = {
    "route": route,
    "route_backward": route_backward,
    "dispatch": dispatch,
    "dispatch_backward": dispatch_backward,
    "combine": combine,
    "combine_backward": combine_backward,
}
"""Kind -> its function of (context, step, blocks of the inputs)."""
