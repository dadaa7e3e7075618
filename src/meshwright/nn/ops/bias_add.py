"""A vector added to every row, or to the slots of each expert."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meshwright.algebra.steps import Step
from meshwright.nn.context import Context
from meshwright.nn.experts import ragged
from meshwright.nn.experts.ragged import Ragged


def bias_add(x: Float[Array, "*dims"], bias: Float[Array, "*some"], *, at: tuple[int, ...]) -> Float[Array, "*dims"]:
    """``x + bias``, the dims of the bias being those of ``x`` numbered ``at``."""
    shape = tuple(x.shape[i] if i in at else 1 for i in range(x.ndim))
    return x + bias.reshape(shape).astype(x.dtype)


def _bias_add(context: Context, step: Step, x: Any, bias: jax.Array) -> Any:
    if isinstance(x, Ragged):
        return ragged.ragged_bias_add(x, bias)
    dims, of_bias = (array.dims for array in step.inputs)
    return bias_add(x, bias, at=tuple(dims.index(dim) for dim in of_bias))


def _bias_add_backward(context: Context, step: Step, dout: Any) -> Any:
    if isinstance(dout, Ragged):
        return ragged.ragged_bias_add_backward(dout)
    dims = step.inputs[0].dims
    return jnp.sum(dout, axis=tuple(i for i, dim in enumerate(dims) if dim not in step.result.dims))


STEPS = {"bias_add": _bias_add, "bias_add_backward": _bias_add_backward}
