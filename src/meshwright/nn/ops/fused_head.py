"""The loss head in chunks of positions, so that B x T x V logits never exist at once.

`fused_head` joins both passes: it computes the loss and its gradients from the same logits.
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
    LogitBias,
    Statistics,
    head_arguments,
    logits_backward,
    logits_statistics,
    sum_loss,
    sum_loss_backward,
)

VocabularyTable = Float[Array, "D V"]
NUM_ROWS = 3
"""Per-token inputs of `logits_backward` besides labels: the largest logit and two cotangents."""
_Carry = TypeVar("_Carry")
_Result = TypeVar("_Result")


def chunk_length(batch: int, length: int) -> int:
    """Returns the positions per chunk: as equal as possible, at most `CHUNK_TOKENS` tokens, at least one position."""
    num_chunks = min(length, max(1, math.ceil(batch * length / CHUNK_TOKENS)))
    return math.ceil(length / num_chunks)


def _over_chunks(
    one: Callable[[_Carry, Any], tuple[_Carry, _Result]], start: _Carry, *arrays: Array
) -> tuple[_Carry, _Result]:
    """Scans ``one`` over chunks of positions of the arrays and concatenates its results.

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


def chunked_logits_statistics(
    x: ResidualStream, table: VocabularyTable, labels: Labels, *bias: LogitBias, **head: Any
) -> Statistics:
    """Returns `logits_statistics` of the logits ``x * table``; ``head`` are the `head_arguments`."""

    def one(_: None, chunk_arrays: tuple[Array, Array]) -> tuple[None, Statistics]:
        x_chunk, labels_chunk = chunk_arrays
        return None, logits_statistics(_logits(x_chunk, table), labels_chunk, *bias, **head)

    statistics: Statistics = _over_chunks(one, None, x, labels)[1]
    return statistics


def _logits(x: Array, table: Array) -> Array:
    return contract("btd,dv->btv", x, table, dtype=jnp.float32)


def _cotangents(x: Array, table: Array, dlogits: Array) -> tuple[Array, Array, Array]:
    """Returns the cotangents of the activations and, in float32, of the table and of a bias of the logits."""
    narrow_dlogits = dlogits.astype(x.dtype)
    dtable = contract("btd,btv->dv", x, narrow_dlogits, dtype=jnp.float32)
    return contract("btv,dv->btd", narrow_dlogits, table), dtable, jnp.sum(dlogits, axis=(0, 1))


def _zero_sums(*arrays: Array) -> list[Array]:
    return [jnp.zeros(array.shape, jnp.float32) for array in arrays]


def chunked_logits_backward(
    x: ResidualStream,
    table: VocabularyTable,
    labels: Labels,
    *given: Array,
    **head: Any,
) -> tuple[Array, ...]:
    """Returns cotangents of the activations, the table and the bias if there is one; ``given`` are the per-token inputs
    of `logits_backward`, then the bias; ``head`` the `head_arguments`."""
    rows, bias = given[:NUM_ROWS], given[NUM_ROWS:]

    def one(sums: list[Array], chunk_arrays: tuple[Array, ...]) -> tuple[list[Array], Array]:
        x_chunk, *rows = chunk_arrays
        dlogits = logits_backward(_logits(x_chunk, table), *rows, *bias, **head)
        dx, *chunk_sums = _cotangents(x_chunk, table, dlogits)
        return [total + part for total, part in zip(sums, chunk_sums, strict=False)], dx

    sums, dx = _over_chunks(one, _zero_sums(table, *bias), x, labels, *rows)
    return dx, *(total.astype(table.dtype) for total in sums)


def fused_head(
    x: ResidualStream, table: VocabularyTable, labels: Labels, *bias: LogitBias, z_loss: float = 0.0, **head: Any
) -> tuple[Array, ...]:
    """Returns the summed loss and its gradients for the activations, the whole table and a bias if given.

    All use the same logits. Under `jax.jit` a caller pays only for the results that it uses.
    """
    head = {"first_row": 0, **head}

    def one(carry: list[Array], chunk_arrays: tuple[Array, Array]) -> tuple[list[Array], Array]:
        x_chunk, labels_chunk = chunk_arrays
        logits = _logits(x_chunk, table)
        peak, exp_sum, label_logits = logits_statistics(logits, labels_chunk, *bias, **head)
        loss_chunk = sum_loss(peak, exp_sum, label_logits, labels_chunk, z_loss=z_loss)
        slopes = sum_loss_backward(jnp.float32(1), peak, exp_sum, labels_chunk, z_loss=z_loss)
        dlogits = logits_backward(logits, labels_chunk, peak, *slopes, *bias, **head)
        dx, *chunk_sums = _cotangents(x_chunk, table, dlogits)
        return [total + part for total, part in zip(carry, (loss_chunk, *chunk_sums), strict=False)], dx

    (loss, *sums), dx = _over_chunks(one, [jnp.zeros((), jnp.float32), *_zero_sums(table, *bias)], x, labels)
    return loss, dx, *(total.astype(table.dtype) for total in sums)


def _as_dv(step: Step, table: Array) -> Array:
    """Transposes a table or its gradient, if the step stores [V, D], between that and [D, V]; else unchanged."""
    return table if step.inputs[1].dims == ("D", "V") else table.T


def _statistics(context: Context, step: Step, x: Array, table: Array, *given: Array) -> Statistics:
    return chunked_logits_statistics(x, _as_dv(step, table), *given, **head_arguments(context, step, 1, table))


def _backward(context: Context, step: Step, *given: Array) -> tuple[Array, ...]:
    x, table, *others = given
    head_options = head_arguments(context, step, 1, table)
    dx, dtable, *dbias = chunked_logits_backward(x, _as_dv(step, table), *others, **head_options)
    return (dx, _as_dv(step, dtable), *dbias)[: len(step.results)]


def _fused(context: Context, step: Step, x: Array, table: Array, *given: Array) -> tuple[Array, ...]:
    head_options = head_arguments(context, step, 1, table)
    loss, dx, dtable, *dbias = fused_head(x, _as_dv(step, table), *given, z_loss=step.details.z_loss, **head_options)
    return (loss, dx, _as_dv(step, dtable), *dbias)[: len(step.results)]


STEPS = {
    "chunked_logits_statistics": _statistics,
    "chunked_logits_backward": _backward,
    "fused_head": _fused,
    "scale": of_arrays(lambda slope, cotangent: (cotangent * slope).astype(slope.dtype)),
}
