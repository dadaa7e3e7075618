"""RMS norm of rows that are split over devices, in float32, with sums over whole rows from a collective."""

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from meshwright.algebra.steps import Step
from meshwright.nn.context import Context

SplitRows = Float[Array, "B T N H"]
RowSums = Float[Array, "B T"]
HeadScale = Float[Array, "N H"]


def sum_squares(x: Array, num_dims: int) -> Array:
    """Returns the sum of squares of this device's part of each row; the first ``num_dims`` dims number the rows."""
    wide_x = x.astype(jnp.float32)
    return jnp.sum(wide_x * wide_x, axis=tuple(range(num_dims, x.ndim)))


def wide_rms_norm(x: Array, scale: Array, squares: Array, *, width: int, eps: float) -> Array:
    """Returns ``x / sqrt(squares / width + eps) * scale``; ``squares`` are sums over rows of ``width``."""
    inverse_rms = lax.rsqrt(squares / width + eps).reshape(*squares.shape, *(1,) * scale.ndim)
    scale = scale.astype(jnp.float32).reshape(*(1,) * squares.ndim, *scale.shape)
    return (x.astype(jnp.float32) * inverse_rms * scale).astype(x.dtype)


def along(dout: SplitRows, x: SplitRows, scale: HeadScale) -> RowSums:
    """Returns the sum of ``dout * scale * x`` over this device's part of each row."""
    wide_cotangent = dout.astype(jnp.float32) * scale.astype(jnp.float32)[None, None]
    return jnp.sum(wide_cotangent * x.astype(jnp.float32), axis=(2, 3))


def wide_rms_norm_backward(
    dout: SplitRows, x: SplitRows, scale: HeadScale, *sums: RowSums, width: int, eps: float
) -> tuple[SplitRows, HeadScale]:
    """Returns the cotangents of the rows and the scale; ``sums`` are whole rows' sums of squares and of `along`.

    With i = 1 / rms: dx = i (dout scale - x i^2 along / width), dscale = sum over rows of dout x i.
    """
    squares, along_sums = (array[..., None, None] for array in sums)
    inv_rms = lax.rsqrt(squares / width + eps)
    wide_dout, wide_x = dout.astype(jnp.float32), x.astype(jnp.float32)
    dx = inv_rms * (wide_dout * scale.astype(jnp.float32)[None, None] - wide_x * inv_rms**2 * along_sums / width)
    return dx.astype(x.dtype), jnp.sum(wide_dout * wide_x * inv_rms, axis=(0, 1)).astype(scale.dtype)


def _sizes(context: Context, step: Step, scale: int) -> dict[str, Any]:
    width = math.prod(context.model.dims[dim] for dim in step.inputs[scale].dims)
    return {"width": width, "eps": context.model.norm_eps}


def _forward(context: Context, step: Step, x: Array, scale: Array, squares: Array) -> Array:
    if context.model.norm_unit_offset:
        scale = 1.0 + scale.astype(jnp.float32)
    return wide_rms_norm(x, scale, squares, **_sizes(context, step, 1))


STEPS = {
    "sum_squares": lambda context, step, x: sum_squares(x, len(step.result.dims)),
    "wide_rms_norm": _forward,
    "wide_rms_norm_along": lambda context, step, *given: along(*given),
    "wide_rms_norm_backward": lambda context, step, *given: wide_rms_norm_backward(*given, **_sizes(context, step, 2)),
}
