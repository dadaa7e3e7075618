"""Multiplies the output of the shared experts by one gate per token."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meshwright.nn.ops import backward_of, of_arrays


def token_gate(y: Float[Array, "B T D"], x: Float[Array, "B T D"], weight: Float[Array, " D"]) -> Float[Array, "B T D"]:
    """Returns ``sigmoid(x . weight) * y``: one gate per token."""
    gate_score = jnp.einsum("btd,d->bt", x, weight, preferred_element_type=jnp.float32)
    return jax.nn.sigmoid(gate_score).astype(y.dtype)[..., None] * y


STEPS = {"token_gate": of_arrays(token_gate), "token_gate_backward": backward_of(of_arrays(token_gate))}
