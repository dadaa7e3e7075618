"""Keys or values as int8 beside their scale."""

import jax

from meshwright.algebra.steps import Step
from meshwright.nn.context import Context
from meshwright.nn.quantisation import quantise


def kv_quantise(context: Context, step: Step, values: jax.Array, scale: jax.Array) -> jax.Array:
    """The int8 values beside it."""
    return quantise(values, scale, (values.ndim - 1,))


STEPS = {"kv_quantise": kv_quantise}
