"""The loss head on one device: cross entropy from statistics of the logits, and its backward pass, in float32.

If the vocabulary is split over devices, each computes statistics of its logits, from token ``first_row`` on, and
collectives combine them. The backward pass reads the logits; loss heads that do not keep logits are in `fused_head`.
Logits from ``vocab_size`` on belong to padding of the table: they count as minus infinity.

The loss of a token is ``lse - logit[label] + z_loss * lse**2`` with ``lse = log(sum(exp(logits)))`` of capped logits; 0
for labels below 0.
"""

import math
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
TokenLogits = Float[Array, "B T V"]
LogitBias = Float[Array, " V"]
FirstRow = Int[Array, ""] | int
Statistics = tuple[PerToken, PerToken, PerToken]


def is_token(logits: TokenLogits, first_row: FirstRow, vocab_size: int) -> Array:
    """True for the logits [B, T, V] of tokens, False for logits of padding of the table."""
    return jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) < vocab_size - first_row


def logits_statistics(
    logits: TokenLogits,
    labels: Labels,
    *bias: LogitBias,
    first_row: FirstRow,
    softcap: float = 0.0,
    vocab_size: int = 0,
) -> Statistics:
    """Returns per token, over the local part of V: largest logit, sum of exp(logit - largest), label's logit or 0. Here
    and below ``bias`` is empty, or one bias of the logits."""
    logits = capped(_biased(logits, bias), softcap)
    if vocab_size:
        # Not infinite: the largest logit of a device that has padding only would give NaN.
        logits = jnp.where(is_token(logits, first_row, vocab_size), logits, jnp.finfo(logits.dtype).min)
    peak = jnp.max(logits, axis=-1)
    exp_sum = jnp.sum(jnp.exp(logits - peak[..., None]), axis=-1)
    local_label, is_own = own_entries(labels, first_row, logits.shape[-1])
    label_logits = jnp.take_along_axis(logits, local_label[..., None], axis=-1)[..., 0]
    return peak, exp_sum, jnp.where(is_own, label_logits, 0.0)


def _biased(logits: Array, bias: tuple[Array, ...]) -> Array:
    return logits + bias[0].astype(logits.dtype)[None, None] if bias else logits


def rescale(total: PerToken, local_peak: PerToken, peak: PerToken) -> PerToken:
    """Converts a sum of exp(logit - local peak) to a sum of exp(logit - peak)."""
    return total * jnp.exp(local_peak - peak)


def sum_loss(
    peak: PerToken, scaled: PerToken, picked: PerToken, labels: Labels, *, z_loss: float = 0.0
) -> Float[Array, ""]:
    """Sums the loss over labelled tokens; ``scaled`` is the sum of exp(logit - peak), ``picked`` the label's logit."""
    lse = jnp.log(scaled) + peak
    return jnp.sum(jnp.where(labels >= 0, lse - picked + z_loss * lse**2, 0.0))


def sum_loss_backward(
    dloss: Float[Array, ""], peak: PerToken, scaled: PerToken, labels: Labels, *, z_loss: float = 0.0
) -> tuple[PerToken, PerToken]:
    """Returns the cotangents of the sums of exponentials and of the labels' logits."""
    dtoken = jnp.where(labels >= 0, dloss, 0.0)
    lse = jnp.log(scaled) + peak
    return dtoken * (1 + 2 * z_loss * lse) / scaled, -dtoken


def logits_backward(
    logits: TokenLogits,
    labels: Labels,
    peak: PerToken,
    dscaled: PerToken,
    dpicked: PerToken,
    *bias: LogitBias,
    first_row: FirstRow,
    softcap: float = 0.0,
    vocab_size: int = 0,
) -> TokenLogits:
    """Returns the cotangents of logits: ``dscaled * exp(capped - peak)``, plus ``dpicked`` at the label; all of it
    times the slope of the cap, and 0 for padding."""
    soft_logits = capped(_biased(logits, bias), softcap)
    is_label = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == (labels - first_row)[..., None]
    dlogits = dscaled[..., None] * jnp.exp(soft_logits - peak[..., None]) + jnp.where(is_label, dpicked[..., None], 0.0)
    dlogits = dlogits * (1 - (soft_logits / softcap) ** 2) if softcap else dlogits
    return jnp.where(is_token(logits, first_row, vocab_size), dlogits, 0.0) if vocab_size else dlogits


def head_arguments(context: Context, step: Step, position: int, value: Array) -> dict[str, Any]:
    """Returns ``first_row``, ``softcap`` and ``vocab_size`` (0 if V is not padded) for a step. ``value`` is the step's
    input at ``position``, which has the dim V."""
    array, vocab_size = step.inputs[position], context.model.vocab_size
    local_vocab = value.shape[array.dims.index("V")]
    is_padded = local_vocab * math.prod(context.mesh[axis] for axis in array.axes_of("V")) > vocab_size
    first_row = first_index(array.axes_of("V"), local_vocab)
    return {"first_row": first_row, "softcap": step.details.softcap, "vocab_size": vocab_size if is_padded else 0}


STEPS = {
    "logits_statistics": lambda context, step, logits, *given: logits_statistics(
        logits, *given, **head_arguments(context, step, 0, logits)
    ),
    "logits_backward": lambda context, step, logits, *given: logits_backward(
        logits, *given, **head_arguments(context, step, 0, logits)
    ),
    "rescale": of_arrays(rescale),
    "sum_loss": lambda context, step, *given: sum_loss(*given, z_loss=step.details.z_loss),
    "sum_loss_backward": lambda context, step, *given: sum_loss_backward(*given, z_loss=step.details.z_loss),
}
