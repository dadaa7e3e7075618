"""Layer norm of rows, forward and backward, in float32 whatever the dtype of the stream."""

import jax.numpy as jnp

from meshwright.nn.ops.rms_norm import ModelRows, ModelVector, norm_backward, normed_rows, over_rows, sum_rows


def layer_norm(x: ModelRows, scale: ModelVector, bias: ModelVector, *, eps: float, alike: bool = False) -> ModelRows:
    """Returns ``(x - mean(x)) / sqrt(var(x) + eps) * scale + bias`` over the last dim; ``alike``: see `Context`."""
    normed, _ = normed_rows(x, eps, centred=True, alike=alike)
    return (normed * over_rows(scale, x) + over_rows(bias, x)).astype(x.dtype)


def layer_norm_backward(
    dout: ModelRows, x: ModelRows, scale: ModelVector, *, eps: float
) -> tuple[ModelRows, ModelVector, ModelVector]:
    """Returns the cotangents of x, scale and bias; with g = dout * scale, dx = (g - mean(g) - n mean(g n)) / std."""
    dx, dscale = norm_backward(dout, x, over_rows(scale.astype(jnp.float32), x), eps, centred=True)
    return dx, dscale.astype(scale.dtype), sum_rows(dout.astype(jnp.float32)).astype(scale.dtype)


STEPS = {
    "layer_norm": lambda context, step, *given: layer_norm(*given, eps=context.model.norm_eps, alike=context.alike),
    "layer_norm_backward": lambda context, step, *given: layer_norm_backward(*given, eps=context.model.norm_eps),
}
