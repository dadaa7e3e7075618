"""Attention on pages on CPUs, by XLA: tiles run in the order of their list."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from meshwright.nn.activations import capped
from meshwright.nn.attention.kernels.scores import RunningSoftmax
from meshwright.nn.attention.pages import (
    LN2,
    NO_PEAK,
    PagedPart,
    PagedValues,
    PageTiles,
    RaggedRows,
    ruled,
)
from meshwright.nn.contract import floats
from meshwright.nn.order import sum_of_halves

MOST_SLOTS = 1024
"""Most slots of all tiles of an iteration."""


def attend_on_cpu(tiles: PageTiles, parts: Sequence[PagedPart], mixed: PagedValues, out: RaggedRows) -> RaggedRows:
    """Writes each block's attention to ``out`` on CPUs, where each operation of an iteration costs some microseconds.

    Blocks of one query share iterations. Blocks of several queries follow one another, as few of the possible ones
    exist. A tile's weights are relative to a power of two, so that sums are scaled without rounding: a block adds its
    tiles in list order and has the same result whichever tiles share an iteration.
    """
    call, num_blocks, (kv_heads, v_width), block = tiles.call, len(tiles.starts), mixed.values.shape[2:], tiles.block
    per_group, dtype, slots = out[0].shape[1] // kv_heads, parts[0].queries.dtype, tiles.num_pages * tiles.page_len
    lanes = 1 if block > 1 else max(1, min(MOST_SLOTS // slots, max(2, num_blocks)))
    is_latent = mixed.values is parts[0].keys
    # what an iteration needs to know of its tiles is the same in all layers, which then share it
    max_tiles = -(-num_blocks * -(-call.pages.shape[1] // tiles.num_pages) // lanes) * lanes
    tile_ids = jnp.arange(max_tiles, dtype=jnp.int32)
    block_of_tile = jnp.searchsorted(tiles.ends, tile_ids, side="right").astype(jnp.int32)
    block_id = jnp.minimum(block_of_tile, num_blocks - 1)
    seq_id, chunk_id = tiles.sequence[block_id], tiles.chunk[block_id] + tile_ids - tiles.starts[block_id]
    first_row, first_pos = (call.lengths - call.counts)[seq_id] + tiles.row[block_id], tiles.first_positions(chunk_id)
    first_distance = (first_row - first_pos)[:, None]
    num_known = first_distance if call.known is None else (call.known[seq_id] - first_pos)[:, None]
    page_columns = chunk_id[:, None] * tiles.num_pages + jnp.arange(tiles.num_pages)[None]
    page = jnp.clip(call.pages.at[seq_id[:, None], page_columns].get(mode="clip"), 0, len(mixed.values) - 1)
    by_tile: tuple[Array, ...] = block_of_tile, first_distance, num_known, page
    if call.rule or call.chunked:
        by_tile += seq_id, first_row, first_pos
    query_of_row = np.arange(block * per_group, dtype=np.int32) // per_group
    distance_in_tile = (query_of_row[:, None] - tiles.offsets.astype(np.int32)[None])[None]

    def read(pool: Array, pages: Array) -> Array:
        """Returns [lanes, K, slots, width] from whole pages, which are copied before they are transposed."""
        dims = (lanes, tiles.num_pages, *((kv_heads, tiles.page_len) if call.heads_first else pool.shape[1:3]), -1)
        flat_pool = (jnp.swapaxes(pool, 1, 2) if call.heads_first else pool).reshape(len(pool), -1)
        # floats only after the gather: XLA's programs for CPUs would convert the whole pool
        page_entries = floats(flat_pool.at[pages].get(mode="promise_in_bounds")).reshape(dims)
        if not call.heads_first and kv_heads > 1:
            page_entries = lax.optimization_barrier(page_entries)
        return jnp.moveaxis(page_entries, 2 if call.heads_first else 3, 1).reshape(lanes, kv_heads, slots, -1)

    def operand(pool: Array, pages: Array) -> Array:
        # XLA's CPU library needs a contiguous operand in this order, else a slow loop runs
        return lax.optimization_barrier(read(pool, pages).astype(dtype))

    def scaled(array: Array, scale: Array | None, pages: Array) -> Array:
        return array if scale is None else array * jnp.swapaxes(read(scale, pages), 2, 3)

    def step(blocks: Array, queries: list[Array], tile: Array, state: RunningSoftmax) -> RunningSoftmax:
        tile_data = (lax.dynamic_slice_in_dim(array, tile, lanes) for array in by_tile)
        local_block, first_distance, num_known, page, *rule_args = tile_data
        local_block = local_block - blocks[0]
        block_row = jnp.minimum(local_block, len(blocks) - 1)
        tile_keys = [operand(part.keys, page) for part in parts]
        products = [
            scaled(jnp.einsum("WKRH,WKCH->WKRC", q[block_row], k, preferred_element_type=jnp.float32), part.scale, page)
            for q, k, part in zip(queries, tile_keys, parts, strict=True)
        ]
        scores = capped(call.scale * sum(products[1:], start=products[0]), call.softcap)
        distance = first_distance[:, None] + distance_in_tile
        slot_pos = (rule_args[2] if rule_args else jnp.zeros(1, jnp.int32))[:, None] + tiles.offsets[None]
        if call.rule:
            seq_id, first_row, _ = rule_args
            scores = ruled(call.rule, scores, seq_id, first_row[:, None] + np.arange(block)[None], slot_pos)
        is_seen = distance >= 0 if call.known is None else (num_known > tiles.offsets[None])[:, None]
        is_seen = call.within(is_seen, slot_pos[:, None] + distance, slot_pos[:, None])
        scores = jnp.where(is_seen[:, None], scores, -jnp.inf)
        tile_peak = jnp.maximum(jnp.ceil(scores.max(axis=-1) / LN2), NO_PEAK)
        weights = jnp.exp(scores - tile_peak[..., None] * LN2)
        tile_values = tile_keys[0] if is_latent else operand(mixed.values, page)
        # by halves: XLA's own sums depend on what else is in the iteration
        tile_total, weights = sum_of_halves(weights)[..., 0], scaled(weights, mixed.scale, page).astype(dtype)
        value_sums = jnp.einsum("WKRC,WKCH->WKRH", weights, tile_values, preferred_element_type=jnp.float32)
        # tiles of no block here have a place past the last one, which is dropped
        peak = state.peak.at[local_block].max(tile_peak, mode="drop")
        fade, rise = _two_to(state.peak - peak), _two_to(tile_peak - peak[block_row])
        exp_sum = (state.total * fade).at[local_block].add(tile_total * rise, mode="drop")
        value_sums = (state.mixed * fade[..., None]).at[local_block].add(value_sums * rise[..., None], mode="drop")
        return RunningSoftmax(peak, exp_sum, value_sums)

    def attend(blocks: Array, first_tile: Array | int, num_tiles: Array, out: RaggedRows) -> RaggedRows:
        query_rows, _ = tiles.query_rows(blocks)
        queries = [part.queries.at[query_rows].get(mode="clip") for part in parts]
        queries = [array.reshape(len(blocks), block, kv_heads, per_group, -1) for array in queries]
        queries = [jnp.moveaxis(array, 2, 1).reshape(len(blocks), kv_heads, block * per_group, -1) for array in queries]
        zeros = jnp.zeros(queries[0].shape[:3], jnp.float32)
        state = RunningSoftmax(zeros + NO_PEAK, zeros, jnp.zeros((*zeros.shape, v_width), jnp.float32))
        peak, exp_sum, value_sums = lax.fori_loop(
            0, -(-num_tiles // lanes), lambda i, state: step(blocks, queries, first_tile + i * lanes, state), state
        )
        if call.sinks is not None:
            sinks = jnp.tile(call.sinks.astype(jnp.float32).reshape(kv_heads, per_group), (1, block))[None]
            max_peak = jnp.maximum(peak, jnp.ceil(sinks / LN2))
            value_sums = value_sums * _two_to(peak - max_peak)[..., None]
            exp_sum, peak = exp_sum * _two_to(peak - max_peak) + jnp.exp(sinks - max_peak * LN2), max_peak
        mean_values = value_sums / jnp.where(exp_sum > 0, exp_sum, 1.0)[..., None]
        statistics = (peak * LN2, exp_sum) if call.spread else ()
        return tiles.written(blocks, tuple(tiles.by_head(x) for x in (mean_values, *statistics)), out)

    if block == 1:
        return attend(jnp.arange(num_blocks, dtype=jnp.int32), 0, tiles.ends[-1], out)
    count = tiles.ends - tiles.starts
    return lax.fori_loop(0, jnp.sum(tiles.exists), lambda i, out: attend(i[None], tiles.starts[i], count[i], out), out)


def _two_to(power: Array) -> Array:
    """Returns two to the power of integers that are at most 0, exactly; 0 below the normal range of float32."""
    # the biased exponent of a float32, 0 for a power that is too small for one
    bits = jnp.maximum(power.astype(jnp.int32) + 127, 0) << 23
    return lax.bitcast_convert_type(bits, jnp.float32)
