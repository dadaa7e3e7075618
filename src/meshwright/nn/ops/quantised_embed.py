"""Look-up of rows in an int8 table, each times its scale."""

import jax
import jax.numpy as jnp

from meshwright.algebra.steps import Step
from meshwright.nn.collectives import first_index
from meshwright.nn.context import Context
from meshwright.nn.ops.embed import embed, embed_scale

DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "int8": jnp.int8}


def quantised_embed(context: Context, step: Step, tokens: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
    """Rows of an int8 table, each times its scale, in the dtype of the stream."""
    first_row = first_index(step.inputs[1].axes[0], values.shape[0])
    dtype = jnp.dtype(DTYPES[context.dtype])
    # the rows of this device's part, then their scales: both are zeros for tokens outside of it
    found = embed(tokens, values.astype(dtype), first_row=first_row).astype(jnp.float32)
    factors = embed(tokens, scale[:, None], first_row=first_row, scale=embed_scale(context.model, dtype))
    return (found * factors).astype(dtype)


STEPS = {"quantised_embed": quantised_embed}
