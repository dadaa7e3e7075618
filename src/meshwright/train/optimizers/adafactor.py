"""Adafactor's second moments by rows and columns, for arrays that hold a matrix per layer and expert.

Written here because optax's form factors the two largest dims of an array, which may be layers or heads.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from meshwright.nn.weights import Params
from meshwright.train.optimizers.matrices import MatrixAxes

DECAY_POWER, CLIP_RMS, SMALLEST_SQUARE, SMALLEST_SCALE = 0.8, 1.0, 1e-30, 1e-3
"""The paper's constants: decay 1 - t^-0.8, threshold d, epsilon 1 and epsilon 2."""


class FactoredState(NamedTuple):
    """Updates done; running means of squared gradients over the outputs and over the inputs of matrices, and whole
    for vectors. Means keep the dims they were taken over, with size 1."""

    count: Any
    rows: Params
    columns: Params
    whole: Params


def scale_by_adafactor(axes: Mapping[str, MatrixAxes]) -> optax.GradientTransformation:
    """Gradients divided by the factored root of their second moments, each matrix clipped to RMS 1 and scaled by the
    RMS of its weights. Source: Shazeer and Stern, 2018, algorithms 4 and 5, section 8.
    """

    def init(params: Params) -> FactoredState:
        def empty(name: str, over: tuple[int, ...]) -> jax.Array:
            shape = [1 if axis in over else size for axis, size in enumerate(params[name].shape)]
            return jnp.zeros(shape, jnp.float32)

        matrices = [name for name in params if axes[name].is_matrix]
        return FactoredState(
            jnp.zeros((), jnp.int32),
            {name: empty(name, axes[name].outputs) for name in matrices},
            {name: empty(name, axes[name].inputs) for name in matrices},
            {name: empty(name, ()) for name in params if name not in matrices},
        )

    def update(grads: Params, state: FactoredState, params: Params | None = None) -> tuple[Params, FactoredState]:
        assert params is not None
        count = state.count + 1
        decay = 1 - count.astype(jnp.float32) ** -DECAY_POWER
        squares = {name: jnp.square(grad) + SMALLEST_SQUARE for name, grad in grads.items()}

        def moved(old: Params, over: Mapping[str, tuple[int, ...]]) -> Params:
            return {n: decay * v + (1 - decay) * squares[n].mean(over[n], keepdims=True) for n, v in old.items()}

        rows = moved(state.rows, {name: axes[name].outputs for name in state.rows})
        columns = moved(state.columns, {name: axes[name].inputs for name in state.columns})
        whole = moved(state.whole, dict.fromkeys(state.whole, ()))
        scaled = {}
        for name, grad in grads.items():
            if name in rows:
                share = rows[name] / rows[name].mean(axes[name].inputs, keepdims=True)
                found = grad * jax.lax.rsqrt(share) * jax.lax.rsqrt(columns[name])
            else:
                found = grad * jax.lax.rsqrt(whole[name])
            scaled[name] = _clipped(found, params[name], axes[name].within)
        return scaled, FactoredState(count, rows, columns, whole)

    return optax.GradientTransformation(init, update)


def _clipped(scaled: jax.Array, weights: jax.Array, within: tuple[int, ...]) -> jax.Array:
    clipped = scaled / jnp.maximum(1.0, _rms(scaled, within) / CLIP_RMS)
    return clipped * jnp.maximum(SMALLEST_SCALE, _rms(weights, within))


def _rms(values: jax.Array, within: tuple[int, ...]) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(values), within, keepdims=True))
