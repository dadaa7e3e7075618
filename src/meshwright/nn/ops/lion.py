"""Lion's step. Source: Chen et al., Symbolic Discovery of Optimization Algorithms (2023), algorithm 2."""

import jax.numpy as jnp
from jaxtyping import Array

from meshwright.algebra.steps import Step
from meshwright.nn.context import UpdateContext
from meshwright.nn.ops.adamw import changed


def update(context: UpdateContext, step: Step, grad: Array, weight: Array, mu: Array) -> tuple[Array, Array]:
    """Returns the weight, changed by the sign of a mix of gradient and running mean, and the running mean."""
    change = jnp.sign((1 - context.beta1) * grad + context.beta1 * mu)
    return changed(context, step, change, weight), (1 - context.beta2) * grad + context.beta2 * mu


STEPS = {"lion": update}
