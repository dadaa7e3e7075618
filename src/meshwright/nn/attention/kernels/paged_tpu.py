"""Attention on pages on TPUs, by a Pallas kernel that computes a tile per step of its grid."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from meshwright.algebra.sizes import SUBLANES
from meshwright.nn.activations import capped
from meshwright.nn.attention.kernels.scores import LOWEST
from meshwright.nn.attention.pages import PagedPart, PagedValues, PageTiles, RaggedRows, has_heads_first, in_memory
from meshwright.nn.cache import fills_tiles

MOST_ROWS, MOST_PAGES = 256, 16
"""Most rows (queries x heads) of a block, and most pages of a tile. The kernel multiplies all heads with the keys of
all key heads, which costs nothing for few rows and many keys."""

SCALAR_BYTES = 2**18
"""Most bytes of the page table and the list of tiles, which are both in scalar memory."""

LANE = 128
"""Entries of a row of registers on a TPU."""

UNSEEN = -(2**30)
"""A distance, from a query to a slot, that every mask hides."""


def takes_on_tpu(tiles: PageTiles, num_heads: int) -> bool:
    """True on TPUs for blocks of few rows, tiles of few pages, tables that fit scalar memory, and no score rule."""
    call = tiles.call
    is_small = tiles.block * num_heads <= MOST_ROWS and tiles.num_pages <= MOST_PAGES
    num_scalars = call.pages.size + len(tiles.starts) * -(-call.pages.shape[1] // tiles.num_pages)
    is_small &= not call.chunked or (call.window or 0) >= tiles.block  # whose rows are in two chunks at most
    return call.platform == "tpu" and call.rule is None and is_small and 4 * num_scalars <= SCALAR_BYTES


def attend_on_tpu(
    tiles: PageTiles, parts: Sequence[PagedPart], mixed: PagedValues, out: RaggedRows, *, interpret: bool = False
) -> RaggedRows:
    """Writes each block's attention to ``out``, by a kernel that computes a tile per step of its grid and prefetches
    pages. The columns of its scores are (slot, key head) pairs, as a page has them in memory."""
    from jax.experimental import pallas as pl  # Pallas takes time to import
    from jax.experimental.pallas import tpu as pltpu

    call, (page_len, kv_heads, v_width) = tiles.call, mixed.values.shape[1:]
    num_pages, num_blocks = tiles.num_pages, len(tiles.starts)
    heads, dtype = parts[0].queries.shape[1], parts[0].queries.dtype
    num_rows = tiles.block * heads
    max_tiles = num_blocks * -(-call.pages.shape[1] // num_pages)
    block_ids = jnp.minimum(jnp.searchsorted(tiles.ends, jnp.arange(max_tiles), side="right"), num_blocks - 1)
    # a tile's last pages may be beyond the table, and entries without a page may be any number
    page_table = jnp.clip(call.pages, 0, len(mixed.values) - 1)
    query_pos = (call.lengths - call.counts)[tiles.sequence] + tiles.row
    query_pos = query_pos if call.known is None else (call.known - 1)[tiles.sequence]
    place_in_chunk = query_pos % (call.window or 1)
    query_pos = query_pos - (call.spread.first if call.spread else 0)
    scalars = [block_ids, tiles.starts, tiles.chunk, query_pos, place_in_chunk]
    scalars = [x.astype(jnp.int32) for x in (*scalars, tiles.sequence * page_table.shape[1], page_table.reshape(-1))]

    def page(page_in_tile: int, rank: int) -> Any:
        def index(tile: Array, *scalars: Any) -> Any:
            block_ids, starts, chunk, _, _, table_starts, table_entries = scalars
            block_index = block_ids[tile]
            page_column = (chunk[block_index] + tile - starts[block_index]) * num_pages + page_in_tile
            page_id = table_entries[table_starts[block_index] + jnp.minimum(page_column, page_table.shape[1] - 1)]
            return (page_id, *[0] * (rank - 1))

        return index

    def of_block(tile: Array, block_of_tile: Any, *_: Any) -> Any:
        return block_of_tile[tile], 0, 0

    query, head = np.divmod(np.arange(num_rows), heads)
    query = query * (call.known is None)
    heads_first = has_heads_first("tpu", mixed.values, kv_heads)
    # heads that leave rows of a slot's tiles over are read with these rows, and slots of several tiles of few heads as
    # they are: in another shape XLA would copy the pool
    fills_rows, is_narrow = kv_heads == 1 or kv_heads % SUBLANES == 0, max(v_width, parts[0].keys.shape[-1]) <= LANE
    is_whole = heads_first or fills_rows or (fills_tiles(kv_heads) and is_narrow)
    held_heads = kv_heads if is_whole or fills_tiles(kv_heads) else -(-kv_heads // SUBLANES) * SUBLANES
    index_grid = np.indices((num_pages, held_heads, page_len))
    page_in_tile, key_head, slot = (index_grid if heads_first else np.swapaxes(index_grid, 2, 3)).reshape(3, -1)
    slot += page_in_tile * tiles.span
    # all heads are multiplied with the keys of all key heads; the mask leaves each head's own key head
    gaps = np.where((head // (heads // kv_heads))[:, None] == key_head, query[:, None] - slot, UNSEEN).astype(np.int32)
    sinks = jnp.full(heads, LOWEST) if call.sinks is None else call.sinks.astype(jnp.float32)
    start_peak = jnp.broadcast_to(jnp.tile(jnp.maximum(sinks, LOWEST), tiles.block)[:, None], (num_rows, LANE))
    query_of_row = jnp.broadcast_to(jnp.asarray(query, jnp.int32)[:, None], (num_rows, LANE))
    row_index, _ = tiles.query_rows(jnp.arange(num_blocks))
    queries = [part.queries.at[row_index].get(mode="clip").reshape(num_blocks, num_rows, -1) for part in parts]
    is_latent = mixed.values is parts[0].keys

    def of_tiles(scale: Array) -> Array:
        """Returns scales [tiles, 1, columns], gathered by XLA: a page of scales does not fill whole registers."""
        page_column = (tiles.chunk[block_ids] + jnp.arange(max_tiles) - tiles.starts[block_ids])[:, None] * num_pages
        page_column = jnp.minimum(page_column + jnp.arange(num_pages)[None], page_table.shape[1] - 1)
        factors = in_memory("tpu", scale)[page_table[tiles.sequence[block_ids][:, None], page_column]]
        factors = factors if kv_heads == 1 or heads_first else jnp.swapaxes(factors, 2, 3)
        spare = ((0, 0),) * 3 + ((0, held_heads - kv_heads),)
        return (factors if is_whole else jnp.pad(factors, spare)).reshape(max_tiles, 1, -1)

    has_scales, pool_scales = mixed.scale is not None, [*(part.scale for part in parts), mixed.scale]
    scales = [of_tiles(scale) for scale in pool_scales if scale is not None]
    pools = [part.keys for part in parts] + ([] if is_latent else [mixed.values])
    if is_whole:
        pools = [in_memory("tpu", pool).reshape(len(pool), page_len * kv_heads, -1) for pool in pools]
    # keys that all heads share next to latents are narrow and have slots in the lanes, see `nn.cache.cache_layout`
    is_swapped = [is_latent and pool_id > 0 and pool.shape[-1] < LANE for pool_id, pool in enumerate(pools)]
    pools = [jnp.swapaxes(pool, 1, 2) if swap else pool for pool, swap in zip(pools, is_swapped, strict=True)]
    page_shapes = [(1, *pool.shape[1:]) if is_whole else (1, page_len, held_heads, pool.shape[-1]) for pool in pools]

    def kernel(*refs: Any) -> None:
        block_ids, starts, chunk, query_pos, place_in_chunk, _, _, start_peak_ref, gap_ref, row_ref, *array_refs = refs
        query_refs, scale_refs = array_refs[: len(parts)], array_refs[len(parts) :][: len(scales)]
        *page_refs, peak_ref, exp_sum_ref, sums_ref = array_refs[len(parts) + len(scales) :]
        page_refs, out_refs = page_refs[: -len(out_widths)], page_refs[-len(out_widths) :]
        tile = pl.program_id(0)
        block_id = block_ids[tile]

        @pl.when(tile == starts[block_id])
        def begin_block() -> None:
            peak_ref[...] = start_peak_ref[...]
            # a sink counts as a score from before the first key
            exp_sum_ref[...] = jnp.where(start_peak_ref[...] > LOWEST, 1.0, 0.0)
            sums_ref[...] = jnp.zeros((num_rows, v_width), jnp.float32)

        def without_spare(block: Array) -> Array:
            """Returns [slots x rows of heads, width] with 0 in the padding rows, whose content is undefined."""
            head = lax.broadcasted_iota(jnp.int32, block.shape, 1)
            return jnp.where(head < kv_heads, block, 0).reshape(page_len * held_heads, -1)

        def read(pool_index: int) -> Array:
            page_blocks = [ref[0] for ref in page_refs[pool_index * num_pages : (pool_index + 1) * num_pages]]
            # TPUs cast bytes to float32 only
            page_blocks = [x.astype(jnp.float32) if x.dtype.itemsize == 1 else x for x in page_blocks]
            page_blocks = page_blocks if is_whole else [without_spare(x) for x in page_blocks]
            return jnp.concatenate(page_blocks, axis=int(is_swapped[pool_index])).astype(dtype)

        tile_keys = [read(pool_id) for pool_id in range(len(parts))]
        products = (
            lax.dot_general(ref[0], pool_keys, (((1,), (int(not swap),)), ((), ())), preferred_element_type=jnp.float32)
            for ref, pool_keys, swap in zip(query_refs, tile_keys, is_swapped, strict=False)
        )
        if has_scales:
            products = (product * ref[0] for product, ref in zip(products, scale_refs, strict=False))
        scores = capped(call.scale * sum(products, start=jnp.zeros(gaps.shape, jnp.float32)), call.softcap)
        distance = gap_ref[...] + (query_pos[block_id] - (chunk[block_id] + tile - starts[block_id]) * tiles.positions)
        is_seen = distance >= 0
        if call.window is not None:
            place = place_in_chunk[block_id] + row_ref[:, :1]
            place = jnp.where(place < call.window, place, place - call.window)
            is_seen &= distance <= place if call.chunked else distance < call.window
        scores = jnp.where(is_seen, scores, -jnp.inf)
        old_peak = peak_ref[:, :1]
        peak = jnp.maximum(old_peak, jnp.max(scores, axis=1, keepdims=True))
        weights, fade = jnp.exp(scores - peak), jnp.exp(old_peak - peak)
        exp_sum = exp_sum_ref[:, :1] * fade + jnp.sum(weights, axis=1, keepdims=True)
        values = tile_keys[0] if is_latent else read(len(parts))
        weights = weights * scale_refs[-1][0] if has_scales else weights
        out_sums = sums_ref[...] * fade + jnp.dot(weights.astype(dtype), values, preferred_element_type=jnp.float32)
        peak_ref[...] = jnp.broadcast_to(peak, (num_rows, LANE))
        exp_sum_ref[...] = jnp.broadcast_to(exp_sum, (num_rows, LANE))
        sums_ref[...] = out_sums
        # by every tile: what the last one of a block writes stays
        out_refs[0][0] = out_sums / jnp.where(exp_sum > 0, exp_sum, 1.0)
        for ref, statistic in zip(out_refs[1:], (peak, exp_sum), strict=False):
            ref[0] = jnp.broadcast_to(statistic, (num_rows, LANE))

    out_widths = (v_width, LANE, LANE) if call.spread else (v_width,)
    scratch = [pltpu.VMEM((num_rows, num_cols), jnp.float32) for num_cols in (LANE, LANE, v_width)]
    kernel_outputs = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(jnp.maximum(tiles.ends[-1], 1),),
            in_specs=[
                *(pl.BlockSpec(array.shape, lambda *_: (0, 0)) for array in (start_peak, gaps, query_of_row)),
                *(pl.BlockSpec((1, *array.shape[1:]), of_block) for array in queries),
                *(pl.BlockSpec((1, *array.shape[1:]), lambda tile, *_: (tile, 0, 0)) for array in scales),
                # a tile's pages may be anywhere in a pool, so each is a separate operand
                *(pl.BlockSpec(shape, page(i, len(shape))) for shape in page_shapes for i in range(num_pages)),
            ],
            out_specs=[pl.BlockSpec((1, num_rows, num_cols), of_block) for num_cols in out_widths],
            scratch_shapes=scratch,
        ),
        out_shape=[jax.ShapeDtypeStruct((num_blocks, num_rows, num_cols), jnp.float32) for num_cols in out_widths],
        interpret=interpret,
    )(
        *scalars,
        start_peak,
        jnp.asarray(gaps),
        query_of_row,
        *queries,
        *scales,
        *(pool for pool in pools for _ in range(num_pages)),
    )
    attended, *statistics = (array.reshape(num_blocks, tiles.block, heads, -1) for array in kernel_outputs)
    block_results = attended, *(array[..., 0] for array in statistics)
    return tiles.written(jnp.arange(num_blocks), block_results, out)
