"""Repeats key and value heads, and sums the cotangents of the repeats."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.steps import Step
from meshwright.nn.context import Context
from meshwright.spec.strategy import REPEATED_HEADS


def _heads(context: Context, repeated: ShardedArray) -> tuple[int, Array]:
    """Returns the heads' index among the dims, and which of the model's heads each repeat on this device copies."""
    dim = next(dim for dim in repeated.dims if dim in REPEATED_HEADS)
    axes, num_heads = repeated.axes_of(dim), context.local_size(repeated, dim)
    num_repeats = context.local_size(repeated.resharded({dim: ()}), dim) // _own_heads(context, repeated)
    first_head = lax.axis_index(axes) * num_heads if axes else 0
    return repeated.dims.index(dim), (first_head + jnp.arange(num_heads)) // num_repeats


def _own_heads(context: Context, repeated: ShardedArray) -> int:
    """Returns the model's number of key and value heads, before repeats."""
    return context.model.dims["Kf" if any(dim.startswith("Kf") for dim in repeated.dims) else "K"]


def repeat_heads(context: Context, step: Step, heads: Array) -> Array:
    """Returns this device's repeats of the heads."""
    heads_dim, source_heads = _heads(context, step.result)
    return jnp.take(heads, source_heads, axis=heads_dim)


def repeat_heads_backward(context: Context, step: Step, dout: Array) -> Array:
    """Returns for each of the model's heads the sum of the cotangents of this device's repeats of it."""
    heads_dim, source_heads = _heads(context, step.inputs[0])
    heads_shape = (*dout.shape[:heads_dim], _own_heads(context, step.inputs[0]), *dout.shape[heads_dim + 1 :])
    return jnp.zeros(heads_shape, dout.dtype).at[(slice(None),) * heads_dim + (source_heads,)].add(dout)


STEPS = {"repeat_heads": repeat_heads, "repeat_heads_backward": repeat_heads_backward}
