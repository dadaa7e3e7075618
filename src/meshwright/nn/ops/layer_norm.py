"""Layer norm of rows, forward and backward."""

from typing import Any

import jax

from meshwright.algebra.steps import Step
from meshwright.nn import norms
from meshwright.nn.context import Context


def layer_norm(context: Context, step: Step, x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    return norms.layer_norm(x, scale, bias, eps=context.model.norm_eps)


def layer_norm_backward(context: Context, step: Step, dout: jax.Array, x: jax.Array, scale: jax.Array) -> Any:
    return norms.layer_norm_backward(dout, x, scale, eps=context.model.norm_eps)


STEPS = {"layer_norm": layer_norm, "layer_norm_backward": layer_norm_backward}
