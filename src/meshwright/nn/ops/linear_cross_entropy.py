"""The loss head on one device: cross entropy from statistics of the logits, and the way back, in float32.

Two forms. Where the vocabulary is split over devices, each makes the statistics of its own part of the logits, from
``first_row`` on, which are put together before the loss, and makes the logits again on the way back. Where it is whole,
`fused_head` makes the loss and the cotangents from the same logits, chunk by chunk: three products instead of four.

Per token the loss is ``lse - logit[label]`` with ``lse = log(sum(exp(logits)))``, plus ``z_loss * lse**2``. A label of
-1 counts nothing.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from meshwright.algebra.steps import Step
from meshwright.nn.activations import capped
from meshwright.nn.collectives import first_index, own_entries
from meshwright.nn.context import Context
from meshwright.nn.ops import of_arrays

PerToken = Float[Array, "B T"]
Labels = Int[Array, "B T"]
FirstRow = Int[Array, ""] | int
Statistics = tuple[PerToken, PerToken, PerToken]


def logits_statistics(
    logits: Float[Array, "B T V"], labels: Labels, *, first_row: FirstRow, softcap: float = 0.0
) -> Statistics:
    """Per token over the local part of V: largest logit, sum of exp(logit - largest), the label's logit or 0."""
    logits = capped(logits, softcap)
    peak = jnp.max(logits, axis=-1)
    total = jnp.sum(jnp.exp(logits - peak[..., None]), axis=-1)
    local, inside = own_entries(labels, first_row, logits.shape[-1])
    found = jnp.take_along_axis(logits, local[..., None], axis=-1)[..., 0]
    return peak, total, jnp.where(inside, found, 0.0)


def rescale(total: PerToken, local_peak: PerToken, peak: PerToken) -> PerToken:
    """A sum of exp(logit - local peak) as one of exp(logit - peak)."""
    return total * jnp.exp(local_peak - peak)


def sum_loss(
    peak: PerToken, scaled: PerToken, picked: PerToken, labels: Labels, *, z_loss: float = 0.0
) -> Float[Array, ""]:
    """The loss summed over the local tokens that have a label."""
    lse = jnp.log(scaled) + peak
    return jnp.sum(jnp.where(labels >= 0, lse - picked + z_loss * lse**2, 0.0))


def sum_loss_backward(
    dloss: Float[Array, ""], peak: PerToken, scaled: PerToken, labels: Labels, *, z_loss: float = 0.0
) -> tuple[PerToken, PerToken]:
    """Cotangents of the sums of exponentials and of the picked logits."""
    counted = jnp.where(labels >= 0, dloss, 0.0)
    lse = jnp.log(scaled) + peak
    return counted * (1 + 2 * z_loss * lse) / scaled, -counted


def logits_backward(
    logits: Float[Array, "B T V"],
    labels: Labels,
    peak: PerToken,
    dscaled: PerToken,
    dpicked: PerToken,
    *,
    first_row: FirstRow,
    softcap: float = 0.0,
) -> Float[Array, "B T V"]:
    """``dscaled * exp(logit - peak)``, and ``dpicked`` at the label, through the cap."""
    soft = capped(logits, softcap)
    at = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == (labels - first_row)[..., None]
    found = dscaled[..., None] * jnp.exp(soft - peak[..., None]) + jnp.where(at, dpicked[..., None], 0.0)
    return found * (1 - (soft / softcap) ** 2) if softcap else found


def facts(step: Step, position: int, value: jax.Array) -> dict[str, Any]:
    """First row of the vocabulary on this device, from the step's input that has V, and the cap of the logits."""
    array = step.inputs[position]
    first_row = first_index(array.axes_of("V"), value.shape[array.dims.index("V")])
    return {"first_row": first_row, "softcap": step.details.softcap}


def _logits_backward(context: Context, step: Step, logits: jax.Array, labels: jax.Array, *rows: jax.Array) -> jax.Array:
    _, *statistics = rows  # the local peak says only which logits to make again
    return logits_backward(logits, labels, *statistics, **facts(step, 0, logits))


STEPS = {
    "logits_statistics": lambda context, step, logits, labels: logits_statistics(
        logits, labels, **facts(step, 0, logits)
    ),
    "logits_backward": _logits_backward,
    "rescale": of_arrays(rescale),
    "sum_loss": lambda context, step, *given: sum_loss(*given, z_loss=step.details.z_loss),
    "sum_loss_backward": lambda context, step, *given: sum_loss_backward(*given, z_loss=step.details.z_loss),
}
