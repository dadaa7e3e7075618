"""The loss head with both passes joined: the loss and its slopes from the same logits."""

import jax

from meshwright.algebra.steps import Step
from meshwright.nn import loss_head as head
from meshwright.nn.context import Context
from meshwright.nn.ops.linear_cross_entropy import wide_table


def fused_head(
    context: Context, step: Step, x: jax.Array, table: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The loss of the local tokens and its slopes in the stream and in the table."""
    wide = wide_table(step, 1, table)
    softcap, z_loss = step.details.softcap, step.details.z_loss
    loss, dx, dwide = head.fused_head(x, wide, labels, softcap=softcap, z_loss=z_loss)
    return loss, dx, dwide if wide is table else dwide.T


def scale(context: Context, step: Step, slope: jax.Array, cotangent: jax.Array) -> jax.Array:
    """A slope times the cotangent of what it is the slope of."""
    return (cotangent * slope).astype(slope.dtype)


STEPS = {"fused_head": fused_head, "scale": scale}
