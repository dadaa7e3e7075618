"""Adds a bias vector to every row, or each expert's bias to the rows in its slots."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from meshwright.algebra.steps import Step
from meshwright.nn.context import Context
from meshwright.nn.contract import spread
from meshwright.nn.experts.products import blocks_of, slot_weight_gradient
from meshwright.nn.experts.slots import Ragged, experts_of_rows


def bias_add(context: Context, step: Step, x: Any, bias: Array) -> Any:
    """Adds the bias along the dims that it has; a row of packed tokens gets the bias of its expert."""
    if isinstance(x, Ragged):
        return x.with_rows(x.rows + bias[experts_of_rows(x)].astype(x.rows.dtype))
    x_dims, bias_dims = (array.dims for array in step.inputs)
    return x + spread(bias, bias_dims, x_dims).astype(x.dtype)


def bias_add_backward(context: Context, step: Step, dout: Any) -> Any:
    """Sums ``dout`` over the dims that the bias lacks; for packed tokens over the rows of each expert."""
    if isinstance(dout, Ragged):
        ones = dout.with_rows(jnp.ones((dout.rows.shape[0], 1), dout.rows.dtype))
        return slot_weight_gradient(ones, dout, blocks_of(dout, context.model))[:, 0]
    dims = step.inputs[0].dims
    return jnp.sum(dout, axis=tuple(i for i, dim in enumerate(dims) if dim not in step.result.dims))


STEPS = {"bias_add": bias_add, "bias_add_backward": bias_add_backward}
