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

    The factor with the wider dtype is narrowed first, unless the result is float32.
    """
    letters = {d: chr(ord("a") + i) for i, d in enumerate(dict.fromkeys((*step.inputs[0].dims, *step.inputs[1].dims)))}
    lhs_dims, rhs_dims, out_dims = ("".join(letters[d] for d in a.dims) for a in (*step.inputs, step.result))
    out_dtype = jnp.float32 if step.result.dtype == "fp32" else None
    rhs = rhs.plain if isinstance(rhs, Turned) and rhs.array.dtype != lhs.dtype else rhs
    if out_dtype is None and not isinstance(rhs, Turned) and lhs.dtype != rhs.dtype:
        narrow_dtype = min(lhs.dtype, rhs.dtype, key=lambda dtype: dtype.itemsize)
        lhs, rhs = lhs.astype(narrow_dtype), rhs.astype(narrow_dtype)
    return contract(f"{lhs_dims},{rhs_dims}->{out_dims}", lhs, rhs, dtype=out_dtype)


def einsum(context: Context, step: Step, lhs: Any, rhs: Any) -> Any:
    """Multiplies a device's blocks of two arrays; products with slots of experts may skip blocks of empty slots."""
    is_slots = [array.dims[:2] == ("E", "C") for array in step.inputs]
    slots = rhs if is_slots[1] else lhs
    is_packed = isinstance(slots, Ragged)
    if not any(is_slots) or not (is_packed or in_blocks(context, num_slots=slots.shape[0] * slots.shape[1])):
        return contract_step(step, lhs, rhs)
    result_dims = step.result.dims
    if all(is_slots):
        in_slots, out_slots = (lhs, rhs) if result_dims[1] in step.inputs[0].dims else (rhs, lhs)
        return slot_weight_gradient(in_slots, out_slots, blocks_of(out_slots, context.model))
    weight, weight_array = (lhs, step.inputs[0]) if is_slots[1] else (rhs, step.inputs[1])
    is_wide = step.result.dtype == "fp32" and not is_packed
    blocks = blocks_of(slots, context.model)
    return slot_product(slots, weight, blocks, transposed=weight_array.dims[2] not in result_dims, wide=is_wide)


STEPS = {"einsum": einsum}
