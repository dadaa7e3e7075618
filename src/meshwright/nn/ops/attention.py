"""Attention steps: builds the call from the model, the step's details and the arrays, and runs it."""

from functools import partial

import numpy as np
from jaxtyping import Array

from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.ops.attention import AttentionArrays, positions_of
from meshwright.algebra.steps import Step
from meshwright.masks import mods
from meshwright.masks.names import mask_named, score_named
from meshwright.masks.ranges import AnyArray
from meshwright.nn.attention import choice
from meshwright.nn.attention.call import AttentionCall
from meshwright.nn.attention.order import SequenceOrder
from meshwright.nn.attention.ring import KeyRing, ring_attention, ring_attention_backward
from meshwright.nn.attention.tiles import DynamicInt, Mod
from meshwright.nn.collectives import first_index
from meshwright.nn.context import Context


def attention(context: Context, step: Step, *inputs: Array, backward: bool = False) -> tuple[Array, ...]:
    """Returns the result and the log-sum-exp of the scores; with ``backward`` the cotangents of queries, keys and
    values and, if the step has one, of the per-head parameter (sinks or bias)."""
    arrays = AttentionArrays.of(step, inputs)
    call = _call(context, step, arrays)
    qkv = arrays.q, arrays.k, arrays.v
    if not step.details.ring:
        return choice.attention_backward(call, arrays.given, *qkv) if backward else choice.attention(call, *qkv)
    ring = KeyRing(axes=step.details.ring, order=context.order, divergent=context.divergent)
    return ring_attention_backward(call, ring, arrays.given, *qkv) if backward else ring_attention(call, ring, *qkv)


def _call(context: Context, step: Step, arrays: AttentionArrays) -> AttentionCall:
    """Returns the parameters of an attention step: its mask and score rule, and the device's rows and heads."""
    sharded_arrays, details = AttentionArrays.of(step), step.details

    def index(array: ShardedArray, value: Array) -> Array | np.ndarray | None:
        dim = positions_of(array)
        # an encoder's positions stay in order
        sequence_order = context.order if dim == "T" else SequenceOrder()
        return sequence_order.index(array.axes_of(dim), value.shape[1])

    first_head = first_index(sharded_arrays.q.axes_of(sharded_arrays.q.dims[2]), arrays.q.shape[2])
    learns = details.distance > 0
    return AttentionCall(
        scale=context.model.attention_scale_of(context.model.dims[sharded_arrays.q.dims[-1]]),
        mask=None if details.sees_all and not details.mask else _mask(context, step, arrays.data),
        score=distance_bias(step, arrays.per_head, first_head) if learns else score_of(context, step),
        learns=learns,
        sinks=None if learns else arrays.per_head,
        q_idx=index(sharded_arrays.q, arrays.q),
        kv_idx=index(sharded_arrays.k, arrays.k),
        first_head=first_head,
    )


def _mask(context: Context, step: Step, data: tuple[Array, ...]) -> Mod:
    """Returns the mask of a step: its rule or causal, within its window or chunk and, for packed rows, the document."""
    mask_rule, window = mask_named(step.details.mask or "causal"), step.details.window
    terms = dict(mask_rule.terms)
    near, name = (mods.chunk, "chunk") if step.details.chunked else (mods.window, "window")
    if window is not None:
        terms[name] = (min(window, *terms.get(name, (window,))),)
    data_arrays = tuple(x if x.ndim == 1 else context.order.restored(x) for x in data)
    if len(data_arrays) > len(mask_rule.data):
        terms["document"] = ()
    num_data, window_masks = len(mask_rule.data), [] if window is None else [near(window)]

    def make(*arrays: Array) -> mods.Mask:
        return mods.and_masks(mask_rule.make(*arrays[:num_data]), *window_masks, *map(mods.document, arrays[num_data:]))

    return Mod(make, data_arrays, terms if mask_rule.terms else {})


def distance_bias(step: Step, table: AnyArray, first_head: DynamicInt) -> Mod:
    """Returns T5's relative position bias as a score rule; ``table`` has this device's heads."""
    max_distance, is_causal = step.details.distance, not step.details.sees_all
    return Mod(lambda held: mods.distance_bias(held, far=max_distance, causal=is_causal, first=first_head), (table,))


def score_of(context: Context, step: Step) -> Mod | None:
    """Returns the score rule of a step, followed by its soft cap; None without both."""
    cap = step.details.softcap
    if not step.details.score:
        return None if cap is None else Mod(partial(mods.softcap, cap), (), {"softcap": (cap,)})
    rule = score_named(step.details.score)
    array_by_name = {"slopes": mods.alibi_slopes(context.model.num_heads)}
    cap_rules, arrays = [] if cap is None else [mods.softcap(cap)], tuple(array_by_name[name] for name in rule.data)
    return Mod(lambda *arrays: mods.then(rule.make(*arrays), *cap_rules), arrays, {"": ()})


STEPS = {"attention": attention, "attention_backward": partial(attention, backward=True)}
