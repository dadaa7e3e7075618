"""Rows times one weight each, in float32."""

from typing import Any

from jaxtyping import Array, Float

from meshwright.algebra.steps import Step
from meshwright.nn.context import Context
from meshwright.nn.ops.silu_mul import activation_steps


def weighted(context: Context, step: Step, rows: Float[Array, "*R F"], by: Float[Array, "*R"]) -> Any:
    """Multiplies every row by its weight; the result has the dtype of the rows."""
    return (rows * by[..., None]).astype(rows.dtype)


STEPS = activation_steps("weighted", weighted)
