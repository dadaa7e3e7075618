"""Attention with a bias per head and bucket of distances."""

from functools import partial
from typing import Any

from jaxtyping import Array

from meshwright.algebra.ops.attention import AttentionArrays
from meshwright.algebra.steps import Step
from meshwright.masks import mods
from meshwright.nn.attention import choice
from meshwright.nn.attention.tiles import Mod
from meshwright.nn.context import Context
from meshwright.nn.ops.attention import call_of


def relative_attention(context: Context, step: Step, *inputs: Array, backward: bool = False) -> tuple[Any, ...]:
    """Returns the result and its log-sum-exp; ``backward`` the cotangents of queries, keys, values and the table."""
    arrays, details = AttentionArrays.of(step, inputs), step.details
    call = call_of(context, step, arrays)

    def bias(first: Any, table: Array) -> mods.Score:
        return mods.distance_bias(table, far=details.distance, causal=not details.sees_all, first=first)

    # the table is the parameter of each head
    score = Mod(partial(bias, call.first_head), (arrays.sinks,))
    call = call.with_score(score, learns=True)
    qkv = arrays.q, arrays.k, arrays.v
    return choice.attention_backward(call, arrays.given, *qkv) if backward else choice.attention(call, *qkv)


STEPS = {
    "relative_attention": relative_attention,
    "relative_attention_backward": partial(relative_attention, backward=True),
}
