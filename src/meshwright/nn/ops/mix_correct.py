"""Corrects predicted residual streams by the output of the layer that ran on one of them."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from meshwright.algebra.steps import Step
from meshwright.nn.context import Context
from meshwright.nn.ops import backward_of
from meshwright.nn.ops.mix_predict import StreamRows, clip, token_mix


def mix_correct(
    context: Context, step: Step, x: StreamRows, made: Float[Array, "B T D"], *weights: Float[Array, "..."]
) -> StreamRows:
    """Returns ``x[a] + (1 + c[a]) (made - x[active])`` for each stream a; ``made`` is the layer's output. ``weights``
    are the norm's scale, the router, and the matrix of the per-token coefficients c."""
    *router_weights, correct = weights
    mix = token_mix(context, made, *router_weights)
    coefs = jnp.einsum("btm,ma->abt", mix, clip(context, correct), preferred_element_type=jnp.float32) + 1.0
    return (made - x[context.model.active_stream])[None] * coefs.astype(x.dtype)[..., None] + x


STEPS = {"mix_correct": mix_correct, "mix_correct_backward": backward_of(mix_correct)}
