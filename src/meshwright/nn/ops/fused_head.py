"""The loss head in chunks of positions, so that B x T x V logits never exist at once.

`fused_head` joins both passes: it computes the loss and its slopes from the same logits.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meshwright.algebra.ops.fused_head import CHUNK_TOKENS
from meshwright.algebra.steps import Step
from meshwright.nn.context import Context
from meshwright.nn.contract import contract
from meshwright.nn.experts.slots import ResidualStream
from meshwright.nn.ops import of_arrays
from meshwright.nn.ops.linear_cross_entropy import (
    Labels,
    PerToken,
    Statistics,
    head_arguments,
    logits_backward,
    logits_statistics,
    sum_loss,
    sum_loss_backward,
)

VocabularyTable = Float[Array, "D V"]
_Carry = TypeVar("_Carry")
_Result = TypeVar("_Result")


def chunk_length(batch: int, length: int) -> int:
    """Returns the positions of a chunk: as equal as possible, at most `CHUNK_TOKENS` tokens, at least one position."""
    num_chunks = min(length, max(1, math.ceil(batch * length / CHUNK_TOKENS)))
    return math.ceil(length / num_chunks)


def _over_chunks(
    one: Callable[[_Carry, Any], tuple[_Carry, _Result]], start: _Carry, *arrays: Array
) -> tuple[_Carry, _Result]:
    """Scans ``one`` over chunks of the arrays and concatenates its results.

    The last chunk is padded with zeros, its labels with -1, which add nothing.
    """
    batch, seq_len = arrays[0].shape[:2]
    chunk_len = chunk_length(batch, seq_len)

    def cut(array: Array) -> Array:
        row_shape = array.shape[2:]
        if num_missing := -seq_len % chunk_len:
            fill_value = -1 if jnp.issubdtype(array.dtype, jnp.integer) else 0
            array = jnp.pad(array, ((0, 0), (0, num_missing), *((0, 0) for _ in row_shape)), constant_values=fill_value)
        return jnp.moveaxis(array.reshape(batch, -1, chunk_len, *row_shape), 1, 0)

    def joined(chunks: Array) -> Array:
        batch_first = jnp.moveaxis(chunks, 0, 1)
        return batch_first.reshape(batch, -1, *batch_first.shape[3:])[:, :seq_len]

    carry, chunks = jax.lax.scan(one, start, tuple(cut(array) for array in arrays))
    return carry, jax.tree.map(joined, chunks)


def chunked_logits_statistics(x: ResidualStream, table: VocabularyTable, labels: Labels, **head: Any) -> Statistics:
    """Returns the statistics of the logits ``x * table``; ``head`` are the `head_arguments`."""

    def one(_: None, chunk_arrays: tuple[Array, Array]) -> tuple[None, Statistics]:
        x_chunk, labels_chunk = chunk_arrays
        return None, logits_statistics(_logits(x_chunk, table), labels_chunk, **head)

    statistics: Statistics = _over_chunks(one, None, x, labels)[1]
    return statistics


def _logits(x: Array, table: Array) -> Array:
    return contract("btd,dv->btv", x, table, dtype=jnp.float32)


def _cotangents(x: Array, table: Array, dlogits: Array) -> tuple[Array, Array]:
    """Returns the cotangents of the stream and, in float32, of the table."""
    narrow_dlogits = dlogits.astype(x.dtype)
    return contract("btv,dv->btd", narrow_dlogits, table), contract("btd,btv->dv", x, narrow_dlogits, dtype=jnp.float32)


def chunked_logits_backward(
    x: ResidualStream,
    table: VocabularyTable,
    labels: Labels,
    *rows: PerToken,
    **head: Any,
) -> tuple[ResidualStream, VocabularyTable]:
    """Returns cotangents of the stream and the table; ``rows`` are the per-token inputs of `logits_backward`, ``head``
    the `head_arguments`."""

    def one(dtable: Array, chunk_arrays: tuple[Array, ...]) -> tuple[Array, Array]:
        x_chunk, *rows = chunk_arrays
        dlogits = logits_backward(_logits(x_chunk, table), *rows, **head)
        dx, dtable_chunk = _cotangents(x_chunk, table, dlogits)
        return dtable + dtable_chunk, dx

    dtable, dx = _over_chunks(one, jnp.zeros(table.shape, jnp.float32), x, labels, *rows)
    return dx, dtable.astype(table.dtype)


def fused_head(
    x: ResidualStream, table: VocabularyTable, labels: Labels, *, z_loss: float = 0.0, **head: Any
) -> tuple[Float[Array, ""], ResidualStream, VocabularyTable]:
    """Returns the summed loss and its slopes in the stream and in the whole table.

    All three use the same logits. Under `jax.jit` a caller pays only for the results that it uses.
    """
    head = {"first_row": 0, **head}

    def one(carry: tuple[Array, Array], chunk_arrays: tuple[Array, Array]) -> tuple[tuple[Array, Array], Array]:
        (loss, dtable), (x_chunk, labels_chunk) = carry, chunk_arrays
        logits = _logits(x_chunk, table)
        peak, exp_sum, label_logits = logits_statistics(logits, labels_chunk, **head)
        loss_chunk = sum_loss(peak, exp_sum, label_logits, labels_chunk, z_loss=z_loss)
        slopes = sum_loss_backward(jnp.float32(1), peak, exp_sum, labels_chunk, z_loss=z_loss)
        dlogits = logits_backward(logits, labels_chunk, peak, *slopes, **head)
        dx, dtable_chunk = _cotangents(x_chunk, table, dlogits)
        return (loss + loss_chunk, dtable + dtable_chunk), dx

    zero_sums = (jnp.zeros((), jnp.float32), jnp.zeros(table.shape, jnp.float32))
    (loss, dtable), dx = _over_chunks(one, zero_sums, x, labels)
    return loss, dx, dtable.astype(table.dtype)


def _as_dv(step: Step, table: Array) -> Array:
    """Transposes a table or its gradient to [D, V], or back, if the step has it as [V, D]."""
    return table if step.inputs[1].dims == ("D", "V") else table.T


def _statistics(context: Context, step: Step, x: Array, table: Array, labels: Array) -> Statistics:
    return chunked_logits_statistics(x, _as_dv(step, table), labels, **head_arguments(context, step, 1, table))


def _backward(context: Context, step: Step, *given: Array) -> tuple[Array, ...]:
    x, table, *per_token = given
    dx, dtable = chunked_logits_backward(x, _as_dv(step, table), *per_token, **head_arguments(context, step, 1, table))
    return (dx, _as_dv(step, dtable))[: len(step.results)]


def _fused(context: Context, step: Step, x: Array, table: Array, labels: Array) -> tuple[Array, ...]:
    head_options = head_arguments(context, step, 1, table)
    loss, dx, dtable = fused_head(x, _as_dv(step, table), labels, z_loss=step.details.z_loss, **head_options)
    return (loss, dx, _as_dv(step, dtable))[: len(step.results)]


STEPS = {
    "chunked_logits_statistics": _statistics,
    "chunked_logits_backward": _backward,
    "fused_head": _fused,
    "scale": of_arrays(lambda slope, cotangent: (cotangent * slope).astype(slope.dtype)),
}
