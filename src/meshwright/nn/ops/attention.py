"""Runs attention steps, with settings from the model, the details and the arrays."""

from jaxtyping import Array

from meshwright.algebra.ops.attention import AttentionArrays
from meshwright.algebra.steps import Step
from meshwright.nn.attention import choice
from meshwright.nn.attention.ring import KeyRing, SequenceLayout, ring_attention, ring_attention_backward
from meshwright.nn.attention.visibility import AttentionCall, TokenPositions, mask_kind
from meshwright.nn.context import Context


def _call(context: Context, step: Step, arrays: AttentionArrays) -> AttentionCall:
    """Returns the parameters of both passes."""
    details, (here, everywhere) = step.details, arrays.documents or (None, None)
    return AttentionCall(
        scale=context.model.attention_scale,
        window=None if details.sees_all else details.window,
        softcap=details.softcap,
        sinks=arrays.sinks,
        query=TokenPositions(arrays.positions, here),
        key=TokenPositions(arrays.key_positions, everywhere),
        mask="all" if details.sees_all else mask_kind(arrays.q, arrays.k, in_order=context.in_order),
    )


def _ring(context: Context, step: Step) -> KeyRing:
    layout: SequenceLayout = "contiguous" if context.in_order else "zigzag"
    return KeyRing(axes=step.details.ring, layout=layout, divergent=context.divergent)


def attention(context: Context, step: Step, *inputs: Array) -> tuple[Array, Array]:
    """Returns the result and the log-sum-exp of the scores."""
    arrays = AttentionArrays.of(step, inputs)
    call, qkv = _call(context, step, arrays), (arrays.q, arrays.k, arrays.v)
    if step.details.ring:
        return ring_attention(call, _ring(context, step), *qkv)
    return choice.attention(call, *qkv)


def attention_backward(context: Context, step: Step, *inputs: Array) -> tuple[Array, ...]:
    """Returns cotangents of queries, keys and values and, if there are any, sinks."""
    arrays = AttentionArrays.of(step, inputs)
    call, qkv = _call(context, step, arrays), (arrays.q, arrays.k, arrays.v)
    if step.details.ring:
        return ring_attention_backward(call, _ring(context, step), arrays.given, *qkv)
    return choice.attention_backward(call, arrays.given, *qkv)


STEPS = {"attention": attention, "attention_backward": attention_backward}
