"""Adafactor's steps on the shards of one device; means over split dims are partial, and an AllReduce sums them.

``sizes`` are of dims that devices hold padded with zeros: a mean over such a dim is of its own entries.

Source: Shazeer and Stern, Adafactor (2018), algorithms 4 and 5, section 8.
"""

import math

import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array

from meshwright.algebra.notation import ShardedArray, Sizes
from meshwright.algebra.steps import Step
from meshwright.nn.contract import spread

CLIP_RMS, SMALLEST_SQUARE, SMALLEST_SCALE = 1.0, 1e-30, 1e-3
"""The paper's constants: threshold d, epsilon 1 and epsilon 2."""


def _mean_part(sizes: Sizes, values: Array, of: ShardedArray, over: ShardedArray) -> Array:
    """Returns this device's part of the mean over the dims of ``of`` that ``over`` lacks."""
    axes = tuple(i for i, dim in enumerate(of.dims) if dim not in over.dims)
    num_entries = math.prod(sizes.get(of.dims[i], values.shape[i] * lax.axis_size(of.axes[i])) for i in axes)
    return jnp.sum(values, axes) / num_entries


def sums(sizes: Sizes, step: Step, grad: Array) -> tuple[Array, ...]:
    """Returns the mean squares of the gradient over outputs (rows) and over inputs (columns)."""
    squares = jnp.square(grad) + SMALLEST_SQUARE
    return tuple(_mean_part(sizes, squares, step.inputs[0], array) for array in (step.result, *step.more))


def moments(sizes: Sizes, step: Step, rows: Array, columns: Array, *before_and_decay: Array) -> tuple[Array, ...]:
    """Returns the mean of the rows, and the running means of rows and columns."""
    *old_means, decay = before_and_decay
    new_means = [decay * old + (1 - decay) * new for old, new in zip(old_means, (rows, columns), strict=True)]
    return _mean_part(sizes, new_means[0], step.more[0], step.result), *new_means


def scale(sizes: Sizes, step: Step, grad: Array, rows: Array, columns: Array, level: Array) -> tuple[Array, ...]:
    """Divides the gradient by the factored root of its second moment; also returns the result's mean square."""
    grad_array, row_array, column_array, level_array = step.inputs
    share = spread(rows / spread(level, level_array.dims, row_array.dims), row_array.dims, grad_array.dims)
    update = grad * lax.rsqrt(share) * lax.rsqrt(spread(columns, column_array.dims, grad_array.dims))
    return update, _mean_part(sizes, jnp.square(update), grad_array, step.more[0])


def vector(sizes: Sizes, step: Step, grad: Array, before: Array, decay: Array) -> tuple[Array, ...]:
    """Divides a vector by the root of its second moment; also returns the result's mean square and the moment."""
    moment = decay * before + (1 - decay) * (jnp.square(grad) + SMALLEST_SQUARE)
    update = grad * lax.rsqrt(moment)
    return update, _mean_part(sizes, jnp.square(update), step.inputs[0], step.more[0]), moment


def weights(sizes: Sizes, step: Step, values: Array) -> Array:
    """Returns the mean square of the weights."""
    return _mean_part(sizes, jnp.square(values), step.inputs[0], step.result)


def change(sizes: Sizes, step: Step, scaled: Array, squares: Array, weights: Array) -> Array:
    """Returns the update, clipped to root mean square 1 and scaled by the RMS of the weights."""
    of_scaled, *means = step.inputs
    rms, size = (spread(jnp.sqrt(v), a.dims, of_scaled.dims) for v, a in zip((squares, weights), means, strict=True))
    return scaled / jnp.maximum(1.0, rms / CLIP_RMS) * jnp.maximum(SMALLEST_SCALE, size)


STEPS = {
    "adafactor_sums": sums,
    "adafactor_moments": moments,
    "adafactor_scale": scale,
    "adafactor_vector": vector,
    "adafactor_weights": weights,
    "adafactor": change,
    "adafactor_apply": optax.apply_updates,
}
