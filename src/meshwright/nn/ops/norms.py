"""Norms of rows, forward and backward, in float32 whatever the dtype of the stream.

Families differ in what the learned scale means and in where the result goes back to the stream's dtype; in float32
they are the same.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from meshwright.spec.model import Model


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


LATENT_NORM_EPS = 1e-6
LATENT_NORMS = ("q_a_norm", "kv_a_norm")
"""Weights of the norms inside latent attention."""


def _whole_scale(scale: Array, form: RmsForm) -> Array:
    wide = scale.astype(jnp.float32)
    return 1.0 + wide if form.unit_offset else wide


def _over_rows(vector: Array, x: Array) -> Array:
    """A vector over the last dim, with the dims of ``x`` in front: ranks are never promoted silently."""
    return vector.reshape((1,) * (x.ndim - 1) + vector.shape)


def rms_norm(x: Float[Array, "*rows D"], scale: Float[Array, " D"], form: RmsForm) -> Float[Array, "*rows D"]:
    """``x / sqrt(mean(x**2) + eps) * scale`` over the last dim."""
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + form.eps)
    if form.wide_scale:
        return (normed * _over_rows(_whole_scale(scale, form), x)).astype(x.dtype)
    return normed.astype(x.dtype) * _over_rows(_whole_scale(scale, form).astype(x.dtype), x)


def rms_norm_backward(
    dout: Float[Array, "*rows D"], x: Float[Array, "*rows D"], scale: Float[Array, " D"], form: RmsForm
) -> tuple[Float[Array, "*rows D"], Float[Array, " D"]]:
    """Cotangents of x and of the scale.

    With n the normed row and g = dout * scale: dx = (g - n mean(g n)) / rms, dscale = sum over rows of dout * n.
    """
    wide, out = x.astype(jnp.float32), dout.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + form.eps)
    normed = wide * inverse
    scaled = out * _over_rows(_whole_scale(scale, form), x)
    dx = inverse * (scaled - normed * jnp.mean(scaled * normed, axis=-1, keepdims=True))
    return dx.astype(x.dtype), _sum_rows(out * normed).astype(scale.dtype)


def layer_norm(
    x: Float[Array, "*rows D"], scale: Float[Array, " D"], bias: Float[Array, " D"], *, eps: float
) -> Float[Array, "*rows D"]:
    """``(x - mean(x)) / sqrt(var(x) + eps) * scale + bias`` over the last dim."""
    normed, _ = _standardised(x, eps)
    return (normed * _over_rows(scale, x) + _over_rows(bias, x)).astype(x.dtype)


def layer_norm_backward(
    dout: Float[Array, "*rows D"], x: Float[Array, "*rows D"], scale: Float[Array, " D"], *, eps: float
) -> tuple[Float[Array, "*rows D"], Float[Array, " D"], Float[Array, " D"]]:
    """Cotangents of x, scale and bias; with g = dout * scale, dx = (g - mean(g) - n mean(g n)) / std."""
    normed, inverse = _standardised(x, eps)
    out = dout.astype(jnp.float32)
    scaled = out * _over_rows(scale.astype(jnp.float32), x)
    mean = jnp.mean(scaled, axis=-1, keepdims=True)
    dx = inverse * (scaled - mean - normed * jnp.mean(scaled * normed, axis=-1, keepdims=True))
    dscale, dbias = _sum_rows(out * normed), _sum_rows(out)
    return dx.astype(x.dtype), dscale.astype(scale.dtype), dbias.astype(scale.dtype)


def _standardised(x: Array, eps: float) -> tuple[Array, Array]:
    """Rows of mean 0 and variance 1 in float32, and what they were multiplied by."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    inverse = lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    return centred * inverse, inverse


def _sum_rows(x: Array) -> Array:
    return jnp.sum(x, axis=tuple(range(x.ndim - 1)))
