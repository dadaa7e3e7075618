"""The loss head: statistics of logits, the loss from them, and the cotangents."""

from typing import Any

import jax

from meshwright.algebra.steps import Step
from meshwright.nn import loss_head as head
from meshwright.nn.collectives import first_index
from meshwright.nn.context import Context


def facts(step: Step, position: int, value: jax.Array) -> dict[str, Any]:
    """First row of the vocabulary on this device, from the step's input that has V, and the cap of the logits."""
    array = step.inputs[position]
    first_row = first_index(array.axes_of("V"), value.shape[array.dims.index("V")])
    return {"first_row": first_row, "softcap": step.details.softcap}


def logits_statistics(context: Context, step: Step, logits: jax.Array, labels: jax.Array) -> head.Statistics:
    """Peak, sum of exponentials and picked logit of each token over the local part of V."""
    return head.logits_statistics(logits, labels, **facts(step, 0, logits))


def rescale(context: Context, step: Step, total: jax.Array, local_peak: jax.Array, peak: jax.Array) -> jax.Array:
    """A local sum of exponentials as one of the whole vocabulary's peak."""
    return head.rescale(total, local_peak, peak)


def sum_loss(context: Context, step: Step, *given: jax.Array) -> jax.Array:
    """The loss of the local tokens."""
    return head.sum_loss(*given, z_loss=step.details.z_loss)


def sum_loss_backward(context: Context, step: Step, *given: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cotangents of the sums of exponentials and of the picked logits."""
    return head.sum_loss_backward(*given, z_loss=step.details.z_loss)


def logits_backward(context: Context, step: Step, *given: jax.Array) -> jax.Array:
    """Cotangent of the logits."""
    logits, labels, _, peak, dscaled, dpicked = given
    return head.logits_backward(logits, labels, peak, dscaled, dpicked, **facts(step, 0, logits))


STEPS = {
    "logits_statistics": logits_statistics,
    "logits_backward": logits_backward,
    "rescale": rescale,
    "sum_loss": sum_loss,
    "sum_loss_backward": sum_loss_backward,
}
