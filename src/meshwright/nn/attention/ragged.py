"""Attention of packed queries on a cache in pages: sequences have queries and positions of any number.

A tile is a block of queries of one sequence and a few of its pages. The tiles of a call form one list, which is split
over lanes in equal runs, as in flash-decoding: a lane carries the running softmax of its block from tile to tile, and
a block of several lanes is merged by its largest scores and sums. So the number of iterations follows the positions
that queries see, whatever the lengths of sequences are, and no page is copied but those of the tiles at work.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from meshwright.nn.activations import capped
from meshwright.nn.attention.platform import default_platform

TILE_SLOTS = 128
"""Slots of a tile at least, where the page table has as many: pages are not split."""

QUERY_BLOCK = 32
"""Queries of a block of a sequence that has several; those of one query have blocks of one."""

LANES = {"cpu": 4}
"""Tiles of one iteration; `MANY_LANES` elsewhere, where all processors share its products."""

MANY_LANES = 64

LOWEST = float(np.finfo(np.float32).min)


class PagedPart(NamedTuple):
    """Part of the scores: queries of N heads, and pages of the keys' width that they are multiplied with.

    Keys have K heads, N = K * G, in any dtype; with a ``scale`` each slot and head of them is multiplied by its own.
    """

    queries: Float[Array, "R N H"]
    keys: Array
    scale: Float[Array, "Pg Pl K"] | None = None


@dataclass(frozen=True, kw_only=True)
class RaggedCall:
    """Parameters of one attention on pages.

    Sequence b has ``lengths[b]`` positions, p in slot p mod Pl of page ``pages[b, p // Pl]``. Its queries are the rows
    ``first[b]`` to ``first[b] + counts[b] - 1`` and have its last positions. A query sees positions that are not later
    and, with a window, fewer than ``window`` back. ``longest`` is at least the largest count. ``sinks`` are an
    additional logit per head.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Float[Array, " N"] | None = None
    first: Int[Array, " B"]
    counts: Int[Array, " B"]
    lengths: Int[Array, " B"]
    pages: Int[Array, "B Bp"]
    longest: int
    platform: str = field(default_factory=default_platform)


def ragged_attention(
    call: RaggedCall, parts: Sequence[PagedPart], values: Array, value_scale: Float[Array, "Pg Pl K"] | None = None
) -> Float[Array, "R N Hv"]:
    """Returns the values[Pg, Pl, K, Hv], weighted by the softmax of the sum of the parts; 0 in rows of no sequence.

    Products are in the dtype of the queries, scores and sums in float32.
    """
    out = jnp.zeros((*parts[0].queries.shape[:2], values.shape[-1]), parts[0].queries.dtype)
    for block in (1,) if call.longest == 1 else (1, min(call.longest, QUERY_BLOCK)):
        tiles = _tiles(call, block, out.shape[0], values.shape[1])
        out = _pass(call, tiles, parts, values, value_scale, out)
    return out


class _Tiles(NamedTuple):
    """The list of tiles: block i has tiles ``starts[i]`` to ``ends[i] - 1``, on chunks of pages from ``chunk[i]`` on,
    and the rows of its sequence from ``row[i]`` on."""

    sequence: Int[Array, " M"]
    row: Int[Array, " M"]
    chunk: Int[Array, " M"]
    starts: Int[Array, " M"]
    ends: Int[Array, " M"]
    block: int
    num_pages: int


def _tiles(call: RaggedCall, block: int, num_rows: int, page_len: int) -> _Tiles:
    """Lists the tiles of sequences with one query for a block of 1, and of those with several for others."""
    num_seqs, table = call.pages.shape
    num_pages = min(table, -(-TILE_SLOTS // page_len))
    slots = num_pages * page_len
    counts = jnp.where((call.counts == 1) == (block == 1), call.counts, 0)
    until = jnp.cumsum(-(-counts // block))
    own = jnp.arange(num_rows // block + (min(num_seqs, num_rows) if block > 1 else 0), dtype=jnp.int32)
    own = own[: num_seqs * -(-call.longest // block)]
    exists = own < until[-1]
    sequence = jnp.minimum(jnp.searchsorted(until, own, side="right").astype(jnp.int32), num_seqs - 1)
    row = block * (own - (until - (-(-counts // block)))[sequence])
    length = call.lengths[sequence]
    at = length - counts[sequence] + row
    last = jnp.minimum(at + block, length) - 1
    chunk = jnp.zeros_like(at) if call.window is None else jnp.maximum(at - call.window + 1, 0) // slots
    ends = jnp.cumsum(jnp.where(exists, last // slots + 1 - chunk, 0))
    starts = jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]])
    return _Tiles(sequence, row, chunk, starts, ends, block, num_pages)


class _State(NamedTuple):
    """Running softmax of the queries of blocks: G heads of a block's queries are the rows of one matrix for each of K
    key heads."""

    peak: Float[Array, "M K R"]
    total: Float[Array, "M K R"]
    mixed: Float[Array, "M K R Hv"]


def _pass(
    call: RaggedCall,
    tiles: _Tiles,
    parts: Sequence[PagedPart],
    values: Array,
    value_scale: Array | None,
    out: Array,
) -> Array:
    """Returns ``out`` with the rows of the tiles' blocks replaced."""
    num_blocks, kv_heads, block = len(tiles.starts), values.shape[2], tiles.block
    lanes, group = LANES.get(call.platform, MANY_LANES), out.shape[1] // kv_heads
    # each lane has a run of this many tiles
    each = -(-tiles.ends[-1] // lanes)
    lane = jnp.arange(lanes, dtype=jnp.int32)
    rows = (kv_heads, block * group)

    def begin(count: int) -> _State:
        zeros = jnp.zeros((count, *rows), jnp.float32)
        return _State(zeros + LOWEST, zeros, jnp.zeros((count, *rows, values.shape[-1]), jnp.float32))

    def block_of(tile: Array) -> Array:
        return jnp.minimum(jnp.searchsorted(tiles.ends, tile, side="right"), num_blocks - 1).astype(jnp.int32)

    def step(number: Array, carry: tuple[_State, _State]) -> tuple[_State, _State]:
        state, kept = carry
        tile = lane * each + number
        own = block_of(tile)
        fresh = (number == 0) | (tile == tiles.starts[own])
        state = jax.tree.map(lambda old, new: jnp.where(_over(fresh, old), new, old), state, begin(lanes))
        state = _attend(call, tiles, (own, tile), parts, (values, value_scale), state)
        # a block that another lane begins has a row of its own for each further lane
        place = jnp.where(tiles.starts[own] < lane * each, num_blocks + lane, own)
        place = jnp.where(tile < tiles.ends[-1], place, num_blocks + lanes)
        return state, jax.tree.map(lambda all, one: all.at[place].set(one, mode="drop"), kept, state)

    _, kept = lax.fori_loop(0, each, step, (begin(lanes), begin(num_blocks + lanes)))
    peak, total, mixed = _merged(kept, block_of(lane * each), num_blocks)
    if call.sinks is not None:
        sinks = jnp.tile(call.sinks.astype(jnp.float32).reshape(kv_heads, group), (1, block))[None]
        top = jnp.maximum(peak, sinks)
        mixed = mixed * jnp.exp(peak - top)[..., None]
        total = total * jnp.exp(peak - top) + jnp.exp(sinks - top)
    found = mixed / jnp.where(total > 0, total, 1.0)[..., None]
    found = jnp.moveaxis(found.reshape(num_blocks, kv_heads, block, group, -1), 2, 1)
    row, exists = _rows(call, tiles, jnp.arange(num_blocks))
    exists &= (tiles.ends > tiles.starts)[:, None]
    row = jnp.where(exists, row, len(out))
    return out.at[row].set(found.reshape(*row.shape, *out.shape[1:]).astype(out.dtype), mode="drop")


def _attend(
    call: RaggedCall,
    tiles: _Tiles,
    at: tuple[Array, Array],
    parts: Sequence[PagedPart],
    mixed: tuple[Array, Array | None],
    state: _State,
) -> _State:
    """Returns the running softmax after one tile of each lane; ``at`` are the lanes' blocks and tiles."""
    (own, tile), (values, value_scale) = at, mixed
    page_len, kv_heads = values.shape[1:3]
    group = parts[0].queries.shape[1] // kv_heads
    sequence, index = tiles.sequence[own], tiles.chunk[own] + tile - tiles.starts[own]
    number = index[:, None] * tiles.num_pages + jnp.arange(tiles.num_pages)[None]
    page = call.pages.at[sequence[:, None], number].get(mode="clip")

    def read(pool: Array) -> Array:
        """Returns [lanes, K, slots, ...]."""
        found = pool.at[page].get(mode="clip")
        found = jnp.moveaxis(found.reshape(len(page), -1, *found.shape[3:]), 2, 1).astype(dtype)
        # XLA's library for CPUs takes such products from one array in this order, else a slow loop runs
        return lax.optimization_barrier(found) if call.platform == "cpu" else found

    row, exists = _rows(call, tiles, own)
    scores, dtype, read_keys = 0.0, parts[0].queries.dtype, {}
    for part in parts:
        queries = part.queries.at[row].get(mode="clip").reshape(*row.shape, kv_heads, group, -1)
        queries = jnp.moveaxis(queries, 2, 1).reshape(len(row), kv_heads, row.shape[1] * group, -1)
        read_keys[id(part.keys)] = keys = read(part.keys)
        product = jnp.einsum("WKRH,WKCH->WKRC", queries, keys, preferred_element_type=jnp.float32)
        scores = scores + (product if part.scale is None else product * read(part.scale)[:, :, None])
    scores = capped(call.scale * scores, call.softcap)
    # positions of slots, and of queries
    slot = index[:, None] * page.shape[1] * page_len + jnp.arange(page.shape[1] * page_len)[None]
    position = row + (call.lengths - call.counts - call.first)[sequence][:, None]
    back = position[:, :, None] - slot[:, None]
    seen = (back >= 0) & (exists & (tile < tiles.ends[-1])[:, None])[:, :, None]
    seen = seen if call.window is None else seen & (back < call.window)
    scores = jnp.where(jnp.repeat(seen, group, axis=1)[:, None], scores, -jnp.inf)
    peak = jnp.maximum(state.peak, scores.max(axis=-1))
    weights, fade = jnp.exp(scores - peak[..., None]), jnp.exp(state.peak - peak)
    total = state.total * fade + weights.sum(axis=-1)
    if value_scale is not None:
        weights = weights * read(value_scale)[:, :, None].astype(weights.dtype)
    tiled = read_keys[id(values)] if id(values) in read_keys else read(values)
    product = jnp.einsum("WKRC,WKCH->WKRH", weights.astype(dtype), tiled, preferred_element_type=jnp.float32)
    return _State(peak, total, state.mixed * fade[..., None] + product)


def _rows(call: RaggedCall, tiles: _Tiles, own: Array) -> tuple[Array, Array]:
    """Returns the rows [M, block] of queries of blocks, and which of them the sequences have."""
    sequence = tiles.sequence[own]
    row = tiles.row[own][:, None] + jnp.arange(tiles.block, dtype=jnp.int32)[None]
    return call.first[sequence][:, None] + row, row < call.counts[sequence][:, None]


def _merged(kept: _State, began: Array, num_blocks: int) -> _State:
    """Adds the rows that lanes have of a block that another lane began, ``began``, to those of the blocks."""
    own = jax.tree.map(lambda x: x[:num_blocks], kept)
    more = jax.tree.map(lambda x: x[num_blocks:], kept)
    peak = own.peak.at[began].max(more.peak)
    fade, further = jnp.exp(own.peak - peak), jnp.exp(more.peak - peak[began])
    total = (own.total * fade).at[began].add(more.total * further)
    mixed = (own.mixed * fade[..., None]).at[began].add(more.mixed * further[..., None])
    return _State(peak, total, mixed)


def _over(flag: Array, like: Array) -> Array:
    return flag.reshape(-1, *(1,) * (like.ndim - 1))
