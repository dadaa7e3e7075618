"""Embedding lookup in a device's shard of a table, and the gradient of the shard."""

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Num

from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.steps import Step
from meshwright.nn.collectives import first_index, own_entries
from meshwright.nn.context import Context
from meshwright.nn.contract import rows_at
from meshwright.nn.order import zeros_after
from meshwright.spec.model import Model


def embed_scale(model: Model, dtype: DTypeLike, table: ShardedArray) -> float:
    """Returns the factor on rows: sqrt(D), or sqrt(Dl) for a table of layers, rounded to ``dtype`` as in training, if
    the model scales embeddings; else its multiplier. 1 for tables of positions."""
    if table.dims[0] not in ("V", "Vl"):
        return 1.0
    return float(np.asarray(model.dims[table.dims[-1]] ** 0.5, dtype)) if model.embed_scale else model.embed_multiplier


def embed(
    tokens: Int[Array, "B T"], table: Num[Array, "V D"], *, first_row: Int[Array, ""] | int, scale: float = 1.0
) -> Num[Array, "B T D"]:
    """Looks up rows in a shard that begins at row ``first_row``, times ``scale``; tokens of other shards get zeros."""
    local_rows, is_own = own_entries(tokens, first_row, table.shape[0])
    rows = rows_at(table, local_rows)
    return jnp.where(is_own[..., None], rows * scale if scale != 1 else rows, jnp.zeros((), rows.dtype))


def embed_backward(
    tokens: Int[Array, "B T"],
    dout: Float[Array, "B T D"],
    *,
    first_row: Int[Array, ""] | int,
    num_rows: int,
    scale: float = 1.0,
) -> Float[Array, "V D"]:
    """Returns the gradient of the shard: cotangents times ``scale``, summed per row in float32."""
    # An index past the end is dropped; a negative one would count from the end.
    row_indices, _ = own_entries(tokens, first_row, num_rows, elsewhere=num_rows)
    zero_table = zeros_after((num_rows, dout.shape[-1]), jnp.float32, dout)
    return (zero_table.at[row_indices].add(dout.astype(jnp.float32), mode="drop") * scale).astype(dout.dtype)


def rows_of(model: Model, tokens: Int[Array, "B T"], table: ShardedArray) -> Int[Array, "B T"]:
    """Returns the rows of tokens in a table; row 0 for tokens beyond the end of a layer's own table."""
    return jnp.where(tokens < model.layer_vocab_size, tokens, 0) if table.dims[0] == "Vl" else tokens


def _first_row(context: Context, table: ShardedArray, num_rows: int) -> Int[Array, ""] | int:
    """Returns the token or position number of the shard's first row; tables of positions may have an offset."""
    offset = context.model.position_offset if table.dims[0] in ("P", "Ps") else 0
    return first_index(table.axes[0], num_rows) - offset


def _embed(context: Context, step: Step, tokens: Array, table: Array) -> Array:
    first_row = _first_row(context, step.inputs[1], table.shape[0])
    tokens = rows_of(context.model, tokens, step.inputs[1])
    return embed(tokens, table, first_row=first_row, scale=embed_scale(context.model, table.dtype, step.inputs[1]))


def _embed_backward(context: Context, step: Step, tokens: Array, dout: Array) -> Array:
    num_rows = context.local_size(step.result, step.result.dims[0])
    first_row = _first_row(context, step.result, num_rows)
    scale, tokens = embed_scale(context.model, dout.dtype, step.result), rows_of(context.model, tokens, step.result)
    return embed_backward(tokens, dout, first_row=first_row, num_rows=num_rows, scale=scale)


STEPS = {"embed": _embed, "embed_backward": _embed_backward}
