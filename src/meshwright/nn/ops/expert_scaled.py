"""Weights of each token's experts times a learned scale per expert, in float32."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from meshwright.algebra.steps import Step
from meshwright.nn.context import Context
from meshwright.nn.experts.slots import Chosen, Gates, expert_numbers
from meshwright.nn.ops.route import slot_capacity, spread


def expert_scaled(context: Context, step: Step, gates: Gates, chosen: Chosen, scale: Float[Array, " E"]) -> Gates:
    """Returns the weight of each of a token's experts times that expert's scale."""
    experts = expert_numbers(chosen, capacity=slot_capacity(context, step, gates))
    return gates * scale.astype(gates.dtype)[experts]


def expert_scaled_backward(
    context: Context, step: Step, dout: Gates, gates: Gates, chosen: Chosen, scale: Float[Array, " E"]
) -> tuple[Gates, Float[Array, " E"]]:
    """Returns the cotangents of the weights and of the scales."""
    experts = expert_numbers(chosen, capacity=slot_capacity(context, step, gates))
    dscale = jnp.sum(spread(dout * gates, experts, scale.shape[0]), axis=(0, 1))
    return dout * scale.astype(dout.dtype)[experts], dscale.astype(scale.dtype)


STEPS = {"expert_scaled": expert_scaled, "expert_scaled_backward": expert_scaled_backward}
