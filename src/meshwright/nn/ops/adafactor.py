"""Adafactor's steps on the shards of one device; means over split dims are partial, and an AllReduce sums them.

A mean over a dim that is padded with zeros counts only the entries without padding.

Source: Shazeer and Stern, Adafactor (2018), algorithms 4 and 5, section 8.
"""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from meshwright.algebra.notation import ShardedArray, Sizes
from meshwright.algebra.steps import Step
from meshwright.nn.context import UpdateContext
from meshwright.nn.contract import spread
from meshwright.nn.ops.adamw import changed

CLIP_RMS, SMALLEST_SQUARE, SMALLEST_SCALE = 1.0, 1e-30, 1e-3
"""The paper's constants: threshold d, epsilon 1 and epsilon 2."""


def _moved(context: UpdateContext, mean: Array, new: Array) -> Array:
    """Returns a running mean after this update: ``new`` with weight 1 - `growing_decay`."""
    return context.growing_decay * mean + (1 - context.growing_decay) * new


def _mean_part(sizes: Sizes, values: Array, of: ShardedArray, over: ShardedArray) -> Array:
    """Returns this device's contribution to the mean over the dims of ``of`` that ``over`` lacks."""
    mean_axes = tuple(i for i, dim in enumerate(of.dims) if dim not in over.dims)
    num_entries = math.prod(sizes.get(of.dims[i], values.shape[i] * lax.axis_size(of.axes[i])) for i in mean_axes)
    return jnp.sum(values, mean_axes) / num_entries


def sums(context: UpdateContext, step: Step, grad: Array) -> tuple[Array, ...]:
    """Returns the mean squares of the gradient over outputs (rows) and over inputs (columns)."""
    squares = jnp.square(grad) + SMALLEST_SQUARE
    return tuple(_mean_part(context.sizes, squares, step.inputs[0], array) for array in (step.result, *step.more))


def moments(context: UpdateContext, step: Step, *sums_and_means: Array) -> tuple[Array, ...]:
    """Returns the mean of the row means, and the updated running means of rows and columns."""
    row_means, column_means, *old_means = sums_and_means
    new_means = [_moved(context, old, new) for old, new in zip(old_means, (row_means, column_means), strict=True)]
    return _mean_part(context.sizes, new_means[0], step.more[0], step.result), *new_means


def scale(
    context: UpdateContext, step: Step, grad: Array, rows: Array, columns: Array, level: Array
) -> tuple[Array, ...]:
    """Divides the gradient by the factored root of its second moment; also returns the quotient's mean square."""
    grad_array, row_array, column_array, level_array = step.inputs
    row_share = spread(rows / spread(level, level_array.dims, row_array.dims), row_array.dims, grad_array.dims)
    update = grad * lax.rsqrt(row_share) * lax.rsqrt(spread(columns, column_array.dims, grad_array.dims))
    return update, _mean_part(context.sizes, jnp.square(update), grad_array, step.more[0])


def vector(context: UpdateContext, step: Step, grad: Array, moment: Array) -> tuple[Array, ...]:
    """Divides a vector's gradient by the root of its second moment; also returns the mean square and the moment."""
    moment = _moved(context, moment, jnp.square(grad) + SMALLEST_SQUARE)
    update = grad * lax.rsqrt(moment)
    return update, _mean_part(context.sizes, jnp.square(update), step.inputs[0], step.more[0]), moment


def weights(context: UpdateContext, step: Step, values: Array) -> Array:
    """Returns the mean square of the weights."""
    return _mean_part(context.sizes, jnp.square(values), step.inputs[0], step.result)


def change(context: UpdateContext, step: Step, scaled: Array, squares: Array, weights: Array) -> Array:
    """Returns the update, clipped to root mean square 1, times the weights' RMS (at least `SMALLEST_SCALE`)."""
    scaled_array, *means = step.inputs
    rms, size = (spread(jnp.sqrt(v), a.dims, scaled_array.dims) for v, a in zip((squares, weights), means, strict=True))
    return scaled / jnp.maximum(1.0, rms / CLIP_RMS) * jnp.maximum(SMALLEST_SCALE, size)


STEPS = {
    "adafactor_sums": sums,
    "adafactor_moments": moments,
    "adafactor_scale": scale,
    "adafactor_vector": vector,
    "adafactor_weights": weights,
    "adafactor": change,
    "adafactor_apply": changed,
}
