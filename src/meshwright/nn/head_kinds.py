"""Steps of the loss head: statistics of logits, the loss from them, and the way back."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.steps import Step
from meshwright.nn import ops
from meshwright.nn.collectives import first_index
from meshwright.nn.context import Context


def _first_row(array: ShardedArray, value: jax.Array) -> Any:
    return first_index(array.axes_of("V"), value.shape[array.dims.index("V")])


def _wide(step: Step, position: int, table: jax.Array) -> jax.Array:
    return table if step.inputs[position].dims == ("D", "V") else table.T


def logits_statistics(context: Context, step: Step, logits: jax.Array, labels: jax.Array) -> ops.Statistics:
    return ops.logits_statistics(logits, labels, first_row=_first_row(step.inputs[0], logits))


def chunked_logits_statistics(
    context: Context, step: Step, x: jax.Array, table: jax.Array, labels: jax.Array
) -> ops.Statistics:
    first_row = _first_row(step.inputs[1], table)
    return ops.chunked_logits_statistics(x, _wide(step, 1, table), labels, first_row=first_row)


def rescale(context: Context, step: Step, total: jax.Array, local_peak: jax.Array, peak: jax.Array) -> jax.Array:
    return ops.rescale(total, local_peak, peak)


def sum_loss(
    context: Context, step: Step, peak: jax.Array, scaled: jax.Array, picked: jax.Array, labels: jax.Array
) -> jax.Array:
    return jnp.sum(jnp.where(labels >= 0, jnp.log(scaled) + peak - picked, 0.0))


def sum_loss_backward(
    context: Context, step: Step, dloss: jax.Array, peak: jax.Array, scaled: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array]:
    counted = jnp.where(labels >= 0, dloss, 0.0)
    return counted / scaled, -counted


def logits_backward(context: Context, step: Step, *given: jax.Array) -> jax.Array:
    logits, labels, _, peak, dscaled, dpicked = given
    local = labels - _first_row(step.inputs[0], logits)
    column = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    at = column == local[..., None]
    return dscaled[..., None] * jnp.exp(logits - peak[..., None]) + jnp.where(at, dpicked[..., None], 0.0)


def chunked_logits_backward(context: Context, step: Step, *given: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, table, labels, local_peak, peak, dscaled, dpicked = given

    def forward(x: jax.Array, table: jax.Array) -> tuple[jax.Array, jax.Array]:
        first_row = _first_row(step.inputs[1], table)
        _, total, picked = ops.chunked_logits_statistics(x, _wide(step, 1, table), labels, first_row=first_row)
        return total, picked

    _, vjp = jax.vjp(forward, x, table)
    return vjp((dscaled * jnp.exp(local_peak - peak), dpicked))


HEAD_KINDS: dict[str, Callable[..., Any]] = {
    "logits_statistics": logits_statistics,
    "logits_backward": logits_backward,
    "chunked_logits_statistics": chunked_logits_statistics,
    "chunked_logits_backward": chunked_logits_backward,
    "rescale": rescale,
    "sum_loss": sum_loss,
    "sum_loss_backward": sum_loss_backward,
}
