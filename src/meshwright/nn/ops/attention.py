"""Attention steps: which arrays are which, and what the model says of the scores."""

import jax

from meshwright.algebra.ops.attention import AttentionArrays
from meshwright.algebra.steps import Step
from meshwright.nn.attention import choice
from meshwright.nn.attention.ring import Dealt, KeyRing, ring_attention, ring_attention_backward
from meshwright.nn.attention.visibility import AttentionCall, Places, order_of
from meshwright.nn.context import Context


def _call(context: Context, step: Step, arrays: AttentionArrays) -> AttentionCall:
    """What both passes are told besides the arrays."""
    details, (here, everywhere) = step.details, arrays.documents or (None, None)
    return AttentionCall(
        scale=context.model.attention_scale,
        window=None if details.sees_all else details.window,
        softcap=details.softcap,
        sinks=arrays.sinks,
        query=Places(arrays.positions, here),
        key=Places(arrays.key_positions, everywhere),
        order="all" if details.sees_all else order_of(arrays.q, arrays.k, in_order=context.in_order),
    )


def _ring(context: Context, step: Step) -> KeyRing:
    dealt: Dealt = "contiguous" if context.in_order else "zigzag"
    return KeyRing(axes=step.details.ring, dealt=dealt, divergent=context.divergent)


def attention(context: Context, step: Step, *inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The result and its log-sum-exp."""
    arrays = AttentionArrays.of(step, inputs)
    call, qkv = _call(context, step, arrays), (arrays.q, arrays.k, arrays.v)
    if step.details.ring:
        return ring_attention(call, _ring(context, step), *qkv)
    return choice.attention(call, *qkv)


def attention_backward(context: Context, step: Step, *inputs: jax.Array) -> tuple[jax.Array, ...]:
    """Cotangents of queries, keys and values and, where there are any, sinks."""
    arrays = AttentionArrays.of(step, inputs)
    call, qkv = _call(context, step, arrays), (arrays.q, arrays.k, arrays.v)
    if step.details.ring:
        return ring_attention_backward(call, _ring(context, step), arrays.given, *qkv)
    return choice.attention_backward(call, arrays.given, *qkv)


STEPS = {"attention": attention, "attention_backward": attention_backward}
