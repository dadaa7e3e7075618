"""Selects the residual stream that layers read, or all streams but the first."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.steps import Step
from meshwright.nn.context import Context


def taken(context: Context, array: ShardedArray) -> int | slice:
    """Returns the index of an array's streams among all streams."""
    return slice(1, None) if array.dims[0] == "An" else context.model.active_stream


def stream_backward(context: Context, step: Step, dout: Array) -> Float[Array, "A B T D"]:
    """Returns the cotangent of all streams, zero for streams that were not selected."""
    zeros = jnp.zeros((context.model.num_streams, *dout.shape[-3:]), dout.dtype)
    return zeros.at[taken(context, step.inputs[0])].set(dout)


STEPS = {
    "stream": lambda context, step, x: x[taken(context, step.result)],
    "stream_backward": stream_backward,
}
