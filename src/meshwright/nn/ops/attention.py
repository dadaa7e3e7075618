"""Runs attention steps, with settings from the model, the details and the arrays."""

from functools import partial
from typing import Any

from jaxtyping import Array

from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.ops.attention import AttentionArrays, positions_of
from meshwright.algebra.steps import Step
from meshwright.masks import mods
from meshwright.masks.names import Rule, mask_named
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
        score=score_of(context, step),
        sinks=arrays.sinks,
        q_idx=index(sharded.q, arrays.q),
        kv_idx=index(sharded.k, arrays.k),
        first_head=first_index(sharded.q.axes_of(sharded.q.dims[2]), arrays.q.shape[2]),
        **others,
    )


def _mask(context: Context, step: Step, data: tuple[Array, ...]) -> Mod:
    """Returns the mask of a step: its rule or causal, within its window and, where rows have several, the document."""
    rule, window = step.details.mask_rule or mask_named("causal"), step.details.window
    terms = dict(rule.terms)
    if window is not None:
        terms["window"] = (min(window, *terms.get("window", (window,))),)
    # the second of each pair has all positions
    arrays = tuple(x if x.ndim == 1 else context.order.restored(x) for x in data[1::2])
    if len(arrays) > len(rule.data):
        terms["document"] = ()
    return Mod(partial(_joined, rule, window), arrays, terms if rule.terms else {})


def _joined(rule: Rule, window: int | None, *arrays: Array) -> mods.Mask:
    count = len(rule.data)
    others = [*([] if window is None else [mods.window(window)]), *map(mods.document, arrays[count:])]
    own = rule.make(*arrays[:count])
    return mods.and_masks(own, *others) if others else own


def score_of(context: Context, step: Step) -> Mod | None:
    """Returns the rule of a step's scores, with its soft cap last."""
    rule, cap = step.details.score_rule, step.details.softcap
    soft = None if cap is None else Mod(partial(mods.softcap, cap), (), {"softcap": (cap,)})
    if rule is None:
        return soft
    known = {"slopes": mods.alibi_slopes(context.model.num_heads)}
    return Mod(partial(_scored, rule, cap), tuple(known[name] for name in rule.data), {"": ()})


def _scored(rule: Rule, cap: float | None, *arrays: Array) -> mods.Score:
    own: mods.Score = rule.make(*arrays)
    return own if cap is None else mods.then(own, mods.softcap(cap))


STEPS = {"attention": attention, "attention_backward": partial(attention, backward=True)}
