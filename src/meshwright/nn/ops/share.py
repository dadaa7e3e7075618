"""Combines two attentions of the same queries over different keys."""

import jax.numpy as jnp
from jaxtyping import Array

from meshwright.nn.ops import of_arrays


def share(own: Array, peak: Array, total: Array, other_peak: Array, other_total: Array) -> Array:
    """Returns a result [B, T, N, H] scaled by its share of the sum of exponentials over both sets of keys."""
    top_peak = jnp.maximum(peak, other_peak)
    own_sum, other_sum = total * jnp.exp(peak - top_peak), other_total * jnp.exp(other_peak - top_peak)
    return (own * (own_sum / (own_sum + other_sum))[..., None]).astype(own.dtype)


STEPS = {"share": of_arrays(share)}
