"""Look-up of rows in the part of a table that a device holds, and the gradient of the table."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from meshwright.algebra.steps import Step
from meshwright.nn.collectives import first_index
from meshwright.nn.context import Context
from meshwright.spec.model import Model


def embed_scale(model: Model, dtype: Any) -> float:
    """sqrt(D) rounded to the dtype of the weights, as it was when they were trained (gemma); 1 for others."""
    return float(np.asarray(model.d_model**0.5, dtype)) if model.embed_scale else 1.0


def embed(
    tokens: Int[Array, "B T"], table: Float[Array, "V D"], *, first_row: Int[Array, ""] | int, scale: float = 1.0
) -> Float[Array, "B T D"]:
    """Rows of the part of the table that starts at ``first_row``, times ``scale``; zeros for tokens outside of it."""
    local, inside = _local_rows(tokens, first_row, table.shape[0])
    rows = jnp.take(table, jnp.where(inside, local, 0), axis=0)
    return jnp.where(inside[..., None], rows * scale if scale != 1 else rows, jnp.zeros((), rows.dtype))


def embed_backward(
    tokens: Int[Array, "B T"],
    dout: Float[Array, "B T D"],
    *,
    first_row: Int[Array, ""] | int,
    num_rows: int,
    scale: float = 1.0,
) -> Float[Array, "V D"]:
    """Cotangents added up per row of the part of the table, in float32 as long as they are added."""
    local, inside = _local_rows(tokens, first_row, num_rows)
    # An index behind the end is dropped; a negative one would count from the end.
    at = jnp.where(inside, local, num_rows)
    table = jnp.zeros((num_rows, dout.shape[-1]), jnp.float32)
    return (table.at[at].add(dout.astype(jnp.float32), mode="drop") * scale).astype(dout.dtype)


def _local_rows(tokens: Array, first_row: Array | int, num_rows: int) -> tuple[Array, Array]:
    """Rows counted from the first one here, and which of them are here."""
    local = tokens - first_row
    return local, (local >= 0) & (local < num_rows)


def _embed(context: Context, step: Step, tokens: jax.Array, table: jax.Array) -> jax.Array:
    array = step.inputs[1]
    first_row = first_index(array.axes_of(array.dims[0]), table.shape[0])
    return embed(tokens, table, first_row=first_row, scale=embed_scale(context.model, table.dtype))


def _embed_backward(context: Context, step: Step, tokens: jax.Array, dout: jax.Array) -> jax.Array:
    rows = step.result.dims[0]
    num_rows = context.local_size(step.result, rows)
    return embed_backward(
        tokens,
        dout,
        first_row=first_index(step.result.axes_of(rows), num_rows),
        num_rows=num_rows,
        scale=embed_scale(context.model, dout.dtype),
    )


STEPS = {"embed": _embed, "embed_backward": _embed_backward}
