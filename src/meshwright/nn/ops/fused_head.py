"""The loss head in chunks, and with both passes joined: the loss and its slopes from the same logits."""

import jax

from meshwright.algebra.steps import Step
from meshwright.nn import loss_head as head
from meshwright.nn.context import Context
from meshwright.nn.ops.linear_cross_entropy import facts


def _wide_table(step: Step, position: int, table: jax.Array) -> jax.Array:
    return table if step.inputs[position].dims == ("D", "V") else table.T


def chunked_logits_statistics(
    context: Context, step: Step, x: jax.Array, table: jax.Array, labels: jax.Array
) -> head.Statistics:
    """Statistics of the logits from the stream and the table, chunk by chunk."""
    return head.chunked_logits_statistics(x, _wide_table(step, 1, table), labels, **facts(step, 1, table))


def chunked_logits_backward(context: Context, step: Step, *given: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cotangents of the stream and of the table, chunk by chunk."""
    x, table, labels, _, peak, dscaled, dpicked = given
    wide = _wide_table(step, 1, table)
    dx, dwide = head.chunked_logits_backward(x, wide, labels, peak, dscaled, dpicked, **facts(step, 1, table))
    return dx, dwide if wide is table else dwide.T


def fused_head(
    context: Context, step: Step, x: jax.Array, table: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The loss of the local tokens and its slopes in the stream and in the table."""
    wide = _wide_table(step, 1, table)
    softcap, z_loss = step.details.softcap, step.details.z_loss
    loss, dx, dwide = head.fused_head(x, wide, labels, softcap=softcap, z_loss=z_loss)
    return loss, dx, dwide if wide is table else dwide.T


def scale(context: Context, step: Step, slope: jax.Array, cotangent: jax.Array) -> jax.Array:
    """A slope times the cotangent of what it is the slope of."""
    return (cotangent * slope).astype(slope.dtype)


STEPS = {
    "chunked_logits_statistics": chunked_logits_statistics,
    "chunked_logits_backward": chunked_logits_backward,
    "fused_head": fused_head,
    "scale": scale,
}
