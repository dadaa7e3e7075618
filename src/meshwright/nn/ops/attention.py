"""Attention steps: which arrays are which, and what the model says of the scores."""

from typing import Any, NamedTuple

import jax

from meshwright.algebra.steps import Step
from meshwright.nn.attention import choice as kernels
from meshwright.nn.attention import ring as rings
from meshwright.nn.context import Context


class _Arrays(NamedTuple):
    """Inputs of an attention step by what they are; the keys on their way round a ring are those at home."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    positions: jax.Array
    key_positions: jax.Array
    documents: jax.Array | None
    key_documents: jax.Array | None
    sinks: jax.Array | None


def _arrays(step: Step, given: tuple[jax.Array, ...], *, skip: int = 0) -> _Arrays:
    """From the end: q, k, v and both positions; before them documents and sinks; keys on their way first."""
    arrays = step.inputs[skip:]
    inputs = given[skip:]
    documents = [value for array, value in zip(arrays, inputs, strict=True) if array.name == "documents"]
    sinks = [value for array, value in zip(arrays, inputs, strict=True) if array.name.startswith("sinks")]
    q, k, v, positions, key_positions = inputs[-5:]
    here, everywhere = documents or (None, None)
    return _Arrays(q, k, v, positions, key_positions, here, everywhere, sinks[0] if sinks else None)


def _ring(step: Step) -> tuple[str, ...]:
    axes = dict(step.attributes).get("ring", "")
    return tuple(axes.split(",")) if axes else ()


def _facts(context: Context, step: Step, arrays: _Arrays) -> dict[str, Any]:
    """What both passes are told besides the arrays."""
    attributes = dict(step.attributes)
    return {
        "positions": arrays.positions,
        "key_positions": arrays.key_positions,
        "documents": arrays.documents,
        "key_documents": arrays.key_documents,
        "sinks": arrays.sinks,
        "scale": context.model.attention_scale,
        "window": int(attributes["window"]) if "window" in attributes else None,
        "softcap": float(attributes["softcap"]) if "softcap" in attributes else None,
        "in_order": context.in_order,
    }


def _ring_facts(context: Context, axes: tuple[str, ...]) -> dict[str, Any]:
    """What ring attention is told besides."""
    dealt = "contiguous" if context.in_order else "zigzag"
    return {"axes": axes, "dealt": dealt, "divergent": context.divergent}


def attention(context: Context, step: Step, *given: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The result and its log-sum-exp."""
    arrays, axes = _arrays(step, given), _ring(step)
    facts = _facts(context, step, arrays)
    if axes:
        del facts["in_order"]
        return rings.ring_attention(arrays.q, arrays.k, arrays.v, **facts, **_ring_facts(context, axes))
    return kernels.attention(arrays.q, arrays.k, arrays.v, **facts)


def attention_backward(context: Context, step: Step, *given: jax.Array) -> tuple[jax.Array, ...]:
    """Cotangents of queries, keys and values and, where there are any, sinks."""
    dout, o, lse = given[:3]
    arrays = _arrays(step, given, skip=3)
    facts, axes = _facts(context, step, arrays), _ring(step)
    q, k, v = arrays.q, arrays.k, arrays.v
    if axes:
        del facts["in_order"]
        ring = _ring_facts(context, axes)
        return tuple(rings.ring_attention_backward(dout, o, lse, q, k, v, **facts, **ring))
    return tuple(kernels.attention_backward(dout, o, lse, q, k, v, **facts))
