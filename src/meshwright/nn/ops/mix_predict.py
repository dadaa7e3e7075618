"""Predicts residual streams from each other, with coefficients per token."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from meshwright.algebra.steps import Step
from meshwright.nn.context import Context
from meshwright.nn.ops import backward_of
from meshwright.nn.ops.rms_norm import rms_form, rms_norm

StreamRows = Float[Array, "A B T D"]


def token_mix(context: Context, x: Float[Array, "B T D"], scale: Array, router: Array) -> Float[Array, "B T Am"]:
    """Returns ``tanh(norm(x) / D . router)``, from which a token's coefficients are computed as linear functions."""
    rows = rms_norm(x, scale, rms_form(context.model)._replace(alike=context.alike)) * (1 / x.shape[-1])
    scores = jnp.einsum("btd,dm->btm", rows, router, preferred_element_type=jnp.float32)
    return jnp.tanh(scores).astype(x.dtype)


def clip(context: Context, coefs: Array) -> Array:
    """Returns coefficient weights, clipped in training to the model's bound if it has one."""
    bound = 0.0 if context.seq_len else context.model.stream_clip
    return jnp.clip(coefs, -bound, bound) if bound else coefs


def mix_predict(context: Context, step: Step, x: StreamRows, scale: Array, router: Array, predict: Array) -> StreamRows:
    """Returns ``x[o] + sum over a of c[o,a] x[a]`` for each stream o, with coefficients c of each token."""
    mix = token_mix(context, x[context.model.active_stream], scale, router)
    # clipped weights still get gradients: the clip is on the weights themselves
    predict = predict + lax.stop_gradient(clip(context, predict) - predict)
    coefs = jnp.einsum("btm,moa->oabt", mix, predict, preferred_element_type=jnp.float32)
    change = jnp.sum(coefs.astype(x.dtype)[..., None] * x[None], axis=1, dtype=jnp.float32)
    return change.astype(x.dtype) + x


STEPS = {"mix_predict": mix_predict, "mix_predict_backward": backward_of(mix_predict)}
