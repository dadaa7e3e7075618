"""RMS norm of rows, forward and backward."""

from typing import Any

import jax

from meshwright.algebra.steps import Step
from meshwright.nn import norms
from meshwright.nn.context import Context


def _form(context: Context, scale_name: str) -> norms.RmsForm:
    return norms.rms_form(context.model, latent=scale_name.startswith(norms.LATENT_NORMS))


def rms_norm(context: Context, step: Step, x: jax.Array, scale: jax.Array) -> jax.Array:
    return norms.rms_norm(x, scale, _form(context, step.inputs[1].name))


def rms_norm_backward(context: Context, step: Step, dout: jax.Array, x: jax.Array, scale: jax.Array) -> Any:
    return norms.rms_norm_backward(dout, x, scale, _form(context, step.inputs[2].name))


STEPS = {"rms_norm": rms_norm, "rms_norm_backward": rms_norm_backward}
