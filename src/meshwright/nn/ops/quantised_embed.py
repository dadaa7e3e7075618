"""Embedding lookup in a quantised table, each row times its scale."""

import jax.numpy as jnp
from jaxtyping import Array

from meshwright.algebra.steps import Step
from meshwright.nn.collectives import first_index
from meshwright.nn.context import Context
from meshwright.nn.ops.embed import embed, embed_scale, rows_of

DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "int8": jnp.int8, "fp8": jnp.float8_e4m3fn}


def quantised_embed(context: Context, step: Step, tokens: Array, values: Array, scale: Array) -> Array:
    """Looks up rows of a quantised table, times their scales, in ``context.dtype``."""
    first_row = first_index(step.inputs[1].axes[0], values.shape[0])
    tokens = rows_of(context.model, tokens, step.inputs[1])
    dtype = jnp.dtype(DTYPES[context.dtype])
    # rows and scales are both zero for tokens of other devices' shards
    wide_rows = embed(tokens, values, first_row=first_row).astype(jnp.float32)
    row_scales = embed(
        tokens, scale[:, None], first_row=first_row, scale=embed_scale(context.model, dtype, step.inputs[1])
    )
    return (wide_rows * row_scales).astype(dtype)


STEPS = {"quantised_embed": quantised_embed}
