"""Attention of a step's rows on the latents that were in the cache before the step."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from meshwright.algebra.generation.program import scale_name
from meshwright.algebra.ops.past_latent_attention import chunk_rows
from meshwright.algebra.steps import Step
from meshwright.nn.attention.pages import NOTHING_SEEN, PagedPart, SpreadSlots
from meshwright.nn.attention.ragged import ragged_attention
from meshwright.nn.cache import LayerCache
from meshwright.nn.context import Context
from meshwright.nn.contract import Turned
from meshwright.nn.ops.cached_attention import ragged_call, rows_from
from meshwright.nn.quantisation import dequantised


def past_latent_attention(
    context: Context, step: Step, q: Array, latent: LayerCache, shared: LayerCache, *given: Any
) -> tuple[Array, ...]:
    """Returns attention [B, T, N, Hv] on the positions before each sequence's rows, largest scores and sums of
    exponentials.

    Rows are processed in chunks, from the first to the last row of a sequence with earlier positions."""
    call, other_inputs = ragged_call(context, step, latent, q, given)
    past_lengths, unrotated_width = call.lengths - call.counts, context.model.qk_nope_head_dim
    call = replace(call, known=past_lengths, spread=SpreadSlots(0, latent.page_sizes[1]))
    caches = (latent, shared, *(x for x in other_inputs if isinstance(x, LayerCache)))
    latents, shared_keys, *scales = (cache.pages[:, :, None] for cache in caches)
    latent_scale, shared_scale = scales or (None, None)
    inputs = dict(zip((array.name for array in step.inputs), (q, latent, shared, *given), strict=True))
    dims = {array.name: array.dims for array in step.inputs}
    weight_names = [array.name for array in step.inputs if "Rkv" in array.dims and "Pl" not in array.dims][:2]

    def weight(name: str) -> Array:
        raw = inputs[name].plain if isinstance(inputs[name], Turned) else inputs[name]
        scale = scale_name(name)
        return (dequantised(raw, inputs[scale], dims[name], dims[scale]) if scale in inputs else raw).astype(q.dtype)

    wk, wv = (jnp.moveaxis(weight(name), dims[name].index("Rkv"), 0) for name in weight_names)
    num_rows, num_heads = q.shape[0], q.shape[2]
    chunk_len = int(chunk_rows(num_rows, num_heads * wk.shape[0]))

    def chunk(chunk_index: Array, results_so_far: tuple[Array, ...]) -> tuple[Array, ...]:
        start_row = jnp.minimum(chunk_index * chunk_len, num_rows - chunk_len)
        queries = lax.dynamic_slice_in_dim(q[:, 0], start_row, chunk_len)
        absorbed_queries = jnp.einsum("bnh,rnh->bnr", queries[..., :unrotated_width], wk)
        parts = [
            PagedPart(absorbed_queries, latents, latent_scale),
            PagedPart(queries[..., unrotated_width:], shared_keys, shared_scale),
        ]
        mixed, *statistics = ragged_attention(rows_from(call, start_row, chunk_len), parts, latents, latent_scale)
        chunk_results = jnp.einsum("bnr,rnv->bnv", mixed, wv), *statistics
        return tuple(
            lax.dynamic_update_slice_in_dim(array, chunk_part.astype(array.dtype), start_row, 0)
            for array, chunk_part in zip(results_so_far, chunk_results, strict=True)
        )

    has_past = (past_lengths > 0) & (call.counts > 0)
    first_chunk = jnp.min(jnp.where(has_past, call.first, num_rows)) // chunk_len
    end_row = jnp.max(jnp.where(has_past, call.first + call.counts, 0))
    zero_rows = jnp.zeros((num_rows, num_heads, wv.shape[-1]), q.dtype)
    no_peak = jnp.full((num_rows, num_heads), NOTHING_SEEN, jnp.float32)
    results = lax.fori_loop(first_chunk, -(-end_row // chunk_len), chunk, (zero_rows, no_peak, jnp.ones_like(no_peak)))
    return tuple(array[:, None] for array in results)


STEPS = {"past_latent_attention": past_latent_attention}
