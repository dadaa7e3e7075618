"""The output of the shared experts times a gate of each token."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meshwright.algebra.steps import Step
from meshwright.nn.context import Context
from meshwright.nn.ops.silu_mul import backward_of


def token_gate(y: Float[Array, "B T D"], x: Float[Array, "B T D"], weight: Float[Array, " D"]) -> Float[Array, "B T D"]:
    """``sigmoid(x . weight) * y``: one gate per token."""
    score = jnp.einsum("btd,d->bt", x, weight, preferred_element_type=jnp.float32)
    return jax.nn.sigmoid(score).astype(y.dtype)[..., None] * y


def _token_gate(context: Context, step: Step, y: jax.Array, x: jax.Array, weight: jax.Array) -> jax.Array:
    return token_gate(y, x, weight)


STEPS = {"token_gate": _token_gate, "token_gate_backward": backward_of(_token_gate)}
