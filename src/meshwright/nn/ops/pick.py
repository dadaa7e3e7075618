"""Selects one position of each sequence, or some rows."""

import jax.numpy as jnp
from jaxtyping import Array

from meshwright.algebra.steps import Step
from meshwright.nn.collectives import first_index, own_entries
from meshwright.nn.context import Context


def pick(context: Context, step: Step, x: Array, number: Array) -> Array:
    """Returns entry ``number`` of each row [B, D], or rows ``number`` [O, D]; zeros for entries on another device."""
    picks_rows = step.inputs[1].dims == ("O",)
    num_entries, axes = x.shape[0 if picks_rows else 1], step.inputs[0].axes_of("B" if picks_rows else "T")
    local_index, is_own = own_entries(number, first_index(axes, num_entries), num_entries)
    entries = x[local_index, 0] if picks_rows else jnp.take_along_axis(x, local_index[:, None, None], axis=1)[:, 0]
    return jnp.where(is_own[:, None], entries, jnp.zeros((), x.dtype))


STEPS = {"pick": pick}
