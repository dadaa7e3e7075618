"""Layer norm of rows, forward and backward, in float32 whatever the dtype of the activations."""

import jax.numpy as jnp
from jaxtyping import Array

from meshwright.algebra.steps import Step
from meshwright.nn.context import Context
from meshwright.nn.ops import rms_norm


def layer_norm(
    x: rms_norm.ModelRows, scale: rms_norm.ModelVector, bias: rms_norm.ModelVector | None, form: rms_norm.RmsForm
) -> rms_norm.ModelRows:
    """Returns ``(x - mean(x)) / sqrt(var(x) + eps) * scale + bias`` over the last dim; ``* (1 + scale)`` with
    ``unit_offset``."""
    normed, _ = rms_norm.normed_rows(x, form.eps, centred=True, alike=form.alike)
    scaled = normed * rms_norm.scale_over_rows(scale, x, form)
    return (scaled if bias is None else scaled + rms_norm.over_rows(bias, x)).astype(x.dtype)


def layer_norm_backward(
    dout: rms_norm.ModelRows, x: rms_norm.ModelRows, scale: rms_norm.ModelVector, form: rms_norm.RmsForm
) -> tuple[rms_norm.ModelRows, rms_norm.ModelVector, rms_norm.ModelVector]:
    """Returns the cotangents of x, scale and bias; with g = dout * scale, dx = (g - mean(g) - n mean(g n)) / std."""
    dx, dscale = rms_norm.norm_backward(dout, x, scale, form, centred=True)
    dbias = rms_norm.sum_rows(dout.astype(jnp.float32), scale.ndim)
    return dx, dscale.astype(scale.dtype), dbias.astype(scale.dtype)


def _forward(context: Context, step: Step, x: Array, scale: Array, *bias: Array) -> Array:
    return layer_norm(
        x, scale, bias[0] if bias else None, rms_norm.rms_form(context.model)._replace(alike=context.alike)
    )


def _backward(context: Context, step: Step, dout: Array, x: Array, scale: Array) -> tuple[Array, ...]:
    return layer_norm_backward(dout, x, scale, rms_norm.rms_form(context.model))[: len(step.results)]


STEPS = {"layer_norm": _forward, "layer_norm_backward": _backward}
