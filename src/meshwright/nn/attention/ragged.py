"""Attention of packed queries on a cache in pages: each sequence may have any number of queries and positions.

A tile is a block of queries of one sequence and a few of its pages. The tiles of a call form one list, which is split
over lanes in equal runs, as in flash-decoding: a lane carries the running softmax of its block from tile to tile, and
the states of a block that is split over lanes are merged by their largest scores and sums. So the number of iterations
depends only on the total of visible positions, and only pages of the current tiles are copied. A CPU runs the tiles in
list order, and a row's result does not depend on the other rows.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from meshwright.nn.activations import capped
from meshwright.nn.attention.kernels.paged_cpu import attend_on_cpu
from meshwright.nn.attention.kernels.paged_tpu import attend_on_tpu, takes_on_tpu
from meshwright.nn.attention.kernels.scores import LOWEST, RunningSoftmax
from meshwright.nn.attention.pages import (
    NOTHING_SEEN,
    PagedPart,
    PagedValues,
    PageTiles,
    RaggedCall,
    RaggedRows,
    has_heads_first,
    in_memory,
    page_tiles,
    ruled,
)

QUERY_BLOCK, CPU_ROWS = 32, 128
"""Queries per block of a sequence with several queries (else one). On CPUs instead the most rows of such a block, which
are queries x query heads per key head."""

LANES = 64
"""Tiles of one iteration, one per lane, whose products share all processors of a chip."""


def ragged_attention(
    call: RaggedCall, parts: Sequence[PagedPart], values: Array, value_scale: Float[Array, "Pg Pl K"] | None = None
) -> RaggedRows:
    """Returns values[Pg, Pl, K, Hv] weighted by the softmax of the sum of the parts' scores; 0 in rows of no sequence.

    Products are in the dtype of the queries, scores and sums in float32. If pages are spread over devices, the largest
    scores and the sums of exponentials are returned too.
    """
    rows, heads = parts[0].queries.shape[:2]
    out: RaggedRows = (jnp.zeros((rows, heads, values.shape[-1]), parts[0].queries.dtype),)
    if call.spread:
        out += (jnp.full((rows, heads), NOTHING_SEEN, jnp.float32), jnp.ones((rows, heads), jnp.float32))
    paged_values = PagedValues(values, value_scale)
    is_cpu = call.platform == "cpu"
    max_block = max(8, CPU_ROWS * values.shape[2] // heads) if is_cpu else QUERY_BLOCK
    # sequences of one query have blocks of their own, else most rows of their blocks would be empty
    for block_len in (1,) if call.longest == 1 else (1, min(call.longest, max_block)):
        tiles = page_tiles(call, block_len, rows, values.shape[1])
        attend_blocks = attend_on_tpu if takes_on_tpu(tiles, heads) else _attend_by_lanes
        out = (attend_on_cpu if is_cpu else attend_blocks)(tiles, parts, paged_values, out)
    return out


def _attend_by_lanes(tiles: PageTiles, parts: Sequence[PagedPart], v_pages: PagedValues, out: RaggedRows) -> RaggedRows:
    """Writes each block's attention to ``out``, by XLA, with one tile of every lane per iteration.

    In a running softmax [M, K, R], the R rows of a key head are the block's queries times the G query heads of a group.
    """
    call, num_blocks, (kv_heads, v_width), block = tiles.call, len(tiles.starts), v_pages.values.shape[2:], tiles.block
    num_lanes, group_size = min(LANES, num_blocks) if block > 1 else LANES, parts[0].queries.shape[1] // kv_heads
    is_latent, to_memory = v_pages.values is parts[0].keys, partial(in_memory, call.platform)
    parts = [part._replace(**jax.tree.map(to_memory, {"keys": part.keys, "scale": part.scale})) for part in parts]
    v_pages = jax.tree.map(to_memory, v_pages)
    # the same array again, so that `_add_tiles` reads the latents of a tile once
    v_pages = v_pages._replace(values=parts[0].keys) if is_latent else v_pages
    # each lane has a run of this many tiles
    tiles_per_lane = -(-tiles.ends[-1] // num_lanes)
    lane_ids = jnp.arange(num_lanes, dtype=jnp.int32)
    state_dims = (kv_heads, block * group_size)

    def begin(num_states: int) -> RunningSoftmax:
        zeros = jnp.zeros((num_states, *state_dims), jnp.float32)
        return RunningSoftmax(zeros + LOWEST, zeros, jnp.zeros((num_states, *state_dims, v_width), jnp.float32))

    def block_of(tile: Array) -> Array:
        return jnp.minimum(jnp.searchsorted(tiles.ends, tile, side="right"), num_blocks - 1).astype(jnp.int32)

    def step(tile_no: Array, carry: tuple[RunningSoftmax, RunningSoftmax]) -> tuple[RunningSoftmax, RunningSoftmax]:
        state, state_by_row = carry
        tile_of_lane = lane_ids * tiles_per_lane + tile_no
        block_ids = block_of(tile_of_lane)
        is_first_tile = (tile_no == 0) | (tile_of_lane == tiles.starts[block_ids])
        state = jax.vmap(lambda is_new, *states: jax.tree.map(partial(jnp.where, is_new), *states))(
            is_first_tile, begin(num_lanes), state
        )
        state = _add_tiles(tiles, (block_ids, tile_of_lane), parts, v_pages, state)
        # a block that another lane begins has a row of its own for each further lane
        state_row = jnp.where(tiles.starts[block_ids] < lane_ids * tiles_per_lane, num_blocks + lane_ids, block_ids)
        state_row = jnp.where(tile_of_lane < tiles.ends[-1], state_row, num_blocks + num_lanes)
        return state, jax.tree.map(lambda old, new: old.at[state_row].set(new, mode="drop"), state_by_row, state)

    _, state_by_row = lax.fori_loop(0, tiles_per_lane, step, (begin(num_lanes), begin(num_blocks + num_lanes)))
    peak, exp_sum, value_sums = _merged(state_by_row, block_of(lane_ids * tiles_per_lane), num_blocks)
    if call.sinks is not None:
        sinks = jnp.tile(call.sinks.astype(jnp.float32).reshape(kv_heads, group_size), (1, block))[None]
        peak_with_sinks = jnp.maximum(peak, sinks)
        value_sums = value_sums * jnp.exp(peak - peak_with_sinks)[..., None]
        exp_sum, peak = exp_sum * jnp.exp(peak - peak_with_sinks) + jnp.exp(sinks - peak_with_sinks), peak_with_sinks
    attended = value_sums / jnp.where(exp_sum > 0, exp_sum, 1.0)[..., None]
    statistics = (peak, exp_sum) if call.spread else ()
    results = tuple(tiles.by_head(x) for x in (attended, *statistics))
    return tiles.written(jnp.arange(num_blocks), results, out)


def _add_tiles(
    tiles: PageTiles,
    at: tuple[Array, Array],
    parts: Sequence[PagedPart],
    mixed: PagedValues,
    state: RunningSoftmax,
) -> RunningSoftmax:
    """Returns the running softmax after one more tile of each lane; ``at`` has the lanes' block and tile indices."""
    call, (block_ids, tile_ids), (v_pages, value_scale) = tiles.call, at, mixed
    kv_heads, num_slots = state.peak.shape[1], tiles.num_pages * tiles.page_len
    group_size = parts[0].queries.shape[1] // kv_heads
    sequence, chunk_index = tiles.sequence[block_ids], tiles.chunk[block_ids] + tile_ids - tiles.starts[block_ids]
    page_columns = chunk_index[:, None] * tiles.num_pages + jnp.arange(tiles.num_pages)[None]
    # pages past the end of the table are clipped: their slots are later than every query
    pages = call.pages.at[sequence[:, None], page_columns].get(mode="clip")

    def read(pool: Array) -> Array:
        """Returns [lanes, K, slots, width]."""
        page_values = pool.at[pages].get(mode="clip")
        if kv_heads > 1:
            page_values = jnp.moveaxis(page_values, 2 if has_heads_first(call.platform, pool, kv_heads) else 3, 1)
        return page_values.reshape(len(pages), kv_heads, num_slots, -1)

    def operand(pool: Array) -> Array:
        return read(pool).astype(dtype)

    def scaled(array: Array, scale: Array | None) -> Array:
        return array if scale is None else array * jnp.swapaxes(read(scale), 2, 3)

    query_rows, has_query = tiles.query_rows(block_ids)
    dtype = parts[0].queries.dtype
    tile_keys = [operand(part.keys) for part in parts]

    def product(part: PagedPart, keys: Array) -> Array:
        queries = part.queries.at[query_rows].get(mode="clip").reshape(*query_rows.shape, kv_heads, group_size, -1)
        queries = jnp.moveaxis(queries, 2, 1).reshape(len(query_rows), kv_heads, query_rows.shape[1] * group_size, -1)
        products = jnp.einsum("WKRH,WKCH->WKRC", queries, keys, preferred_element_type=jnp.float32)
        return scaled(products, part.scale)

    first_product, *other_products = map(product, parts, tile_keys)
    scores = capped(call.scale * sum(other_products, start=first_product), call.softcap)
    # positions of slots, and of queries
    slot_pos = tiles.first_positions(chunk_index)[:, None] + tiles.offsets[None]
    query_pos = query_rows + (call.lengths - call.counts - call.first)[sequence][:, None]
    is_seen = (
        query_pos[:, :, None] >= slot_pos[:, None]
        if call.known is None
        else (slot_pos < call.known[sequence][:, None])[:, None]
    )
    is_seen = is_seen & (has_query & (tile_ids < tiles.ends[-1])[:, None])[:, :, None]
    is_seen = call.within(is_seen, query_pos[:, :, None], slot_pos[:, None])
    if call.rule:
        scores = ruled(call.rule, scores, sequence, query_pos, slot_pos)
    scores = jnp.where(jnp.repeat(is_seen, group_size, axis=1)[:, None], scores, -jnp.inf)
    peak = jnp.maximum(state.peak, scores.max(axis=-1))
    weights, fade = jnp.exp(scores - peak[..., None]), jnp.exp(state.peak - peak)
    exp_sum = state.total * fade + weights.sum(axis=-1)
    tile_values = tile_keys[0] if v_pages is parts[0].keys else operand(v_pages)
    weights = scaled(weights, value_scale).astype(dtype)
    value_sums = jnp.einsum("WKRC,WKCH->WKRH", weights, tile_values, preferred_element_type=jnp.float32)
    return RunningSoftmax(peak, exp_sum, state.mixed * fade[..., None] + value_sums)


def _merged(states: RunningSoftmax, began: Array, num_blocks: int) -> RunningSoftmax:
    """Merges each lane's extra state into the block that an earlier lane began; ``began`` is that block by lane."""
    block_states = jax.tree.map(lambda x: x[:num_blocks], states)
    lane_states = jax.tree.map(lambda x: x[num_blocks:], states)
    peak = block_states.peak.at[began].max(lane_states.peak)
    fade, lane_fade = jnp.exp(block_states.peak - peak), jnp.exp(lane_states.peak - peak[began])
    exp_sum = (block_states.total * fade).at[began].add(lane_states.total * lane_fade)
    value_sums = (block_states.mixed * fade[..., None]).at[began].add(lane_states.mixed * lane_fade[..., None])
    return RunningSoftmax(peak, exp_sum, value_sums)
