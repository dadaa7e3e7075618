"""Queries times a factor that grows with the logarithm of their position."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from meshwright.algebra.steps import Step
from meshwright.nn.context import Context


def tempered(
    queries: Float[Array, "B T N H"], positions: Int[Array, "B T"], *, weight: float, length: int
) -> Float[Array, "B T N H"]:
    """Returns ``queries * (1 + weight * ln(1 + floor(position / length)))``. Source: Llama 4 (2025), which counts
    positions from 1, and Ministral 3, from 0; after Nakanishi, Scalable-Softmax (2025)."""
    factors = 1.0 + weight * jnp.log1p(jnp.floor(positions.astype(jnp.float32) / length))
    return queries * factors[:, :, None, None].astype(queries.dtype)


def _tempered(context: Context, step: Step, queries: Array, positions: Array) -> Array:
    model = context.model
    positions = positions + int(model.temper_unrotated)
    return tempered(queries, positions, weight=model.query_temper, length=model.temper_length)


STEPS = {"tempered": _tempered}
