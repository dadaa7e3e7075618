"""The router: which experts a token goes to and with what weight, forward and backward, in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meshwright.nn.experts.slots import Chosen, Gates, Scores, assign_slots, expert_numbers
from meshwright.spec.model import Model


def route(scores: Scores, model: Model, *, capacity: int) -> tuple[Gates, Chosen]:
    """Weights of each token's experts, float32, and the slots that they give it (see `nn.experts.slots`).

    Shares of all experts are the softmax over a token's scores, or the sigmoid of each. The experts with the highest
    are chosen, of a token's best groups where there are groups, and weighed by their shares. Of equal scores the expert
    with the lower number is chosen. Later tokens are dropped where an expert is asked for more than ``capacity`` slots;
    the weights of a token's other experts stay as they are. Sources: Mixtral and Qwen3-MoE (softmax, sum to one),
    gpt-oss (the same: a softmax over the chosen), Qwen2-MoE (softmax), DeepSeek-V2 (softmax, groups by their best
    expert), DeepSeek-V3 (sigmoid, groups by their best two, sum to one).
    """
    wide = scores.astype(jnp.float32)
    experts = jax.lax.top_k(_in_best_groups(wide, model), model.experts_per_token)[1]
    gates = _gates(wide, experts, model)
    return gates, assign_slots(experts, num_experts=scores.shape[-1], capacity=capacity)


def route_backward(dgates: Gates, scores: Scores, chosen: Chosen, model: Model, *, capacity: int) -> Scores:
    """Cotangent of the scores from that of the weights; which experts are chosen has no derivative.

    Of p = softmax(s), over all scores or over the chosen: ds = p (dp - sum(p dp)). Of g = p / sum(p):
    dp = (dg - sum(g dg)) / sum(p).
    """
    wide, dwide = scores.astype(jnp.float32), dgates.astype(jnp.float32) * model.routed_scale
    experts = expert_numbers(chosen, capacity=capacity)
    picked = jnp.take_along_axis(wide, experts, axis=-1)
    num_experts = scores.shape[-1]
    if model.router_scores == "sigmoid":
        shares = jax.nn.sigmoid(picked)
        if model.gates_sum_to_one:
            total = jnp.sum(shares, axis=-1, keepdims=True)
            dwide = (dwide - jnp.sum(dwide * shares, axis=-1, keepdims=True) / total) / total
        dscores = _spread(dwide * shares * (1 - shares), experts, num_experts)
    elif model.gates_sum_to_one:
        dscores = _spread(_softmax_backward(dwide, jax.nn.softmax(picked, axis=-1)), experts, num_experts)
    else:
        dscores = _softmax_backward(_spread(dwide, experts, num_experts), jax.nn.softmax(wide, axis=-1))
    return dscores.astype(scores.dtype)


def _in_best_groups(scores: Scores, model: Model) -> Scores:
    """The scores, -inf for experts outside of a token's best groups."""
    if not model.expert_groups:
        return scores
    grouped = scores.reshape(*scores.shape[:-1], model.expert_groups, -1)
    if model.router_scores == "softmax":
        of_group = jnp.max(grouped, axis=-1)
    else:
        of_group = jnp.sum(jax.lax.top_k(jax.nn.sigmoid(grouped), 2)[0], axis=-1)
    best = jax.lax.top_k(of_group, model.groups_per_token)[1]
    is_best = jnp.any(best[..., None] == jnp.arange(model.expert_groups)[None, None, None], axis=-2)
    return jnp.where(is_best[..., None], grouped, -jnp.inf).reshape(scores.shape)


def _gates(scores: Scores, experts: Chosen, model: Model) -> Gates:
    picked = jnp.take_along_axis(scores, experts, axis=-1)
    if model.router_scores == "sigmoid":
        shares = jax.nn.sigmoid(picked)
        gates = shares / jnp.sum(shares, axis=-1, keepdims=True) if model.gates_sum_to_one else shares
    elif model.gates_sum_to_one:  # what the shares of all are divided by cancels
        gates = jax.nn.softmax(picked, axis=-1)
    else:
        gates = jnp.exp(picked - jax.nn.logsumexp(scores, axis=-1, keepdims=True))
    return gates * model.routed_scale


def _softmax_backward(dshares: Float[Array, "B T n"], shares: Float[Array, "B T n"]) -> Float[Array, "B T n"]:
    return shares * (dshares - jnp.sum(shares * dshares, axis=-1, keepdims=True))


def _spread(values: Gates, experts: Chosen, num_experts: int) -> Scores:
    """``values`` at the places of their experts, zero elsewhere; compared, because a scatter is slow on CPUs."""
    number = jnp.arange(num_experts)[None, None]
    total = jnp.zeros((*values.shape[:-1], num_experts), jnp.float32)
    for choice in range(values.shape[-1]):
        total += jnp.where(experts[..., choice, None] == number, values[..., choice, None], 0.0)
    return total
