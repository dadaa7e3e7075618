"""Joins each head's own part of the keys with the part that all heads share."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from meshwright.nn.ops import of_arrays


def join_heads(own: Float[Array, "B T N Hn"], shared: Float[Array, "B T Hr"]) -> Float[Array, "B T N H"]:
    """Appends the shared part to each head's own part."""
    shared_per_head = jnp.broadcast_to(shared[:, :, None], (*own.shape[:3], shared.shape[-1]))
    return jnp.concatenate([own, shared_per_head], axis=-1)


def join_heads_backward(
    dout: Float[Array, "B T N H"], own_width: int
) -> tuple[Float[Array, "B T N Hn"], Float[Array, "B T Hr"]]:
    """Returns the cotangents of the heads' own parts and, summed over heads, of the shared part."""
    return dout[..., :own_width], jnp.sum(dout[..., own_width:], axis=2)


STEPS = {
    "join_heads": of_arrays(join_heads),
    "join_heads_backward": lambda context, step, dout: join_heads_backward(dout, context.model.qk_nope_head_dim),
}
