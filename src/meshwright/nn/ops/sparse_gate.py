"""Subtracts ``mean + by * deviation`` of its row from each gate and clips at 0, in float32, with row sums from a
collective. Source: Gemma 3n, activation sparsity."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from meshwright.algebra.steps import Step
from meshwright.nn.context import Context
from meshwright.nn.ops.wide_rms_norm import RowSums

GateRows = Float[Array, "B T F"]


def offsets(gates: GateRows, width: int, sums: RowSums) -> GateRows:
    """Returns gates less the mean of their row, which has ``width`` entries over all devices, in float32."""
    return gates.astype(jnp.float32) - (sums / width)[..., None]


def _width(context: Context, step: Step) -> int:
    return context.model.dims[step.inputs[0].dims[-1]]


def _above(context: Context, step: Step, gates: Array, sums: Array, squares: Array) -> tuple[Array, Array, Array]:
    """Returns gates less their threshold, gates less their mean, and the standard deviation of each row."""
    width = _width(context, step)
    offset, deviation = offsets(gates, width, sums), jnp.sqrt(squares / width)[..., None]
    by = jnp.asarray(step.details.by, gates.dtype).astype(jnp.float32)
    return offset - by * deviation, offset, deviation


def _forward(context: Context, step: Step, gates: Array, *sums: Array) -> Array:
    return jnp.maximum(_above(context, step, gates, *sums)[0], 0.0).astype(gates.dtype)


def _sum_above(context: Context, step: Step, dout: Array, gates: Array, *sums: Array) -> Array:
    above, _, _ = _above(context, step, gates, *sums)
    return jnp.sum(jnp.where(above > 0, dout.astype(jnp.float32), 0.0), axis=-1)


def _backward(context: Context, step: Step, dout: Array, gates: Array, *sums: Array) -> tuple[Array]:
    """Returns ``d - s (1 + by (gates - mean) / deviation) / F``: d is the cotangent above the threshold, s its sum."""
    *row_sums, above_sum = sums
    above, offset, deviation = _above(context, step, gates, *row_sums)
    slope = 1.0 + step.details.by * offset / jnp.where(deviation > 0, deviation, 1.0)
    dabove = jnp.where(above > 0, dout.astype(jnp.float32), 0.0)
    dgates = dabove - above_sum[..., None] * slope / _width(context, step)
    return (dgates.astype(gates.dtype),)


STEPS = {
    "gate_sum": lambda context, step, gates: jnp.sum(gates.astype(jnp.float32), axis=-1),
    "gate_squares": lambda c, step, gates, sums: jnp.sum(jnp.square(offsets(gates, _width(c, step), sums)), axis=-1),
    "sparse_gate": _forward,
    "sparse_gate_above": _sum_above,
    "sparse_gate_backward": _backward,
}
