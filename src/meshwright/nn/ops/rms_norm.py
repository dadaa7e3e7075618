"""RMS norm of rows, forward and backward, in float32 whatever the dtype of the activations; `layer_norm` uses its
parts.

Families differ in the meaning of the learned scale and in where the result is cast to the activations' dtype."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from meshwright.algebra.steps import Step
from meshwright.nn.context import Context
from meshwright.nn.order import sum_of_halves
from meshwright.spec.model import Model

ModelRows = Float[Array, "*rows D"]
ModelVector = Float[Array, "*heads D"]

LATENT_NORM_EPS = 1e-6
LATENT_NORM_PREFIXES = ("q_a_norm", "kv_a_norm")
"""Names of the weights of norms inside latent attention begin with these."""


class RmsForm(NamedTuple):
    """A family's variant of RMS norm.

    ``unit_offset``: the scale is 1 + the stored weight. ``wide_scale``: the scale is applied in float32, before the row
    is cast to its dtype; else after the cast. ``alike``: see `Context`.
    """

    eps: float
    unit_offset: bool = False
    wide_scale: bool = False
    alike: bool = False


def rms_form(model: Model, *, latent: bool = False) -> RmsForm:
    """Returns the variant of a model's norms; ``latent``: norms inside latent attention, whose eps is in no config."""
    eps = LATENT_NORM_EPS if latent else model.norm_eps
    has_wide_scale = model.norm_unit_offset or model.family in ("gpt_oss", "olmo2", "olmo3", "gemma3n", "gemma4")
    return RmsForm(eps=eps, unit_offset=model.norm_unit_offset, wide_scale=has_wide_scale)


def rms_norm(x: ModelRows, scale: ModelVector, form: RmsForm) -> ModelRows:
    """Returns ``x / sqrt(mean(x**2) + eps) * scale`` over the last dim; ``* (1 + scale)`` with ``unit_offset``."""
    normed, _ = normed_rows(x, form.eps, alike=form.alike)
    if form.wide_scale:
        return (normed * scale_over_rows(scale, x, form)).astype(x.dtype)
    return normed.astype(x.dtype) * scale_over_rows(scale, x, form, x.dtype)


def rms_norm_backward(
    dout: ModelRows, x: ModelRows, scale: ModelVector, form: RmsForm
) -> tuple[ModelRows, ModelVector]:
    """Returns the cotangents of x and of the scale.

    With n the normed row and g = dout * scale: dx = (g - n mean(g n)) / rms, dscale = sum over rows of dout * n.
    """
    dx, dscale = norm_backward(dout, x, scale, form)
    return dx, dscale.astype(scale.dtype)


def normed_rows(x: Array, eps: float, *, centred: bool = False, alike: bool = False) -> tuple[Array, Array]:
    """Returns rows of mean square 1, and of mean 0 if ``centred``, in float32, and 1 / rms of each row."""

    def mean(rows: Array) -> Array:
        return sum_of_halves(rows) / rows.shape[-1] if alike else jnp.mean(rows, axis=-1, keepdims=True)

    wide_rows = x.astype(jnp.float32)
    if centred:
        wide_rows = wide_rows - mean(wide_rows)
    inverse_rms = lax.rsqrt(mean(wide_rows * wide_rows) + eps)
    return wide_rows * inverse_rms, inverse_rms


def norm_backward(dout: Array, x: Array, scale: Array, form: RmsForm, *, centred: bool = False) -> tuple[Array, Array]:
    """Returns the cotangents of the rows and, in float32, of the scale."""
    normed, inverse_rms = normed_rows(x, form.eps, centred=centred)
    wide_dout = dout.astype(jnp.float32)
    dnormed = wide_dout * scale_over_rows(scale, x, form)
    projection = normed * jnp.mean(dnormed * normed, axis=-1, keepdims=True)
    if centred:
        dnormed = dnormed - jnp.mean(dnormed, axis=-1, keepdims=True)
    return (inverse_rms * (dnormed - projection)).astype(x.dtype), sum_rows(wide_dout * normed, scale.ndim)


def scale_over_rows(scale: Array, x: Array, form: RmsForm, dtype: DTypeLike = jnp.float32) -> Array:
    """Returns the factors of normed rows (scale, or 1 + scale), in ``dtype`` and the rank of ``x``."""
    wide_scale = scale.astype(jnp.float32)
    return over_rows((1.0 + wide_scale if form.unit_offset else wide_scale).astype(dtype), x)


def over_rows(vector: Array, x: Array) -> Array:
    """Reshapes a vector over the last dims to the rank of ``x``, with leading dims of 1."""
    return vector.reshape((1,) * (x.ndim - vector.ndim) + vector.shape)


def sum_rows(x: Array, num_dims: int = 1) -> Array:
    """Sums over all dims but the last ``num_dims``."""
    return jnp.sum(x, axis=tuple(range(x.ndim - num_dims)))


def _form(context: Context, scale_name: str) -> RmsForm:
    return rms_form(context.model, latent=scale_name.startswith(LATENT_NORM_PREFIXES))


def _forward(context: Context, step: Step, x: Array, scale: Array) -> Array:
    return rms_norm(x, scale, _form(context, step.inputs[1].name)._replace(alike=context.alike))


def _backward(context: Context, step: Step, dout: Array, x: Array, scale: Array) -> Any:
    return rms_norm_backward(dout, x, scale, _form(context, step.inputs[2].name))


STEPS = {"rms_norm": _forward, "rms_norm_backward": _backward}
