"""Optimizers of sharded weights: moments, float32 weights, rounding and running mean in one update.

How to use it::

    optimizer = make_optimizer(model, settings, strategy.state)
    optimizer = in_state(plain_optimizer(optax.adamw(3e-4)), strategy.state)  # or any of optax's
    state = optimizer.init(params)                                            # OptState
    params, state = optimizer.update(grads, state, params, layout)            # new weights, not their changes
    specs = optimizer.specs(param_shapes, param_specs)                        # OptState of PartitionSpecs
    weights = averaged(state, params)                                         # what evaluation reads

``params`` is the flat dict of `nn.weights.Params`. ``init`` and ``update`` work on global arrays under `jit`: results
do not depend on the mesh except for rounding of sums. The update runs the derived steps on each device's shards: those
of AdamW and Lion are elementwise, Adafactor needs small sums, Muon whole matrices.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from meshwright.core.errors import require_known
from meshwright.nn.weights import Params
from meshwright.parallel.held import Tree
from meshwright.parallel.optimizer import Optimizer, UpdateLayout, weight_of
from meshwright.spec.model import Model
from meshwright.spec.strategy import STATE_BYTES
from meshwright.train.optimizers.derived import DerivedUpdate
from meshwright.train.optimizers.rounding import round_to, round_tree
from meshwright.train.settings import Rounding, TrainSettings


class OptState(NamedTuple):
    """The state of an optimizer: the number of updates, the wrapped optimizer's state, float32 copies of two-byte
    weights if the training state has them (else empty), and the running mean of the weights (else empty)."""

    count: Any
    inner: Tree
    master: Params
    average: Params


def make_optimizer(model: Model, settings: TrainSettings, strategy_state: str = "fp32") -> Optimizer:
    """Returns the optimizer that the settings name, for a training state of `spec.strategy.STATE_BYTES`."""
    derived_update = DerivedUpdate(model, settings)
    return in_state(
        Optimizer(derived_update.init, derived_update.update, settings.optimizer),
        strategy_state,
        rounding=settings.rounding,
        seed=settings.seed,
        average=settings.average,
    )


def in_state(
    inner: Optimizer, state: str = "fp32", *, rounding: Rounding = "nearest", seed: int = 0, average: float = 0.0
) -> Optimizer:
    """Returns an optimizer that computes in float32 whatever the dtype of the weights.

    Moments stay float32, but have two bytes in the state "pure-16bit". States named "bf16-master..." keep float32
    weights, and the model's weights are the nearest two-byte values; otherwise two-byte weights and moments are rounded
    as ``rounding`` says, with random bits from ``seed``, the number of the update, the array and the index in it.
    ``average`` is the decay of the running mean of the weights, 0 for none. Raises InputError for an unknown state.
    """
    require_known("state", state, STATE_BYTES)
    keeps_master = state.startswith("bf16-master")

    def init(params: Params) -> OptState:
        def narrow(path: tuple[Any, ...], leaf: Array) -> Array:
            is_moment = weight_of(path, params) is not None and leaf.dtype == jnp.float32
            return leaf.astype(jnp.bfloat16) if is_moment else leaf

        moments = inner.init(_float32(params))
        if state == "pure-16bit":  # counters and constants stay
            moments = jax.tree_util.tree_map_with_path(narrow, moments)
        master_copies = start_average(params) if keeps_master else {}
        return OptState(jnp.zeros((), jnp.int32), moments, master_copies, start_average(params) if average else {})

    def update(grads: Params, old: OptState, params: Params, *layout: UpdateLayout) -> tuple[Params, OptState]:
        master_params = old.master or _float32(params)
        new_master_params, moments = inner.update(_float32(grads), _float32(old.inner), master_params, *layout)
        weight_key = moment_key = None
        if rounding == "stochastic":
            weight_key, moment_key = jax.random.split(jax.random.fold_in(jax.random.key(seed), old.count))
        new_params = round_tree(new_master_params, params, key=None if keeps_master else weight_key)
        num_updates, stored_params = old.count + 1, new_master_params if keeps_master else new_params
        average_params = update_average(old.average, stored_params, decay=average, count=num_updates) if average else {}
        moments = round_tree(moments, old.inner, key=moment_key)
        return new_params, OptState(num_updates, moments, new_master_params if keeps_master else {}, average_params)

    return Optimizer(init, update, inner.kind)


def averaged(state: OptState, params: Params) -> Params:
    """Returns the running mean in the dtypes of the weights; weights and buffers without a mean are unchanged."""
    mean_by_name = {name: round_to(mean, params[name].dtype) for name, mean in state.average.items()}
    return {**params, **mean_by_name} if mean_by_name else params


def _float32(tree: Any) -> Any:
    """Casts arrays of floating point to float32; counters stay."""
    return jax.tree.map(lambda a: a.astype(jnp.float32) if jnp.issubdtype(a.dtype, jnp.floating) else a, tree)


def start_average(params: Params) -> Params:
    """Returns float32 copies of the weights."""
    # Without a copy `jit` would return the same buffer, which could then not be donated.
    return {name: jnp.copy(array).astype(jnp.float32) for name, array in params.items()}


def average_decay(decay: float, count: Any) -> Any:
    """Returns the decay at update ``count`` (from 1): min(decay, (1 + count) / (10 + count)).

    Without this warm-up the untrained weights would stay in the mean for about 1 / (1 - decay) updates; with it the
    mean needs no bias correction. Source: TensorFlow's ExponentialMovingAverage (num_updates).
    """
    update = jnp.asarray(count, jnp.float32)
    return jnp.minimum(decay, (1 + update) / (10 + update))


def update_average(average: Params, params: Params, *, decay: float, count: Any) -> Params:
    """Moves the mean towards the new weights by 1 - `average_decay`."""
    new_share = 1 - average_decay(decay, count)
    return jax.tree.map(lambda mean, new: mean + new_share * (new.astype(jnp.float32) - mean), average, params)
