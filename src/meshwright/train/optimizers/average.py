"""The running mean of the weights over the updates (EMA), in float32."""

from typing import Any

import jax
import jax.numpy as jnp

from meshwright.nn.weights import Params


def start_average(params: Params) -> Params:
    """The mean before the first update: the weights themselves, in buffers of their own."""
    # A copy, because `jit` hands an array that it did not change back as the same buffer, which could not be donated.
    return {name: jnp.copy(array).astype(jnp.float32) for name, array in params.items()}


def average_decay(decay: float, count: Any) -> Any:
    """Decay at update ``count`` (from 1): min(decay, (1 + count) / (10 + count)).

    Without this warm-up the first, untrained weights would stay in the mean for some 1 / (1 - decay) updates; with
    it the mean needs no correction where it is read. Source: TensorFlow's ExponentialMovingAverage (num_updates).
    """
    number = jnp.asarray(count, jnp.float32)
    return jnp.minimum(decay, (1 + number) / (10 + number))


def update_average(average: Params, params: Params, *, decay: float, count: Any) -> Params:
    """The mean moved towards the new weights by 1 - `average_decay`."""
    share = 1 - average_decay(decay, count)
    return jax.tree.map(lambda mean, new: mean + share * (new.astype(jnp.float32) - mean), average, params)
