"""Concatenates two arrays along their last dim."""

import jax.numpy as jnp

from meshwright.nn.ops import of_arrays

STEPS = {
    "join": of_arrays(lambda *parts: jnp.concatenate(parts, axis=-1)),
    "join_backward": of_arrays(lambda dout: tuple(jnp.split(dout, 2, axis=-1))),
}
