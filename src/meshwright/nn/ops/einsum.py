"""A product of two arrays; on slots of experts in blocks that leave out empty slots."""

from typing import Any

import jax
import jax.numpy as jnp

from meshwright.algebra.steps import Step
from meshwright.nn.context import Context
from meshwright.nn.contract import contract
from meshwright.nn.experts.products import num_at_once
from meshwright.nn.experts.ragged import Ragged
from meshwright.nn.experts.slots import in_blocks, slot_product, weight_gradient


def contract_step(step: Step, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """The local contraction of a step: dims of the same name are the same dim.

    Where one factor is wider than the other, and the result is not asked to be, it is narrowed first.
    """
    letters = {d: chr(ord("a") + i) for i, d in enumerate(dict.fromkeys((*step.inputs[0].dims, *step.inputs[1].dims)))}
    left, right, out = ("".join(letters[d] for d in a.dims) for a in (*step.inputs, step.result))
    wide = jnp.float32 if step.result.dtype == "fp32" else None
    if wide is None and lhs.dtype != rhs.dtype:
        narrow = min(lhs.dtype, rhs.dtype, key=lambda dtype: dtype.itemsize)
        lhs, rhs = lhs.astype(narrow), rhs.astype(narrow)
    return contract(f"{left},{right}->{out}", lhs, rhs, dtype=wide)


def einsum(context: Context, step: Step, lhs: Any, rhs: Any) -> Any:
    """The local product; where an operand has slots of experts and empty ones are left out, block by block."""
    slots = [value for array, value in zip(step.inputs, (lhs, rhs), strict=True) if array.dims[:2] == ("E", "C")]
    if not slots:
        return contract_step(step, lhs, rhs)
    num_slots = 0 if isinstance(slots[0], Ragged) else slots[0].shape[0] * slots[0].shape[1]
    if num_slots and not in_blocks(context, num_slots=num_slots):
        return contract_step(step, lhs, rhs)
    at_once = 1
    if num_slots:
        at_once = num_at_once(slots[0].shape[1] * context.model.experts_per_token / context.model.num_experts)
    return (weight_gradient if len(slots) == 2 else slot_product)(step, lhs, rhs, at_once)


STEPS = {"einsum": einsum}
