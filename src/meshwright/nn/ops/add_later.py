"""Adds an array to all residual streams but the first."""

import jax.numpy as jnp

STEPS = {
    "add_later": lambda context, step, x, added: jnp.concatenate([x[:1], x[1:] + added[None]]),
    "add_later_backward": lambda context, step, dout: (jnp.sum(dout[1:], axis=0),),
}
