"""Runs attention steps, with settings from the model, the details and the arrays."""

from functools import partial

from jaxtyping import Array

from meshwright.algebra.ops.attention import AttentionArrays
from meshwright.algebra.steps import Step
from meshwright.nn.attention import choice
from meshwright.nn.attention.ring import KeyRing, ring_attention, ring_attention_backward
from meshwright.nn.attention.visibility import AttentionCall, TokenPositions, mask_kind
from meshwright.nn.context import Context


def attention(context: Context, step: Step, *inputs: Array, backward: bool = False) -> tuple[Array, ...]:
    """Returns the result and the log-sum-exp of the scores; ``backward`` cotangents of queries, keys and values and, if
    there are any, sinks."""
    arrays = AttentionArrays.of(step, inputs)
    details, (here, everywhere) = step.details, arrays.documents or (None, None)
    call = AttentionCall(
        scale=context.model.attention_scale,
        window=None if details.sees_all else details.window,
        softcap=details.softcap,
        sinks=arrays.sinks,
        query=TokenPositions(arrays.positions, here),
        key=TokenPositions(arrays.key_positions, everywhere),
        mask="all" if details.sees_all else mask_kind(arrays.q, arrays.k, in_order=context.in_order),
    )
    qkv = arrays.q, arrays.k, arrays.v
    if not details.ring:
        return choice.attention_backward(call, arrays.given, *qkv) if backward else choice.attention(call, *qkv)
    in_order = context.in_order
    ring = KeyRing(axes=details.ring, layout="contiguous" if in_order else "zigzag", divergent=context.divergent)
    return ring_attention_backward(call, ring, arrays.given, *qkv) if backward else ring_attention(call, ring, *qkv)


STEPS = {"attention": attention, "attention_backward": partial(attention, backward=True)}
