"""The local kinds of derived steps as JAX functions of one device's blocks: one entry per kind that runs.

Each takes the context, the step and the blocks of the step's inputs, and gives one block for each of its results. The
functions themselves are in the modules of their theme; here is only what they take from a step.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from msgspec.structs import replace

from meshwright.algebra.steps import Step
from meshwright.nn.attention_kinds import attention, attention_backward
from meshwright.nn.cache_kinds import CACHE_KINDS
from meshwright.nn.context import Context
from meshwright.nn.experts_kinds import EXPERT_KINDS
from meshwright.nn.experts_slots import slots_aware
from meshwright.nn.head_kinds import HEAD_KINDS
from meshwright.nn.layer_kinds import LAYER_KINDS
from meshwright.nn.quantisation import scaled_product

LocalKind = Callable[..., Any]


def contract_step(step: Step, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """The local contraction of a step: dims of the same name are the same dim."""
    letters = {d: chr(ord("a") + i) for i, d in enumerate(dict.fromkeys((*step.inputs[0].dims, *step.inputs[1].dims)))}
    left, right, out = ("".join(letters[d] for d in a.dims) for a in (*step.inputs, step.result))
    wide = jnp.float32 if step.result.dtype == "fp32" else None
    return jnp.einsum(f"{left},{right}->{out}", lhs, rhs, preferred_element_type=wide)


def _einsum(context: Context, step: Step, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return contract_step(step, lhs, rhs)


def _quantised_einsum(context: Context, step: Step, lhs: Any, values: jax.Array, scale: jax.Array) -> Any:
    """The product of the values, in float32, times the scale of each output channel."""
    wide = replace(step, op="einsum", inputs=step.inputs[:2], result=step.result.replace(dtype="fp32"))
    return scaled_product(step, lhs, values, scale, lambda left, right: LOCAL["einsum"](context, wide, left, right))


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
