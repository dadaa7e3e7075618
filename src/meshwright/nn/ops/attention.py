"""Runs attention steps, with settings from the model, the details and the arrays."""

from functools import partial
from typing import Any

from jaxtyping import Array

from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.ops.attention import AttentionArrays, positions_of
from meshwright.algebra.steps import Step
from meshwright.masks import mods
from meshwright.nn.attention import choice
from meshwright.nn.attention.call import AttentionCall
from meshwright.nn.attention.order import SequenceOrder
from meshwright.nn.attention.ring import KeyRing, ring_attention, ring_attention_backward
from meshwright.nn.attention.tiles import Mod
from meshwright.nn.collectives import first_index
from meshwright.nn.context import Context


def attention(context: Context, step: Step, *inputs: Array, backward: bool = False) -> tuple[Array, ...]:
    """Returns the result and the log-sum-exp of the scores; ``backward`` cotangents of queries, keys and values and, if
    there are any, sinks."""
    arrays = AttentionArrays.of(step, inputs)
    call = call_of(context, step, arrays)
    qkv = arrays.q, arrays.k, arrays.v
    if not step.details.ring:
        return choice.attention_backward(call, arrays.given, *qkv) if backward else choice.attention(call, *qkv)
    ring = KeyRing(axes=step.details.ring, order=context.order, divergent=context.divergent)
    return ring_attention_backward(call, ring, arrays.given, *qkv) if backward else ring_attention(call, ring, *qkv)


def call_of(context: Context, step: Step, arrays: AttentionArrays, **others: Any) -> AttentionCall:
    """Returns the parameters of an attention step: its mask and its scores, and which rows and heads a device has."""
    sharded, details = AttentionArrays.of(step), step.details

    def index(array: ShardedArray, value: Array) -> Any:
        dim = positions_of(array)
        # an encoder's positions stay in order
        order = context.order if dim == "T" else SequenceOrder()
        return order.index(array.axes_of(dim), value.shape[1])

    return AttentionCall(
        scale=context.model.attention_scale,
        mask=None if details.sees_all else _mask(context, step, arrays.documents),
        score=None
        if details.softcap is None
        else Mod(partial(mods.softcap, details.softcap), (), {"softcap": (details.softcap,)}),
        sinks=arrays.sinks,
        q_idx=index(sharded.q, arrays.q),
        kv_idx=index(sharded.k, arrays.k),
        first_head=first_index(sharded.q.axes_of(sharded.q.dims[2]), arrays.q.shape[2]),
        **others,
    )


def _mask(context: Context, step: Step, documents: tuple[Array, ...]) -> Mod:
    window = step.details.window
    terms: dict[str, tuple[Any, ...]] = {"causal": ()}
    if window is not None:
        terms["window"] = (window,)
    # the second array has the numbers of all positions
    ids = [context.order.restored(x) for x in documents[1:]]
    if ids:
        terms["document"] = ()
    return Mod(partial(_causal, window), tuple(ids), terms)


def _causal(window: int | None, *documents: Array) -> mods.Mask:
    plain = mods.causal() if window is None else mods.sliding_window(window)
    return mods.and_masks(plain, *map(mods.document, documents))


STEPS = {"attention": attention, "attention_backward": partial(attention, backward=True)}
