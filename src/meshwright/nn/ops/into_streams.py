"""Appends projections of the first residual stream as further streams, scaled to its magnitude."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from meshwright.nn.ops import backward_of, of_arrays

MIN_SQUARE = 1e-5
"""The least mean square by whose root a projection is divided."""


def at_magnitude(projections: Float[Array, "An B T Do"], x: Float[Array, "B T D"]) -> Float[Array, "An B T Do"]:
    """Returns projections times ``rms(x) / rms(projection)``; for a row of zeros ``rms(x)`` has no gradient."""
    square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    magnitude = jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1.0)), 0.0)
    own_square = jnp.mean(jnp.square(projections.astype(jnp.float32)), axis=-1, keepdims=True)
    return (projections * magnitude[None] / jnp.sqrt(jnp.maximum(own_square, MIN_SQUARE))).astype(x.dtype)


_FORWARD = of_arrays(lambda x, projections: jnp.concatenate([x[None], at_magnitude(projections, x)]))

STEPS = {"into_streams": _FORWARD, "into_streams_backward": backward_of(_FORWARD)}
