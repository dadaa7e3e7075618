"""Load balance of a router: counts, losses with their gradients, and metrics.

Every device counts its own tokens of a microbatch as ``routing[Er, E]``, float32, one row for each of `ROUTING_ROWS`;
losses and metrics are functions of the sum over devices:

- load: choices of each expert, dropped ones included; sums to tokens x experts per token
- kept: choices that got a slot
- importance: sum over tokens of the softmax over all scores, also if the router itself uses sigmoids
- z: importance with each token weighted by log(sum(exp(scores)))^2; its sum over experts is the sum of these squares
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meshwright.algebra.derived import Derived
from meshwright.algebra.ops.route import ROUTING_ROWS
from meshwright.algebra.rewrites.split_backward import counts_of
from meshwright.nn.experts.slots import Chosen, RouterScores, expert_numbers
from meshwright.nn.weights import Params
from meshwright.spec.model import Model

FromCounts = tuple[Params, Params]
"""`routing_metrics` by name, and each router correction's step direction [layers, E] by the name of its buffer."""

RoutingCounts = Float[Array, "*layers Er E"]


def routing_counts(scores: RouterScores, chosen: Chosen, *, capacity: int) -> RoutingCounts:
    """Returns ``routing[Er, E]`` (see the module) of one device's tokens."""
    shares, log_total = _softmax(scores)
    experts = expert_numbers(chosen, capacity=capacity)
    expert_ids = jnp.arange(scores.shape[-1])[None, None]
    load = num_kept = jnp.zeros(scores.shape, jnp.float32)
    for choice_index in range(chosen.shape[-1]):
        is_choice = (experts[..., choice_index, None] == expert_ids).astype(jnp.float32)
        load = load + is_choice
        num_kept = num_kept + is_choice * (chosen[..., choice_index, None] >= 0)
    entries_by_row = {"load": load, "kept": num_kept, "importance": shares, "z": shares * log_total**2}
    return jnp.stack([jnp.sum(entries_by_row[name], axis=(0, 1)) for name in ROUTING_ROWS])


def balance_backward(
    scores: RouterScores, routing: RoutingCounts, *, experts_per_token: int, balance: float = 0.0, z: float = 0.0
) -> RouterScores:
    """Returns the cotangent of a device's scores from ``balance`` x balance loss + ``z`` x z-loss, in float32.

    ``routing`` is the sum over all devices. With p the softmax over all scores and N tokens, the balance loss is
    E sum_e (load_e / N) (sum_t p_te / N), so dp_te = E load_e / N^2, the load having no derivative; of the z-loss
    ds_te = 2 log(sum(exp(s_t))) p_te / N.
    """
    shares, log_total = _softmax(scores)
    load = routing[ROUTING_ROWS.index("load")]
    num_tokens = jnp.sum(load) / experts_per_token
    dshares = (load * (balance * load.size) / num_tokens**2)[None, None]
    from_balance = shares * (dshares - jnp.sum(shares * dshares, axis=-1, keepdims=True))
    return from_balance + shares * log_total * (2 * z / num_tokens)


def correction_move(routing: RoutingCounts) -> Float[Array, "*layers E"]:
    """Returns ``sign(mean load - load)`` of each expert; a step adds it, times a rate, to the expert's router
    correction.

    Source: Wang et al., Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts, 2024, algorithm 1."""
    load = routing[..., ROUTING_ROWS.index("load"), :]
    return jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)


def _softmax(scores: RouterScores) -> tuple[RouterScores, Float[Array, "B T 1"]]:
    wide_scores = scores.astype(jnp.float32)
    return jax.nn.softmax(wide_scores, axis=-1), jax.nn.logsumexp(wide_scores, axis=-1, keepdims=True)


def routing_metrics(routing: RoutingCounts, *, experts_per_token: int) -> dict[str, Float[Array, "*layers"]]:
    """Returns metrics of the counts over all devices; leading dims (layers, microbatches) are kept.

    - balance_loss: E sum_e (load_e / N) (importance_e / N); Ea at equal load, at most E. Source: Fedus et al., Switch
      Transformers (2021), eq. 4, with the choices of all Ea experts of a token, as Mixtral counts them.
    - router_z_loss: mean over tokens of log(sum(exp(scores)))^2. Source: Zoph et al., ST-MoE (2022), eq. 5.
    - load_max_over_mean: the choices of the busiest expert, divided by the mean
    - dropped_share: the share of choices without a slot
    """
    load, placed, importance, z = (routing[..., ROUTING_ROWS.index(n), :] for n in ("load", "kept", "importance", "z"))
    num_choices = jnp.sum(load, axis=-1)
    num_tokens = num_choices / experts_per_token
    return {
        "balance_loss": load.shape[-1] * jnp.sum(load * importance, axis=-1) / num_tokens**2,
        "router_z_loss": jnp.sum(z, axis=-1) / num_tokens,
        "load_max_over_mean": jnp.max(load, axis=-1) / jnp.mean(load, axis=-1),
        "dropped_share": 1 - jnp.sum(placed, axis=-1) / num_choices,
    }


def without_counts(derived: Derived, grads: Params, model: Model) -> tuple[Params, FromCounts]:
    """Returns the gradients of weights and, from the counts among ``grads``, routing metrics of all layers with experts
    and the step directions of router corrections (only if the program has a correction rate).

    The counts are [layers, Er, E] of each kind of layer, under the names of `counts_of`; without counts both are {}.
    """
    counts_by_name = {name: grads[name] for name in sorted(grads.keys() - derived.shards.keys())}
    weight_grads = {name: grads[name] for name in derived.shards}
    if not counts_by_name:
        return weight_grads, ({}, {})
    metrics = routing_metrics(jnp.concatenate(list(counts_by_name.values())), experts_per_token=model.experts_per_token)
    move_by_buffer = {
        op.inputs[1]: float(rate) * correction_move(counts_by_name[name])
        for steps in derived.blocks
        for name in counts_of(steps)
        for op in steps.block.ops
        if (rate := dict(op.attributes).get("correction_rate"))
    }
    return weight_grads, (metrics, move_by_buffer)
