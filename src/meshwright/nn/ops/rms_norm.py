"""RMS norm of rows, forward and backward, in float32 whatever the dtype of the stream.

Families differ in what the learned scale means and in where the result goes back to the stream's dtype; in float32
they are the same.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from meshwright.algebra.steps import Step
from meshwright.nn.context import Context
from meshwright.spec.model import Model

LATENT_NORM_EPS = 1e-6
LATENT_NORMS = ("q_a_norm", "kv_a_norm")
"""Weights of the norms inside latent attention."""


class RmsForm(NamedTuple):
    """How a family's RMS norm is meant.

    ``unit_offset``: weights are w and multiply by 1 + w. ``wide_scale``: the scale is applied in float32, before the
    row goes back to its dtype; else after.
    """

    eps: float
    unit_offset: bool = False
    wide_scale: bool = False


def rms_form(model: Model, *, latent: bool = False) -> RmsForm:
    """The form of a model's norms; ``latent`` for those of latent attention, whose eps no config holds."""
    eps = LATENT_NORM_EPS if latent else model.norm_eps
    wide = model.norm_unit_offset or model.family == "gpt_oss"
    return RmsForm(eps=eps, unit_offset=model.norm_unit_offset, wide_scale=wide)


def rms_norm(x: Float[Array, "*rows D"], scale: Float[Array, " D"], form: RmsForm) -> Float[Array, "*rows D"]:
    """``x / sqrt(mean(x**2) + eps) * scale`` over the last dim."""
    normed, _ = normed_rows(x, form.eps)
    if form.wide_scale:
        return (normed * _whole_scale(scale, x, form)).astype(x.dtype)
    return normed.astype(x.dtype) * _whole_scale(scale, x, form, x.dtype)


def rms_norm_backward(
    dout: Float[Array, "*rows D"], x: Float[Array, "*rows D"], scale: Float[Array, " D"], form: RmsForm
) -> tuple[Float[Array, "*rows D"], Float[Array, " D"]]:
    """Cotangents of x and of the scale.

    With n the normed row and g = dout * scale: dx = (g - n mean(g n)) / rms, dscale = sum over rows of dout * n.
    """
    dx, dscale = norm_backward(dout, x, _whole_scale(scale, x, form), form.eps)
    return dx, dscale.astype(scale.dtype)


def normed_rows(x: Array, eps: float, *, centred: bool = False) -> tuple[Array, Array]:
    """Rows of mean square 1 in float32, of mean 0 too if ``centred``, and what they were multiplied by."""
    wide = x.astype(jnp.float32)
    if centred:
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    inverse = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide * inverse, inverse


def norm_backward(dout: Array, x: Array, scale: Array, eps: float, *, centred: bool = False) -> tuple[Array, Array]:
    """Cotangents of rows and, in float32, of the scale that the normed rows were multiplied by."""
    normed, inverse = normed_rows(x, eps, centred=centred)
    out = dout.astype(jnp.float32)
    scaled = out * scale
    along = normed * jnp.mean(scaled * normed, axis=-1, keepdims=True)
    if centred:
        scaled = scaled - jnp.mean(scaled, axis=-1, keepdims=True)
    return (inverse * (scaled - along)).astype(x.dtype), sum_rows(out * normed)


def _whole_scale(scale: Array, x: Array, form: RmsForm, dtype: DTypeLike = jnp.float32) -> Array:
    wide = scale.astype(jnp.float32)
    return over_rows((1.0 + wide if form.unit_offset else wide).astype(dtype), x)


def over_rows(vector: Array, x: Array) -> Array:
    """A vector over the last dim, with the dims of ``x`` in front: ranks are never promoted silently."""
    return vector.reshape((1,) * (x.ndim - 1) + vector.shape)


def sum_rows(x: Array) -> Array:
    """The sum over all dims but the last."""
    return jnp.sum(x, axis=tuple(range(x.ndim - 1)))


def _form(context: Context, scale_name: str) -> RmsForm:
    return rms_form(context.model, latent=scale_name.startswith(LATENT_NORMS))


def _forward(context: Context, step: Step, x: jax.Array, scale: jax.Array) -> jax.Array:
    return rms_norm(x, scale, _form(context, step.inputs[1].name))


def _backward(context: Context, step: Step, dout: jax.Array, x: jax.Array, scale: jax.Array) -> Any:
    return rms_norm_backward(dout, x, scale, _form(context, step.inputs[2].name))


STEPS = {"rms_norm": _forward, "rms_norm_backward": _backward}
