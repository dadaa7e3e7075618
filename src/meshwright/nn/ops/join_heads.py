"""Keys of each head joined with the part that all heads share."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meshwright.algebra.steps import Step
from meshwright.nn.context import Context


def join_heads(own: Float[Array, "B T N Hn"], shared: Float[Array, "B T Hr"]) -> Float[Array, "B T N H"]:
    """Each head's own part, followed by the part that all heads share."""
    every = jnp.broadcast_to(shared[:, :, None], (*own.shape[:3], shared.shape[-1]))
    return jnp.concatenate([own, every], axis=-1)


def join_heads_backward(
    dout: Float[Array, "B T N H"], *, own_width: int
) -> tuple[Float[Array, "B T N Hn"], Float[Array, "B T Hr"]]:
    """Cotangents of the heads' own parts, and of the shared one: a sum over heads."""
    return dout[..., :own_width], jnp.sum(dout[..., own_width:], axis=2)


def _join_heads(context: Context, step: Step, own: jax.Array, shared: jax.Array) -> jax.Array:
    return join_heads(own, shared)


def _join_heads_backward(context: Context, step: Step, dout: jax.Array) -> Any:
    return join_heads_backward(dout, own_width=context.model.qk_nope_head_dim)


STEPS = {"join_heads": _join_heads, "join_heads_backward": _join_heads_backward}
