"""The router: experts of each token and their weights, forward and backward, in float32; and its counts for losses."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meshwright.algebra.steps import Step
from meshwright.nn.context import Context
from meshwright.nn.experts.balance import balance_backward, routing_counts
from meshwright.nn.experts.slots import Chosen, Gates, RouterScores, assign_slots, expert_capacity, expert_numbers
from meshwright.spec.model import Model


def route(
    scores: RouterScores, model: Model, correction: Float[Array, " E"] | None = None, *, capacity: int
) -> tuple[Gates, Chosen]:
    """Returns the weights of each token's experts in float32, and the token's slots (see `nn.experts.slots`).

    The shares of experts are the softmax over a token's scores, or the sigmoid of each score. The experts with the
    highest shares are chosen, within the token's best groups if the model has groups; their weights are their shares. A
    ``correction`` is added to shares for the choice only. Of equal shares the expert with the lower number wins. If
    tokens choose an expert more than ``capacity`` times, the last choices get no slot; the weights of a token's other
    experts do not change. Sources: Mixtral and Qwen3-MoE (softmax, sum to one), gpt-oss (likewise: a softmax over the
    chosen), Qwen2-MoE (softmax), DeepSeek-V2 (softmax, groups by their best expert), DeepSeek-V3 (sigmoid, groups by
    their best two, sum to one), ERNIE 4.5 (softmax with a correction).
    """
    wide_scores = scores.astype(jnp.float32)
    choice_scores = jax.nn.sigmoid(wide_scores) if model.router_scores == "sigmoid" else wide_scores
    if correction is not None:
        shares = choice_scores if model.router_scores == "sigmoid" else jax.nn.softmax(wide_scores, axis=-1)
        choice_scores = shares + correction[None, None]
    experts = jax.lax.top_k(_in_best_groups(choice_scores, model), model.experts_per_token)[1]
    gates = _gates(wide_scores, experts, model)
    return gates, assign_slots(experts, num_experts=scores.shape[-1], capacity=capacity)


def route_backward(dgates: Gates, scores: RouterScores, chosen: Chosen, model: Model, *, capacity: int) -> RouterScores:
    """Returns the cotangent of the scores; the choice of experts has no derivative.

    For p = softmax(s), over all scores or over the chosen: ds = p (dp - sum(p dp)). For g = p / sum(p): dp = (dg -
    sum(g dg)) / sum(p).
    """
    wide_scores, wide_dgates = scores.astype(jnp.float32), dgates.astype(jnp.float32) * model.routed_scale
    experts = expert_numbers(chosen, capacity=capacity)
    picked_scores = jnp.take_along_axis(wide_scores, experts, axis=-1)
    num_experts = scores.shape[-1]
    if model.router_scores == "sigmoid":
        shares = jax.nn.sigmoid(picked_scores)
        if model.gates_sum_to_one:
            share_sum = jnp.sum(shares, axis=-1, keepdims=True)
            wide_dgates = (wide_dgates - jnp.sum(wide_dgates * shares, axis=-1, keepdims=True) / share_sum) / share_sum
        dscores = spread(wide_dgates * shares * (1 - shares), experts, num_experts)
    elif model.gates_sum_to_one:
        dscores = spread(_softmax_backward(wide_dgates, jax.nn.softmax(picked_scores, axis=-1)), experts, num_experts)
    else:
        dscores = _softmax_backward(spread(wide_dgates, experts, num_experts), jax.nn.softmax(wide_scores, axis=-1))
    return dscores.astype(scores.dtype)


def _in_best_groups(scores: RouterScores, model: Model) -> RouterScores:
    """Sets the scores of experts outside of a token's best groups to -inf. Groups are ranked by their best expert or,
    if shares are sigmoids, by the sum of their two best."""
    if not model.expert_groups:
        return scores
    grouped_scores = scores.reshape(*scores.shape[:-1], model.expert_groups, -1)
    if model.router_scores == "softmax":
        group_scores = jnp.max(grouped_scores, axis=-1)
    else:
        group_scores = jnp.sum(jax.lax.top_k(grouped_scores, 2)[0], axis=-1)
    best_groups = jax.lax.top_k(group_scores, model.groups_per_token)[1]
    is_best = jnp.any(best_groups[..., None] == jnp.arange(model.expert_groups)[None, None, None], axis=-2)
    return jnp.where(is_best[..., None], grouped_scores, -jnp.inf).reshape(scores.shape)


def _gates(scores: RouterScores, experts: Chosen, model: Model) -> Gates:
    picked_scores = jnp.take_along_axis(scores, experts, axis=-1)
    if model.router_scores == "sigmoid":
        shares = jax.nn.sigmoid(picked_scores)
        gates = shares / jnp.sum(shares, axis=-1, keepdims=True) if model.gates_sum_to_one else shares
    elif model.gates_sum_to_one:  # the sum over all experts cancels
        gates = jax.nn.softmax(picked_scores, axis=-1)
    else:
        gates = jnp.exp(picked_scores - jax.nn.logsumexp(scores, axis=-1, keepdims=True))
    return gates * model.routed_scale


def _softmax_backward(dshares: Float[Array, "B T n"], shares: Float[Array, "B T n"]) -> Float[Array, "B T n"]:
    return shares * (dshares - jnp.sum(shares * dshares, axis=-1, keepdims=True))


def spread(values: Gates, experts: Chosen, num_experts: int) -> RouterScores:
    """Puts values at the indices of their experts, zero elsewhere; by comparison, since a scatter is slow on CPUs."""
    expert_ids = jnp.arange(num_experts)[None, None]
    spread_values = jnp.zeros((*values.shape[:-1], num_experts), jnp.float32)
    for choice_index in range(values.shape[-1]):
        spread_values += jnp.where(experts[..., choice_index, None] == expert_ids, values[..., choice_index, None], 0.0)
    return spread_values


def slot_capacity(context: Context, step: Step, tokens: Array) -> int:
    """Returns the slots per expert for the tokens of a block [B, T, ...]."""
    return expert_capacity(context.model, tokens.shape[0] * tokens.shape[1], step.details.capacity)


def _route(context: Context, step: Step, scores: Array, *correction: Array) -> tuple[Array, ...]:
    """Returns weights and slots of each token and, if the step has a result for them, the device's routing counts."""
    capacity = slot_capacity(context, step, scores)
    gates, chosen = route(scores, context.model, *correction, capacity=capacity)
    if len(step.more) == 1:
        return gates, chosen
    return gates, chosen, routing_counts(scores, chosen, capacity=capacity)


def _route_backward(
    context: Context, step: Step, dgates: Array, scores: Array, chosen: Array, *routing: Array
) -> Array:
    """Returns the cotangent of the scores, from the cotangent of the experts' weights and the router's losses."""
    model, details = context.model, step.details
    dscores = route_backward(dgates, scores, chosen, model, capacity=slot_capacity(context, step, scores))
    loss_weights = {"balance": details.balance / details.microbatches, "z": details.z / details.microbatches}
    if not routing or not any(loss_weights.values()):
        return dscores
    dlosses = balance_backward(scores, routing[0], experts_per_token=model.experts_per_token, **loss_weights)
    return dscores + dlosses.astype(scores.dtype)


STEPS = {"route": _route, "route_backward": _route_backward}
