"""Attention steps: which arrays are which, and what the model says of the scores."""

from typing import Any

import jax

from meshwright.algebra.ops.attention import AttentionArrays
from meshwright.algebra.steps import Step
from meshwright.nn.attention import choice as kernels
from meshwright.nn.attention import ring as rings
from meshwright.nn.attention.visibility import Rule
from meshwright.nn.context import Context


def _facts(context: Context, step: Step, arrays: AttentionArrays) -> dict[str, Any]:
    """What both passes are told besides the arrays."""
    here, everywhere = arrays.documents or (None, None)
    return {
        "positions": arrays.positions,
        "key_positions": arrays.key_positions,
        "documents": here,
        "key_documents": everywhere,
        "sinks": arrays.sinks,
        "scale": context.model.attention_scale,
        "window": step.details.window,
        "softcap": step.details.softcap,
        "in_order": context.in_order,
    }


def _ring_facts(context: Context, axes: tuple[str, ...]) -> dict[str, Any]:
    """What ring attention is told besides."""
    dealt = "contiguous" if context.in_order else "zigzag"
    return {"axes": axes, "dealt": dealt, "divergent": context.divergent}


def _all_seen(context: Context, step: Step, arrays: AttentionArrays) -> dict[str, Any]:
    """The rule and the sight where every key is seen."""
    scale = context.model.attention_scale
    rule = Rule(scale=scale, window=None, softcap=step.details.softcap)
    return {"rule": rule, "sight": kernels.all_seen(arrays.q, arrays.k)}


def attention(context: Context, step: Step, *given: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The result and its log-sum-exp."""
    arrays, axes = AttentionArrays.of(step, given), step.details.ring
    if step.details.sees_all:
        return kernels.look(arrays.q, arrays.k, arrays.v, arrays.sinks, **_all_seen(context, step, arrays))
    facts = _facts(context, step, arrays)
    if axes:
        del facts["in_order"]
        return rings.ring_attention(arrays.q, arrays.k, arrays.v, **facts, **_ring_facts(context, axes))
    return kernels.attention(arrays.q, arrays.k, arrays.v, **facts)


def attention_backward(context: Context, step: Step, *given: jax.Array) -> tuple[jax.Array, ...]:
    """Cotangents of queries, keys and values and, where there are any, sinks."""
    arrays, axes = AttentionArrays.of(step, given), step.details.ring
    dout, o, lse = arrays.given
    q, k, v = arrays.q, arrays.k, arrays.v
    if step.details.sees_all:
        return tuple(kernels.look_back(dout, o, lse, q, k, v, **_all_seen(context, step, arrays)))
    facts = _facts(context, step, arrays)
    if axes:
        del facts["in_order"]
        ring = _ring_facts(context, axes)
        return tuple(rings.ring_attention_backward(dout, o, lse, q, k, v, **facts, **ring))
    return tuple(kernels.attention_backward(dout, o, lse, q, k, v, **facts))


STEPS = {"attention": attention, "attention_backward": attention_backward}
