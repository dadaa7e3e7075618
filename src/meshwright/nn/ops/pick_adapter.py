"""Keeps the columns of each row's adapter and sets the other columns to zero; adapter -1 keeps none."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from meshwright.algebra.steps import Step
from meshwright.nn.context import Context


def pick_adapter(
    context: Context, step: Step, x: Float[Array, "B T Ra"], adapters: Int[Array, "B T"]
) -> Float[Array, "B T Ra"]:
    """Returns x times ``step.details.by`` in the columns of adapter ``adapters[B, T]``, else 0."""
    adapter_of_column = lax.broadcasted_iota(jnp.int32, x.shape, 2) // (x.shape[2] // step.details.count)
    return jnp.where(adapter_of_column == adapters[..., None], x * step.details.by, jnp.zeros((), x.dtype))


STEPS = {"pick_adapter": pick_adapter}
