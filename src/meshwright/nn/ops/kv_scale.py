"""The scale of each token and head of keys or values kept as int8."""

import jax

from meshwright.algebra.steps import Step
from meshwright.nn.context import Context
from meshwright.nn.quantisation import absmax_scale


def kv_scale(context: Context, step: Step, values: jax.Array) -> jax.Array:
    """A scale for each token and head."""
    return absmax_scale(values, (values.ndim - 1,))


STEPS = {"kv_scale": kv_scale}
