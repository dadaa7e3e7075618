"""Rows divided by their root mean square, in float32 whatever the dtype of the activations."""

from jaxtyping import Array, Float

from meshwright.algebra.steps import Step
from meshwright.nn.context import Context
from meshwright.nn.ops import backward_of
from meshwright.nn.ops.rms_norm import normed_rows


def unit_norm(context: Context, step: Step, x: Float[Array, "*rows H"]) -> Float[Array, "*rows H"]:
    """Returns ``x / sqrt(mean(x**2) + eps)`` over the last dim."""
    return normed_rows(x, context.model.norm_eps, alike=context.alike)[0].astype(x.dtype)


STEPS = {"unit_norm": unit_norm, "unit_norm_backward": backward_of(unit_norm)}
