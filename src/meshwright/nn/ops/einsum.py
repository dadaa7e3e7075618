"""The product of two arrays; a product with slots of experts may skip blocks of empty slots."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from meshwright.algebra.steps import Step
from meshwright.nn.context import Context
from meshwright.nn.contract import Turned, contract
from meshwright.nn.experts.products import blocks_of, in_blocks, slot_product, slot_weight_gradient
from meshwright.nn.experts.slots import Ragged


def contract_step(step: Step, lhs: Array, rhs: Array | Turned) -> Array:
    """Contracts a step's local blocks; dims of one name are one dim.

    A factor of a wider dtype than the other is narrowed first, unless the result is float32.
    """
    letters = {d: chr(ord("a") + i) for i, d in enumerate(dict.fromkeys((*step.inputs[0].dims, *step.inputs[1].dims)))}
    left, right, out = ("".join(letters[d] for d in a.dims) for a in (*step.inputs, step.result))
    wide = jnp.float32 if step.result.dtype == "fp32" else None
    rhs = rhs.plain if isinstance(rhs, Turned) and rhs.array.dtype != lhs.dtype else rhs
    if wide is None and not isinstance(rhs, Turned) and lhs.dtype != rhs.dtype:
        narrow = min(lhs.dtype, rhs.dtype, key=lambda dtype: dtype.itemsize)
        lhs, rhs = lhs.astype(narrow), rhs.astype(narrow)
    return contract(f"{left},{right}->{out}", lhs, rhs, dtype=wide)


def einsum(context: Context, step: Step, lhs: Any, rhs: Any) -> Any:
    """Multiplies a device's parts of two arrays; slots of experts in blocks of rows where empty slots are skipped."""
    of_slots = [array.dims[:2] == ("E", "C") for array in step.inputs]
    slots = rhs if of_slots[1] else lhs
    packed = isinstance(slots, Ragged)
    if not any(of_slots) or not (packed or in_blocks(context, num_slots=slots.shape[0] * slots.shape[1])):
        return contract_step(step, lhs, rhs)
    result = step.result.dims
    if all(of_slots):
        left, right = (lhs, rhs) if result[1] in step.inputs[0].dims else (rhs, lhs)
        return slot_weight_gradient(left, right, blocks_of(right, context.model))
    weight, of_weight = (lhs, step.inputs[0]) if of_slots[1] else (rhs, step.inputs[1])
    wide = step.result.dtype == "fp32" and not packed
    blocks = blocks_of(slots, context.model)
    return slot_product(slots, weight, blocks, transposed=of_weight.dims[2] not in result, wide=wide)


STEPS = {"einsum": einsum}
