"""Attention on pages on CPUs, by XLA: the tiles are taken in the order of their list."""

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
"""Slots of the tiles of an iteration."""


def attend_on_cpu(tiles: PageTiles, parts: Sequence[PagedPart], mixed: PagedValues, out: RaggedRows) -> RaggedRows:
    """Writes the attention of each block by XLA, where each iteration costs some microseconds an operation.

    Blocks of one query share iterations. Those of several follow one another, as only few of those that could exist do.
    A tile's weights are relative to a power of two, so that sums are scaled without rounding: a block adds its tiles
    one after the other and has the same result whichever tiles share an iteration.
    """
    call, num_blocks, (kv_heads, width), block = tiles.call, len(tiles.starts), mixed.values.shape[2:], tiles.block
    group, dtype, slots = out[0].shape[1] // kv_heads, parts[0].queries.dtype, tiles.num_pages * tiles.page_len
    lanes = 1 if block > 1 else max(1, min(MOST_SLOTS // slots, max(2, num_blocks)))
    is_latent = mixed.values is parts[0].keys
    # what an iteration needs to know of its tiles is the same in all layers, which then share it
    max_tiles = -(-num_blocks * -(-call.pages.shape[1] // tiles.num_pages) // lanes) * lanes
    tile = jnp.arange(max_tiles, dtype=jnp.int32)
    block_of_tile = jnp.searchsorted(tiles.ends, tile, side="right").astype(jnp.int32)
    owner = jnp.minimum(block_of_tile, num_blocks - 1)
    sequence, index = tiles.sequence[owner], tiles.chunk[owner] + tile - tiles.starts[owner]
    row, first_pos = (call.lengths - call.counts)[sequence] + tiles.row[owner], tiles.first_positions(index)
    last_seen = ((row if call.known is None else call.known[sequence] - 1) - first_pos)[:, None]
    page_number = index[:, None] * tiles.num_pages + jnp.arange(tiles.num_pages)[None]
    page = jnp.clip(call.pages.at[sequence[:, None], page_number].get(mode="clip"), 0, len(mixed.values) - 1)
    per_tile: tuple[Array, ...] = block_of_tile, last_seen, page
    if call.rule:
        per_tile += sequence, row, first_pos
    query = np.arange(block * group, dtype=np.int32) // group * (call.known is None)
    distance_in_tile = (query[:, None] - tiles.offsets.astype(np.int32)[None])[None]

    def read(pool: Array, page: Array) -> Array:
        """Returns [lanes, K, slots, width] of whole pages, which are copied as such before they are transposed."""
        sizes = (lanes, tiles.num_pages, *((kv_heads, tiles.page_len) if call.heads_first else pool.shape[1:3]), -1)
        flat = (jnp.swapaxes(pool, 1, 2) if call.heads_first else pool).reshape(len(pool), -1)
        # floats only after the gather: XLA's programs for CPUs would convert the whole pool
        entries = floats(flat.at[page].get(mode="promise_in_bounds")).reshape(sizes)
        if not call.heads_first and kv_heads > 1:
            entries = lax.optimization_barrier(entries)
        return jnp.moveaxis(entries, 2 if call.heads_first else 3, 1).reshape(lanes, kv_heads, slots, -1)

    def operand(pool: Array, page: Array) -> Array:
        # XLA's library for CPUs takes products from one array in this order, else a slow loop runs
        return lax.optimization_barrier(read(pool, page).astype(dtype))

    def scaled(array: Array, scale: Array | None, page: Array) -> Array:
        return array if scale is None else array * jnp.swapaxes(read(scale, page), 2, 3)

    def step(blocks: Array, queries: list[Array], tile: Array, state: RunningSoftmax) -> RunningSoftmax:
        local_block, last_seen, page, *rule_args = (lax.dynamic_slice_in_dim(array, tile, lanes) for array in per_tile)
        local_block = local_block - blocks[0]
        block_row = jnp.minimum(local_block, len(blocks) - 1)
        keys = [operand(part.keys, page) for part in parts]
        products = [
            scaled(jnp.einsum("WKRH,WKCH->WKRC", q[block_row], k, preferred_element_type=jnp.float32), part.scale, page)
            for q, k, part in zip(queries, keys, parts, strict=True)
        ]
        scores = capped(call.scale * sum(products[1:], start=products[0]), call.softcap)
        distance = last_seen[:, None] + distance_in_tile
        is_seen = distance >= 0
        if call.rule:
            sequence, row, first_pos = rule_args
            slot = first_pos[:, None] + tiles.offsets[None]
            scores = ruled(call.rule, scores, sequence, row[:, None] + np.arange(block)[None], slot)
        is_seen = is_seen if call.window is None else is_seen & (distance < call.window)
        scores = jnp.where(is_seen[:, None], scores, -jnp.inf)
        tile_peak = jnp.maximum(jnp.ceil(scores.max(axis=-1) / LN2), NO_PEAK)
        weights = jnp.exp(scores - tile_peak[..., None] * LN2)
        values = keys[0] if is_latent else operand(mixed.values, page)
        # by halves: XLA's own sums depend on what else is in the iteration
        tile_total, weights = sum_of_halves(weights)[..., 0], scaled(weights, mixed.scale, page).astype(dtype)
        sums = jnp.einsum("WKRC,WKCH->WKRH", weights, values, preferred_element_type=jnp.float32)
        # tiles of no block here have a place past the last one, which is dropped
        peak = state.peak.at[local_block].max(tile_peak, mode="drop")
        fade, rise = _two_to(state.peak - peak), _two_to(tile_peak - peak[block_row])
        total = (state.total * fade).at[local_block].add(tile_total * rise, mode="drop")
        sums = (state.mixed * fade[..., None]).at[local_block].add(sums * rise[..., None], mode="drop")
        return RunningSoftmax(peak, total, sums)

    def attend(blocks: Array, first: Array | int, num_tiles: Array, out: RaggedRows) -> RaggedRows:
        row, _ = tiles.query_rows(blocks)
        queries = [part.queries.at[row].get(mode="clip") for part in parts]
        queries = [array.reshape(len(blocks), block, kv_heads, group, -1) for array in queries]
        queries = [jnp.moveaxis(array, 2, 1).reshape(len(blocks), kv_heads, block * group, -1) for array in queries]
        zeros = jnp.zeros(queries[0].shape[:3], jnp.float32)
        state = RunningSoftmax(zeros + NO_PEAK, zeros, jnp.zeros((*zeros.shape, width), jnp.float32))
        peak, total, sums = lax.fori_loop(
            0, -(-num_tiles // lanes), lambda i, state: step(blocks, queries, first + i * lanes, state), state
        )
        if call.sinks is not None:
            sinks = jnp.tile(call.sinks.astype(jnp.float32).reshape(kv_heads, group), (1, block))[None]
            top = jnp.maximum(peak, jnp.ceil(sinks / LN2))
            sums = sums * _two_to(peak - top)[..., None]
            total, peak = total * _two_to(peak - top) + jnp.exp(sinks - top * LN2), top
        result = sums / jnp.where(total > 0, total, 1.0)[..., None]
        statistics = (peak * LN2, total) if call.spread else ()
        return tiles.written(blocks, tuple(tiles.by_head(x) for x in (result, *statistics)), out)

    if block == 1:
        return attend(jnp.arange(num_blocks, dtype=jnp.int32), 0, tiles.ends[-1], out)
    count = tiles.ends - tiles.starts
    return lax.fori_loop(0, jnp.sum(tiles.exists), lambda i, out: attend(i[None], tiles.starts[i], count[i], out), out)


def _two_to(power: Array) -> Array:
    """Returns two to the power of whole numbers that are not positive, exactly."""
    # the biased exponent of a float32, 0 for a power that is too small for one
    bits = jnp.maximum(power.astype(jnp.int32) + 127, 0) << 23
    return lax.bitcast_convert_type(bits, jnp.float32)
