"""Attention of new positions on cached keys and values."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.ops.cached_attention import split_slots
from meshwright.algebra.steps import Step
from meshwright.masks.names import mask_named
from meshwright.nn.attention.pages import PagedPart, RaggedCall, ScoreRule, SpreadSlots
from meshwright.nn.attention.ragged import ragged_attention
from meshwright.nn.cache import LayerCache
from meshwright.nn.collectives import first_index
from meshwright.nn.context import Context
from meshwright.nn.ops import of_arrays
from meshwright.nn.ops.attention import distance_bias, score_of


def ragged_call(
    context: Context, step: Step, cached: LayerCache, queries: Float[Array, "B T N H"], others: tuple[Any, ...]
) -> tuple[RaggedCall, tuple[Any, ...]]:
    """Returns the parameters of the attention, and the inputs that follow them in ``others``.

    ``others`` begin with the first row, number of rows, number of positions and pages of each sequence. Rows and pages
    are numbered over all devices; the call has only the rows of sequences that are on this device.
    """
    first_rows, row_counts, seq_lens, page_table, *other_inputs = others
    known_lengths = seq_lens if step.details.mask or step.details.sees_all else None
    num_heads = queries.shape[2]
    num_pages, page_len = cached.page_sizes
    cache_array = next(array for array in step.inputs if array.dims[1:2] == ("Pl",))
    is_ruled = step.details.score or step.details.mask or step.details.distance
    arrays = [x for x in other_inputs if not isinstance(x, LayerCache)]
    rule = score_rule(context, step, arrays, num_heads) if is_ruled else None
    first_rows, row_counts, seq_lens = own_rows(step.inputs[0], len(queries), first_rows, row_counts, seq_lens)
    slot_axes = cache_array.axes[1]
    spread = SpreadSlots(first_index(slot_axes, page_len), page_len * lax.axis_size(slot_axes)) if slot_axes else None
    call = RaggedCall(
        scale=context.model.attention_scale,
        window=step.details.window,
        chunked=step.details.chunked,
        softcap=None if rule else step.details.softcap,
        rule=rule,
        known=known_lengths,
        first=first_rows,
        counts=row_counts,
        lengths=seq_lens,
        pages=cached.in_pool(page_table - first_index(cache_array.axes[0], num_pages)),
        spread=spread,
        longest=context.longest,
        heads_first=cached.heads_first,
    )
    return call, tuple(other_inputs)


def own_rows(
    queries: ShardedArray, num_rows: int, first: Array, counts: Array, lengths: Array
) -> tuple[Array, Array, Array]:
    """Returns each sequence's first row, number of rows and number of positions, limited to this device's ``num_rows``
    rows. Global first rows become local; positions after the last local row are not counted."""
    axes = queries.axes_of("B")
    return _within(first_index(axes, num_rows), num_rows, first, counts, lengths) if axes else (first, counts, lengths)


def rows_from(call: RaggedCall, start: Array, num_rows: int) -> RaggedCall:
    """Returns the call for ``num_rows`` rows from row ``start`` on."""
    first_rows, row_counts, seq_lens = _within(start, num_rows, call.first, call.counts, call.lengths)
    return replace(call, first=first_rows, counts=row_counts, lengths=seq_lens, longest=min(call.longest, num_rows))


def _within(
    start: Array | int, num_rows: int, first: Array, counts: Array, lengths: Array
) -> tuple[Array, Array, Array]:
    begin_row = first - start
    begin_row, end_row = (jnp.clip(row, 0, num_rows) for row in (begin_row, begin_row + counts))
    return begin_row, end_row - begin_row, lengths - (first + counts - start - end_row)


def score_rule(context: Context, step: Step, arrays: Sequence[Array], num_heads: int) -> ScoreRule:
    """Returns the score rule and mask of a step for this device's heads. Among ``arrays`` integers, [Q, positions] or
    [Q], are the mask's data, and floats the table of a distance bias."""
    score, mask = score_of(context, step), mask_named(step.details.mask) if step.details.mask else None
    first_head, seq_len = first_index(step.inputs[0].axes_of("N"), num_heads), context.seq_len
    data = [array for array in arrays if jnp.issubdtype(array.dtype, jnp.integer)]
    if step.details.distance:
        score = distance_bias(step, next(x for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)), first_head)

    def scored(scores: Array, sequence: Array, head: Array, query: Array, key: Array) -> Array:
        indices = sequence, first_head + head, query, jnp.clip(key, 0, seq_len - 1)
        new_scores = scores if score is None else score(scores, *indices)
        return new_scores if mask is None else jnp.where(mask.make(*data)(*indices), new_scores, -jnp.inf)

    return scored


def attention_of(
    call: RaggedCall, parts: Sequence[PagedPart], values: Array, value_scale: Array | None
) -> Array | tuple[Array, ...]:
    """Returns attention [B, T, N, Hv] on pages; ``call.pages`` selects one layer's among all layers'
    (`LayerCache.pages`). If pages are spread over devices, adds the statistics [B, T, N]."""
    flat_parts = [part._replace(queries=part.queries.reshape(-1, *part.queries.shape[2:])) for part in parts]
    flat_results = ragged_attention(call, flat_parts, values, value_scale)
    mean_values, *statistics = (array.reshape(*parts[0].queries.shape[:2], *array.shape[1:]) for array in flat_results)
    return (mean_values, *statistics) if statistics else mean_values


def scale_by_share(own: Array, share: Array, whole: Array) -> Array:
    """Scales a device's attention by its share of each query's sum of exponentials over all devices."""
    return (own * (share / whole)[..., None]).astype(own.dtype)


def cached_attention(
    context: Context, step: Step, q: Array, k: LayerCache, v: LayerCache, *given: Any
) -> Array | tuple[Array, ...]:
    """Returns attention of each row's position on the layer's keys and values.

    ``given`` are the inputs that `ragged_call` describes, then scales, then data of the mask, then sinks.
    """
    call, inputs = ragged_call(context, step, k, q, given)
    caches = (value for value in (k, v, *inputs) if isinstance(value, LayerCache))
    key_pages, value_pages, *scales = (cache.pages for cache in caches)
    floats = (x for x in inputs if not isinstance(x, LayerCache) and jnp.issubdtype(x.dtype, jnp.floating))
    sinks = None if step.details.distance else next(floats, None)
    key_scale, value_scale = scales or (None, None)
    if sinks is not None and step.more:
        # sinks count once
        sinks = jnp.where(lax.axis_index(split_slots(step)) == 0, sinks, -jnp.inf)
    return attention_of(replace(call, sinks=sinks), [PagedPart(q, key_pages, key_scale)], value_pages, value_scale)


STEPS = {"cached_attention": cached_attention, "scale_by_share": of_arrays(scale_by_share)}
