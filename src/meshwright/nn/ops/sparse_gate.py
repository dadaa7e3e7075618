"""Bounds gates from below by the mean and the deviation of their rows, in float32, from sums over whole rows, which a
collective makes. Source: Gemma 3n, activation sparsity."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from meshwright.algebra.steps import Step
from meshwright.nn.context import Context
from meshwright.nn.ops.wide_rms_norm import RowSums

GateRows = Float[Array, "B T F"]


def gate_sums(gates: GateRows) -> tuple[RowSums, RowSums]:
    """Sums each row's part, and its squares."""
    wide_gates = gates.astype(jnp.float32)
    return jnp.sum(wide_gates, axis=-1), jnp.sum(wide_gates * wide_gates, axis=-1)


def deviations(gates: GateRows, width: int, sums: RowSums, squares: RowSums) -> tuple[GateRows, Float[Array, "B T 1"]]:
    """Returns gates less the mean of their row of ``width``, and the row's deviation, in float32."""
    mean = (sums / width)[..., None]
    variance = jnp.maximum((squares / width)[..., None] - mean * mean, 0.0)
    return gates.astype(jnp.float32) - mean, jnp.sqrt(variance)


def _width(context: Context, step: Step) -> int:
    return context.model.dims[step.inputs[0].dims[-1]]


def _above(context: Context, step: Step, gates: Array, *sums: Array) -> tuple[Array, Array, Array]:
    """Returns gates less their bound, gates less their mean, and the deviation."""
    offset, deviation = deviations(gates, _width(context, step), *sums)
    by = jnp.asarray(step.details.by, gates.dtype).astype(jnp.float32)
    return offset - by * deviation, offset, deviation


def _forward(context: Context, step: Step, gates: Array, *sums: Array) -> Array:
    return jnp.maximum(_above(context, step, gates, *sums)[0], 0.0).astype(gates.dtype)


def _sum_above(context: Context, step: Step, dout: Array, gates: Array, *sums: Array) -> Array:
    above, _, _ = _above(context, step, gates, *sums)
    return jnp.sum(jnp.where(above > 0, dout.astype(jnp.float32), 0.0), axis=-1)


def _backward(context: Context, step: Step, dout: Array, gates: Array, *sums: Array) -> tuple[Array]:
    """Returns ``d - s (1 + by (gates - mean) / deviation) / F``: d is the cotangent above the bound, s its sum."""
    *row_sums, above_sum = sums
    above, offset, deviation = _above(context, step, gates, *row_sums)
    slope = 1.0 + step.details.by * offset / jnp.where(deviation > 0, deviation, 1.0)
    dabove = jnp.where(above > 0, dout.astype(jnp.float32), 0.0)
    dgates = dabove - above_sum[..., None] * slope / _width(context, step)
    return (dgates.astype(gates.dtype),)


STEPS = {
    "gate_sums": lambda context, step, gates: gate_sums(gates),
    "sparse_gate": _forward,
    "sparse_gate_above": _sum_above,
    "sparse_gate_backward": _backward,
}
