"""AdamW's step. Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization (2019), algorithm 2."""

import jax.numpy as jnp
from jaxtyping import Array

from meshwright.algebra.steps import Step
from meshwright.nn.context import UpdateContext


def changed(context: UpdateContext, step: Step, change: Array, weight: Array) -> Array:
    """Returns ``weight - rate * (change + decay * weight)``, with the weight's decay or 0."""
    if decay := context.decays.get(step.result.name):
        change = change + decay * weight
    return weight - context.rate * change


def update(
    context: UpdateContext, step: Step, grad: Array, weight: Array, mu: Array, nu: Array
) -> tuple[Array, Array, Array]:
    """Returns the weight and the running means of the gradient and of its square, which the update bias-corrects."""
    mu = (1 - context.beta1) * grad + context.beta1 * mu
    nu = (1 - context.beta2) * grad**2 + context.beta2 * nu
    mean, square = (moment / correction for moment, correction in zip((mu, nu), context.corrections, strict=True))
    return changed(context, step, mean / (jnp.sqrt(square) + context.epsilon), weight), mu, nu


STEPS = {"adamw": update}
