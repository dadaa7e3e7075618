"""The local kinds of derived steps as JAX functions of one device's blocks: one entry per kind that runs.

Each takes the context, the step and the blocks of the step's inputs, and gives one block for each of its results. The
functions themselves are in the modules of their theme; here is only what they take from a step.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from msgspec.structs import replace

from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.steps import COLLECTIVE_MATMUL, Step
from meshwright.nn.context import Context
from meshwright.nn.experts.slots import slots_aware
from meshwright.nn.ops.attention import attention, attention_backward
from meshwright.nn.ops.cache import CACHE_KINDS
from meshwright.nn.ops.collective_matmul import (
    Factor,
    Product,
    Round,
    all_gather_matmul,
    block_length,
    matmul_reduce_scatter,
)
from meshwright.nn.ops.contract import contract
from meshwright.nn.ops.experts import EXPERT_KINDS
from meshwright.nn.ops.layers import LAYER_KINDS
from meshwright.nn.ops.loss_head import HEAD_KINDS
from meshwright.nn.quantisation import scaled_product

LocalKind = Callable[..., Any]


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


def _einsum(context: Context, step: Step, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return contract_step(step, lhs, rhs)


def _quantised_einsum(context: Context, step: Step, lhs: Any, values: jax.Array, scale: jax.Array) -> Any:
    """The product of the values, in float32, times the scale of each output channel."""
    wide = replace(step, op="einsum", inputs=step.inputs[:2], result=step.result.replace(dtype="fp32"))
    return scaled_product(step, lhs, values, scale, lambda left, right: LOCAL["einsum"](context, wide, left, right))


def _collective_matmul(context: Context, step: Step, *given: jax.Array) -> tuple[jax.Array, ...]:
    """The parts of a collective matmul block by block, and the gathered array where it is one of the results.

    Sums over blocks are made in float32. What is given by no input is the array that goes round.
    """
    values = dict(zip(step.inputs, given, strict=True))
    facts = dict(step.attributes)
    ring = Round(axes=tuple(facts["over"].split(",")), ways=int(facts["ways"]), divergent=context.divergent)
    products = [_block_product(context, part, step.dim, values) for part in step.parts]
    if facts["form"] != "all_gather":
        return (matmul_reduce_scatter(products, ring, length=block_length(products, ring.size)),)
    results = (step.result, *step.more)
    axis, gathers = step.inputs[0].dims.index(step.dim), len(results) > len(products)
    found = all_gather_matmul(given[0], products, ring, axis=axis, gathers=gathers)
    return tuple(
        array.astype(given[0].dtype) if result.dtype == "" else array
        for result, array in zip(results, found, strict=True)
    )


def _block_product(context: Context, part: Step, dim: str, values: Mapping[ShardedArray, jax.Array]) -> Product:
    def axis(array: ShardedArray) -> int | None:
        return array.dims.index(dim) if dim in array.dims else None

    sums = replace(part, result=part.result.replace(dtype="fp32")) if axis(part.result) is None else part
    return Product(
        apply=lambda *factors: LOCAL[part.op](context, sums, *factors),
        factors=tuple(Factor(values[a], axis(a)) if a in values else None for a in part.inputs),
        axis=axis(part.result),
    )


def _add(context: Context, step: Step, first: jax.Array, *others: jax.Array) -> jax.Array:
    for other in others:
        first = first + other
    return first


def _copy(context: Context, step: Step, value: jax.Array) -> jax.Array:
    return value


LOCAL: dict[str, LocalKind] = slots_aware(
    {
        "einsum": _einsum,
        "quantised_einsum": _quantised_einsum,
        COLLECTIVE_MATMUL: _collective_matmul,
        "add": _add,
        "copy": _copy,
        "attention": attention,
        "attention_backward": attention_backward,
        **LAYER_KINDS,
        **EXPERT_KINDS,
        **HEAD_KINDS,
        **CACHE_KINDS,
    }
)
"""Kind of a local step -> its function of (context, step, blocks of the inputs)."""
