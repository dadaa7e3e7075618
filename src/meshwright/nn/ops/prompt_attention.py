"""Causal attention of packed rows on rows of the same sequence in the same step."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from meshwright.algebra.steps import Step
from meshwright.nn.attention.pages import PagedPart, RaggedCall, SpreadSlots
from meshwright.nn.collectives import first_index
from meshwright.nn.context import Context
from meshwright.nn.ops.cached_attention import attention_of, own_rows


def prompt_attention(context: Context, step: Step, q: Array, k: Array, v: Array, *sequences: Array) -> Any:
    """Returns causal attention within each sequence's rows (as pages of one slot), peaks, and sums of exponentials."""
    first_rows, row_counts = sequences
    first_page = first_rows - first_index(step.inputs[1].axes_of("B"), len(k))
    pages = first_page[:, None] + jnp.arange(context.longest, dtype=first_page.dtype)[None]
    first_rows, row_counts_here, seq_lens = own_rows(step.inputs[0], len(q), first_rows, row_counts, row_counts)
    call = RaggedCall(
        scale=context.model.attention_scale,
        first=first_rows,
        counts=row_counts_here,
        lengths=seq_lens,
        pages=pages,
        spread=SpreadSlots(0, 1),
        longest=context.longest,
    )
    return attention_of(call, [PagedPart(queries=q, keys=k)], v, None)


STEPS = {"prompt_attention": prompt_attention}
