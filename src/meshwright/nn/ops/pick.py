"""Takes one position of each row, or some rows."""

import jax.numpy as jnp
from jaxtyping import Array

from meshwright.algebra.steps import Step
from meshwright.nn.collectives import first_index, own_entries
from meshwright.nn.context import Context


def pick(context: Context, step: Step, x: Array, number: Array) -> Array:
    """Returns entry ``number`` of each row [B, D], zeros where another device holds it; or rows ``number`` [O, D]."""
    if step.inputs[1].dims == ("O",):
        return jnp.take(x[:, 0], number, axis=0, mode="clip")
    local, inside = own_entries(number, first_index(step.inputs[0].axes_of("T"), x.shape[1]), x.shape[1])
    found = jnp.take_along_axis(x, local[:, None, None], axis=1)[:, 0]
    return jnp.where(inside[:, None], found, jnp.zeros((), x.dtype))


STEPS = {"pick": pick}
