"""Muon's steps: Nesterov momentum, and whole matrices orthogonalised."""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from meshwright.algebra.ops.muon import ITERATIONS
from meshwright.algebra.steps import Step
from meshwright.nn.context import UpdateContext
from meshwright.nn.ops.adamw import changed

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of a x + b x^3 + c x^5, steep at 0: five iterations bring 0.005 to 1 to 0.68 to 1.16, smaller
values to less. Source: Jordan, Muon: An optimizer for hidden layers in neural networks (2024)."""

MATCHED_RMS = 0.2
"""RMS of an update, near that of AdamW: both use one rate. Source: Liu et al., Muon is Scalable (2025), section 2.2."""


def momentum(context: UpdateContext, step: Step, grad: Array, mean: Array) -> tuple[Array, Array]:
    """Returns the Nesterov mix of gradient and running mean [matrices, *inputs, *outputs], and the running mean.

    Both parts of the mix are bias-corrected: the mean for the next update's number, the gradient for this one's. The
    matrices are padded with zeros to a multiple of the devices, so a device receives at most one zero matrix.
    """
    decay, details = context.momentum, step.details
    mean = decay * mean + (1 - decay) * grad
    next_correction, correction = (1 - decay ** (context.number + ahead).astype(jnp.float32) for ahead in (1, 0))
    mixed_grad = decay * mean / next_correction + (1 - decay) * grad / correction
    matrix_shape = grad.shape[1 + grad.ndim - len(step.result.dims) :]
    matrices = mixed_grad.reshape(-1, *matrix_shape)
    return jnp.pad(matrices, [(0, -len(matrices) % lax.axis_size(details.axes)), *[(0, 0)] * len(matrix_shape)]), mean


def orthogonalise(context: UpdateContext, step: Step, whole: Array) -> Array:
    """Maps every matrix U S V^T of [count, *inputs, *outputs] to about c U V^T, at full rank of RMS `MATCHED_RMS`."""
    input_sizes = whole.shape[1 : 1 + step.details.num_inputs]
    flat_matrices = whole.reshape(whole.shape[0], math.prod(input_sizes), -1)
    return (MATCHED_RMS * max(flat_matrices.shape[-2:]) ** 0.5 * newton_schulz(flat_matrices)).reshape(whole.shape)


def newton_schulz(x: Array) -> Array:
    """Brings the singular values of each matrix [..., in, out] near 1 by iterations of an odd polynomial."""
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x  # x @ x.mT is then the smaller square
    x = x / (jnp.sqrt(jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True)) + 1e-8)
    a, b, c = COEFFICIENTS

    def iteration(_: int, x: Array) -> Array:
        square = x @ x.mT
        return a * x + (b * square + c * square @ square) @ x

    x = lax.fori_loop(0, ITERATIONS, iteration, x)
    return x.mT if is_tall else x


def apply(context: UpdateContext, step: Step, change: Array, weight: Array) -> Array:
    """Returns the weight after its change; padding matrices of the change are dropped."""
    num_matrices = weight.size // math.prod(change.shape[1:])
    return changed(context, step, change[:num_matrices].reshape(weight.shape), weight)


STEPS = {"muon_momentum": momentum, "muon": orthogonalise, "muon_apply": apply}
