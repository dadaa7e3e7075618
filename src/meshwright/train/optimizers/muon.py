"""Muon: the momentum of each matrix orthogonalised, for arrays that hold a matrix per layer and expert."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from meshwright.algebra.kinds import Updated
from meshwright.algebra.ops.adafactor import stacked
from meshwright.algebra.ops.muon import update as muon_steps
from meshwright.nn.interpreter import run_update
from meshwright.nn.ops.muon import momentum
from meshwright.nn.weights import Params
from meshwright.train.optimizers.sharded import WeightLayout, on_shards


class MuonState(NamedTuple):
    """Number of updates, and the running mean of the gradients."""

    count: Any
    momentum: Params


def scale_by_muon(decay: float, layout: Callable[[], WeightLayout]) -> optax.GradientTransformation:
    """Orthogonalises the Nesterov momentum of every matrix, and scales it by 0.2 sqrt(max(inputs, outputs)).

    Each device works on whole matrices of some layers. Source: Jordan, Muon, 2024; Liu et al., Muon is
    Scalable for LLM Training, 2025 (the scale).
    """

    def init(params: Params) -> MuonState:
        return MuonState(jnp.zeros((), jnp.int32), jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params))

    def update(grads: Params, state: MuonState, params: Params | None = None) -> tuple[Params, MuonState]:
        count, at = state.count + 1, layout()
        pairs = {n: momentum(state.momentum[n], grad, count, decay=decay) for n, grad in grads.items()}
        changes = {name: orthogonal(mixed, at.weights[name], at) for name, (_, mixed) in pairs.items()}
        return changes, MuonState(count, {name: mean for name, (mean, _) in pairs.items()})

    return optax.GradientTransformation(init, update)


def orthogonal(values: jax.Array, weight: Updated, layout: WeightLayout) -> jax.Array:
    """Maps every matrix U S V^T of a sharded array to nearly U V^T; each device works on whole matrices of some layers.

    Layers are padded with zeros to a multiple of the devices, so a device receives at most one matrix that it does not
    need. GSPMD would gather whole arrays in every iteration instead.
    """
    steps = muon_steps(weight)[1:-1]
    array, (first, last) = stacked(weight, weight.shard.name), (steps[0].inputs[0], steps[-1].result)
    counted = 1 + len(weight.batch)
    devices = math.prod(layout.mesh.shape[axis] for axis in steps[0].details.axes) if layout.mesh is not None else 1

    def body(here: jax.Array) -> tuple[jax.Array, ...]:
        count = math.prod(here.shape[:counted])
        flat = here.reshape(count, *here.shape[counted:])
        whole = jnp.pad(flat, [(0, -count % devices), *[(0, 0)] * (flat.ndim - 1)])
        return (run_update(steps, {first: whole})[last][:count].reshape(here.shape),)

    return on_shards(body, layout, {array: values}, (array,))[0]
