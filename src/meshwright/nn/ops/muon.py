"""Muon's steps: Nesterov momentum, and whole matrices orthogonalised."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from meshwright.algebra.ops.muon import TURNS
from meshwright.algebra.steps import Step

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the odd polynomial a x + b x^3 + c x^5, steep at 0 and between 0.7 and 1.2 after five turns. Source: Jordan."""

MATCHED_RMS = 0.2
"""RMS of an update, that of AdamW in practice, so that both take one learning rate. Source: Liu et al., section 2.2."""


def momentum(mean: jax.Array, grad: jax.Array, count: jax.Array, *, decay: float) -> tuple[jax.Array, jax.Array]:
    """The new running mean of the gradient, and the mix that looks an update ahead; ``count`` updates are done with it.

    Both parts are unbiased means: the one looks an update ahead, the other is of this update.
    """
    mean = decay * mean + (1 - decay) * grad
    ahead, now = (1 - decay ** (count + extra).astype(jnp.float32) for extra in (1, 0))
    return mean, decay * mean / ahead + (1 - decay) * grad / now


def orthogonalise(context: Any, step: Step, whole: jax.Array) -> jax.Array:
    """Every matrix U S V^T of [count, *inputs, *outputs] as nearly U V^T, its root mean square near `MATCHED_RMS`."""
    inputs = whole.shape[1 : 1 + step.details.num_inputs]
    flat = whole.reshape(whole.shape[0], math.prod(inputs), -1)
    return (MATCHED_RMS * max(flat.shape[-2:]) ** 0.5 * newton_schulz(flat)).reshape(whole.shape)


def newton_schulz(x: jax.Array) -> jax.Array:
    """Singular values of each matrix [..., in, out] brought near 1 by five turns of an odd polynomial."""
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x  # the products of rows are then the smaller square
    x = x / (jnp.sqrt(jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True)) + 1e-8)
    a, b, c = COEFFICIENTS

    def turn(_: int, x: jax.Array) -> jax.Array:
        square = x @ x.mT
        return a * x + (b * square + c * square @ square) @ x

    x = lax.fori_loop(0, TURNS, turn, x)
    return x.mT if tall else x


STEPS = {"muon_momentum": momentum, "muon": orthogonalise, "muon_apply": optax.apply_updates}
