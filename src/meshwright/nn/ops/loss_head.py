"""Steps of the loss head: statistics of logits, the loss from them, and the way back."""

from collections.abc import Callable
from typing import Any

import jax

from meshwright.algebra.steps import Step
from meshwright.nn.collectives import first_index
from meshwright.nn.context import Context
from meshwright.nn.ops import head


def _attribute(step: Step, name: str) -> float:
    return float(dict(step.attributes).get(name, 0.0))


def _facts(step: Step, position: int, value: jax.Array) -> dict[str, Any]:
    """First row of the vocabulary on this device, from the step's input that has V, and the cap of the logits."""
    array = step.inputs[position]
    first_row = first_index(array.axes_of("V"), value.shape[array.dims.index("V")])
    return {"first_row": first_row, "softcap": _attribute(step, "softcap")}


def _wide(step: Step, position: int, table: jax.Array) -> jax.Array:
    return table if step.inputs[position].dims == ("D", "V") else table.T


def logits_statistics(context: Context, step: Step, logits: jax.Array, labels: jax.Array) -> head.Statistics:
    """Peak, sum of exponentials and picked logit of each token over the local part of V."""
    return head.logits_statistics(logits, labels, **_facts(step, 0, logits))


def chunked_logits_statistics(
    context: Context, step: Step, x: jax.Array, table: jax.Array, labels: jax.Array
) -> head.Statistics:
    """The same from the stream and the table, chunk by chunk."""
    return head.chunked_logits_statistics(x, _wide(step, 1, table), labels, **_facts(step, 1, table))


def rescale(context: Context, step: Step, total: jax.Array, local_peak: jax.Array, peak: jax.Array) -> jax.Array:
    """A local sum of exponentials as one of the whole vocabulary's peak."""
    return head.rescale(total, local_peak, peak)


def sum_loss(context: Context, step: Step, *given: jax.Array) -> jax.Array:
    """The loss of the local tokens."""
    return head.sum_loss(*given, z_loss=_attribute(step, "z_loss"))


def sum_loss_backward(context: Context, step: Step, *given: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cotangents of the sums of exponentials and of the picked logits."""
    return head.sum_loss_backward(*given, z_loss=_attribute(step, "z_loss"))


def logits_backward(context: Context, step: Step, *given: jax.Array) -> jax.Array:
    """Cotangent of the logits."""
    logits, labels, _, peak, dscaled, dpicked = given
    return head.logits_backward(logits, labels, peak, dscaled, dpicked, **_facts(step, 0, logits))


def chunked_logits_backward(context: Context, step: Step, *given: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cotangents of the stream and of the table, chunk by chunk."""
    x, table, labels, _, peak, dscaled, dpicked = given
    wide = _wide(step, 1, table)
    dx, dwide = head.chunked_logits_backward(x, wide, labels, peak, dscaled, dpicked, **_facts(step, 1, table))
    return dx, dwide if wide is table else dwide.T


def fused_head(
    context: Context, step: Step, x: jax.Array, table: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The loss of the local tokens and its slopes in the stream and in the table."""
    wide = _wide(step, 1, table)
    softcap, z_loss = _attribute(step, "softcap"), _attribute(step, "z_loss")
    loss, dx, dwide = head.fused_head(x, wide, labels, softcap=softcap, z_loss=z_loss)
    return loss, dx, dwide if wide is table else dwide.T


def scale(context: Context, step: Step, cotangent: jax.Array, slope: jax.Array) -> jax.Array:
    """A slope times the cotangent of what it is the slope of."""
    return (cotangent * slope).astype(slope.dtype)


HEAD_KINDS: dict[str, Callable[..., Any]] = {
    "logits_statistics": logits_statistics,
    "logits_backward": logits_backward,
    "chunked_logits_statistics": chunked_logits_statistics,
    "chunked_logits_backward": chunked_logits_backward,
    "fused_head": fused_head,
    "scale": scale,
    "rescale": rescale,
    "sum_loss": sum_loss,
    "sum_loss_backward": sum_loss_backward,
}
"""Kind -> its function of (context, step, blocks of the inputs)."""
