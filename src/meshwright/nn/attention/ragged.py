"""Attention of packed queries on a cache in pages: sequences have queries and positions of any number.

A tile is a block of queries of one sequence and a few of its pages. The tiles of a call form one list, which is split
over lanes in equal runs, as in flash-decoding: a lane carries the running softmax of its block from tile to tile, and
a block of several lanes is merged by its largest scores and sums. So the number of iterations follows the positions
that queries see, whatever the lengths of sequences are, and no page is copied but those of the tiles at work. A CPU
takes the tiles in the order of the list, and a row's result does not depend on the other rows.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from meshwright.nn.activations import capped
from meshwright.nn.attention.kernels.scores import LOWEST, RunningSoftmax
from meshwright.nn.attention.platform import default_platform
from meshwright.nn.contract import floats
from meshwright.nn.order import sum_of_halves

TILE_SLOTS = 128
"""Slots of a tile at least, where the page table has as many: pages are not split."""

QUERY_BLOCK = 32
"""Queries of a block of a sequence that has several; those of one query have blocks of one."""

LANES = 64
"""Tiles of one iteration, in whose products all processors of a chip share."""

CPU_TILE_SLOTS, CPU_SLOTS, CPU_ROWS = (32, 128), 1024, 128
"""On CPUs slots of a tile at least, for blocks of one query and of several, slots of an iteration at most, and rows of
a block of several, queries x heads of a key head."""

LN2, NO_PEAK = math.log(2.0), -(2.0**22)
"""On CPUs largest scores are whole numbers, of powers of two, and at least this."""

NOTHING_SEEN = NO_PEAK * LN2
"""The largest score of a query that sees nothing, whose sum of exponentials is 1."""

LANE = 128
"""Entries of a row of registers on a TPU."""

UNSEEN = -(2**30)
"""A distance, from a query to a slot, that no mask admits."""


class PagedPart(NamedTuple):
    """Part of the scores: queries of N heads, and pages of the keys' width that they are multiplied with.

    Keys have K heads, N = K * G, in any dtype; with a ``scale`` each slot and head of them is multiplied by its own.
    """

    queries: Float[Array, "R N H"]
    keys: Array
    scale: Float[Array, "Pg Pl K"] | None = None


class PagedValues(NamedTuple):
    """Pages of values, and the scale of each slot and head."""

    values: Float[Array, "Pg Pl K Hv"]
    scale: Float[Array, "Pg Pl K"] | None = None


@dataclass(frozen=True, kw_only=True)
class RaggedCall:
    """Parameters of one attention on pages.

    Sequence b has ``lengths[b]`` positions, p in slot p mod Pl of page ``pages[b, p // Pl]``. Its queries are the rows
    ``first[b]`` to ``first[b] + counts[b] - 1`` and have its last positions. A query sees positions that are not later
    and, with a window, fewer than ``window`` back. ``longest`` is at least the largest count. ``sinks`` are an
    additional logit per head. Of pages that are ``spread`` over devices this one has some slots. If sequences have so
    many positions in ``known``, all of their queries see these, and no others. A ``rule`` changes scores, and may
    forbid some.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Float[Array, " N"] | None = None
    first: Int[Array, " B"]
    counts: Int[Array, " B"]
    lengths: Int[Array, " B"]
    pages: Int[Array, "B Bp"]
    spread: "SpreadSlots | None" = None
    rule: "ScoreRule | None" = None
    known: Int[Array, " B"] | None = None
    longest: int
    platform: str = field(default_factory=default_platform)
    heads_first: bool = False
    """On CPUs, that pools are views of arrays [Pg, K, Pl, ...], as a CPU multiplies them without transposing."""


ScoreRule = Callable[[Array, Array, Array, Array, Array], Array]
"""Returns scores, minus infinity where a mask forbids, of scores, sequences, heads, queries' and keys' positions."""


@dataclass(frozen=True)
class SpreadSlots:
    """The slots of every page that a device has: those from ``first`` on, of ``page_len`` on all devices."""

    first: Int[Array, ""] | int
    page_len: int


RaggedRows = tuple[Array, ...]
"""Of each row and head the result [R, N, Hv], and if asked for the largest score and the sum of exponentials."""


def ragged_attention(
    call: RaggedCall, parts: Sequence[PagedPart], values: Array, value_scale: Float[Array, "Pg Pl K"] | None = None
) -> RaggedRows:
    """Returns the values[Pg, Pl, K, Hv], weighted by the softmax of the sum of the parts; 0 in rows of no sequence.

    Products are in the dtype of the queries, scores and sums in float32. Largest scores and sums of exponentials follow
    if pages are spread over devices.
    """
    rows, heads = parts[0].queries.shape[:2]
    out: RaggedRows = (jnp.zeros((rows, heads, values.shape[-1]), parts[0].queries.dtype),)
    if call.spread:
        out += (jnp.full((rows, heads), NOTHING_SEEN, jnp.float32), jnp.ones((rows, heads), jnp.float32))
    mixed = PagedValues(values, value_scale)
    on_cpu = call.platform == "cpu"
    max_block = max(8, CPU_ROWS * values.shape[2] // heads) if on_cpu else QUERY_BLOCK
    # sequences of one query have blocks of their own, else most rows of their blocks would be empty
    for block in (1,) if call.longest == 1 else (1, min(call.longest, max_block)):
        tiles = _tiles(call, block, rows, values.shape[1])
        if on_cpu:
            out = _by_turns(call, tiles, parts, mixed, out)
            continue
        attend_blocks = _by_kernel if _kernel_takes(call, tiles, heads) else _by_lanes
        results = attend_blocks(call, tiles, parts, mixed)
        out = _with_blocks(call, tiles, jnp.arange(len(tiles.starts)), results, out)
    return out


class _Tiles(NamedTuple):
    """The list of tiles: block i has tiles ``starts[i]`` to ``ends[i] - 1``, on chunks of pages from ``chunk[i]`` on,
    and the rows of its sequence from ``row[i]`` on. The first blocks exist. Tiles have ``num_pages`` pages; a page has
    ``page_len`` slots here and ``span`` on all devices."""

    sequence: Int[Array, " M"]
    row: Int[Array, " M"]
    chunk: Int[Array, " M"]
    starts: Int[Array, " M"]
    ends: Int[Array, " M"]
    exists: Bool[Array, " M"]
    block: int
    num_pages: int
    page_len: int
    span: int

    @property
    def positions(self) -> int:
        """Positions of a tile on all devices."""
        return self.num_pages * self.span

    @property
    def offsets(self) -> np.ndarray:
        """Positions of a tile's slots here, after that of the first of them."""
        return (np.arange(self.num_pages)[:, None] * self.span + np.arange(self.page_len)).ravel()


def _tiles(call: RaggedCall, block: int, num_rows: int, page_len: int) -> _Tiles:
    """Lists the tiles of sequences with one query for a block of 1, and of those with several for others."""
    num_seqs, pages_per_seq = call.pages.shape
    min_slots = CPU_TILE_SLOTS[block > 1] if call.platform == "cpu" else TILE_SLOTS
    num_pages = min(pages_per_seq, -(-min_slots // page_len))
    span = call.spread.page_len if call.spread else page_len
    tile_positions = num_pages * span
    counts = jnp.where((call.counts == 1) == (block == 1), call.counts, 0)
    block_ends = jnp.cumsum(-(-counts // block))
    numbers = jnp.arange(num_rows // block + (min(num_seqs, num_rows) if block > 1 else 0), dtype=jnp.int32)
    numbers = numbers[: num_seqs * (1 if block == 1 else -(-call.longest // block))]
    exists = numbers < block_ends[-1]
    sequence = jnp.minimum(jnp.searchsorted(block_ends, numbers, side="right").astype(jnp.int32), num_seqs - 1)
    row = block * (numbers - (block_ends - (-(-counts // block)))[sequence])
    length = call.lengths[sequence]
    query = length - counts[sequence] + row
    last_position = (jnp.minimum(query + block, length) if call.known is None else call.known[sequence]) - 1
    first_seen = jnp.zeros_like(query) if call.window is None else jnp.maximum(query - call.window + 1, 0)
    first_chunk, end_chunk = first_seen // tile_positions, last_position // tile_positions + 1
    ends = jnp.cumsum(jnp.where(exists, end_chunk - first_chunk, 0))
    starts = jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]])
    return _Tiles(sequence, row, first_chunk, starts, ends, exists, block, num_pages, page_len, span)


def _first_positions(call: RaggedCall, tiles: _Tiles, index: Array) -> Array:
    """Returns the positions [M] of the first slots here of chunks ``index`` of the pages of sequences."""
    return index * tiles.positions + (call.spread.first if call.spread else 0)


def _by_lanes(call: RaggedCall, tiles: _Tiles, parts: Sequence[PagedPart], mixed: PagedValues) -> RaggedRows:
    """Returns the attention of each block by XLA, a tile of every lane at a time.

    In a running softmax, [M, K, R], the G heads of a block's queries are the rows of one matrix for each key head.
    """
    num_blocks, (kv_heads, width), block = len(tiles.starts), mixed.values.shape[2:], tiles.block
    lanes, group = min(LANES, num_blocks) if block > 1 else LANES, parts[0].queries.shape[1] // kv_heads
    is_latent, to_memory = mixed.values is parts[0].keys, partial(_in_memory, call.platform)
    parts = [part._replace(**jax.tree.map(to_memory, {"keys": part.keys, "scale": part.scale})) for part in parts]
    mixed = jax.tree.map(to_memory, mixed)
    # the same array again, so that `_attend` reads the latents of a tile once
    mixed = mixed._replace(values=parts[0].keys) if is_latent else mixed
    # each lane has a run of this many tiles
    per_lane = -(-tiles.ends[-1] // lanes)
    lane = jnp.arange(lanes, dtype=jnp.int32)
    state_rows = (kv_heads, block * group)

    def begin(count: int) -> RunningSoftmax:
        zeros = jnp.zeros((count, *state_rows), jnp.float32)
        return RunningSoftmax(zeros + LOWEST, zeros, jnp.zeros((count, *state_rows, width), jnp.float32))

    def block_of(tile: Array) -> Array:
        return jnp.minimum(jnp.searchsorted(tiles.ends, tile, side="right"), num_blocks - 1).astype(jnp.int32)

    def step(number: Array, carry: tuple[RunningSoftmax, RunningSoftmax]) -> tuple[RunningSoftmax, RunningSoftmax]:
        state, by_block = carry
        tile = lane * per_lane + number
        blocks = block_of(tile)
        is_first_tile = (number == 0) | (tile == tiles.starts[blocks])
        state = jax.vmap(lambda is_new, *states: jax.tree.map(partial(jnp.where, is_new), *states))(
            is_first_tile, begin(lanes), state
        )
        state = _attend(call, tiles, (blocks, tile), parts, mixed, state)
        # a block that another lane begins has a row of its own for each further lane
        entry = jnp.where(tiles.starts[blocks] < lane * per_lane, num_blocks + lane, blocks)
        entry = jnp.where(tile < tiles.ends[-1], entry, num_blocks + lanes)
        return state, jax.tree.map(lambda old, new: old.at[entry].set(new, mode="drop"), by_block, state)

    _, by_block = lax.fori_loop(0, per_lane, step, (begin(lanes), begin(num_blocks + lanes)))
    peak, total, sums = _merged(by_block, block_of(lane * per_lane), num_blocks)
    if call.sinks is not None:
        sinks = jnp.tile(call.sinks.astype(jnp.float32).reshape(kv_heads, group), (1, block))[None]
        peak_with_sinks = jnp.maximum(peak, sinks)
        sums = sums * jnp.exp(peak - peak_with_sinks)[..., None]
        total, peak = total * jnp.exp(peak - peak_with_sinks) + jnp.exp(sinks - peak_with_sinks), peak_with_sinks
    result = sums / jnp.where(total > 0, total, 1.0)[..., None]
    statistics = (peak, total) if call.spread else ()
    return tuple(_of_heads(x, block) for x in (result, *statistics))


def _heads_first(platform: str, pool: Array, kv_heads: int) -> bool:
    return platform != "tpu" or pool.ndim == 3 or kv_heads < 4 // pool.dtype.itemsize


def _in_memory(platform: str, pool: Array) -> Array:
    """Returns a pool with its dims as `nn.cache.cache_layout` has them in memory, and none for one head.

    In any other order, and with a dim of 1, XLA copies the pool before a loop that reads it.
    """
    if pool.shape[2] == 1:
        return pool[:, :, 0]
    return jnp.swapaxes(pool, 1, 2) if _heads_first(platform, pool, pool.shape[2]) else pool


def _attend(
    call: RaggedCall,
    tiles: _Tiles,
    at: tuple[Array, Array],
    parts: Sequence[PagedPart],
    mixed: PagedValues,
    state: RunningSoftmax,
) -> RunningSoftmax:
    """Returns the running softmax after one tile of each lane; ``at`` are the lanes' blocks and tiles."""
    (blocks, tile), (values, value_scale) = at, mixed
    kv_heads, slots = state.peak.shape[1], tiles.num_pages * tiles.page_len
    group = parts[0].queries.shape[1] // kv_heads
    sequence, index = tiles.sequence[blocks], tiles.chunk[blocks] + tile - tiles.starts[blocks]
    page_number = index[:, None] * tiles.num_pages + jnp.arange(tiles.num_pages)[None]
    # pages past the end of the table are clipped: their slots are later than every query
    page = call.pages.at[sequence[:, None], page_number].get(mode="clip")

    def read(pool: Array) -> Array:
        """Returns [lanes, K, slots, width]."""
        entries = pool.at[page].get(mode="clip")
        if kv_heads > 1:
            entries = jnp.moveaxis(entries, 2 if _heads_first(call.platform, pool, kv_heads) else 3, 1)
        return entries.reshape(len(page), kv_heads, slots, -1)

    def operand(pool: Array) -> Array:
        return read(pool).astype(dtype)

    def scaled(array: Array, scale: Array | None) -> Array:
        return array if scale is None else array * jnp.swapaxes(read(scale), 2, 3)

    row, exists = _rows(call, tiles, blocks)
    dtype = parts[0].queries.dtype
    read_keys = [operand(part.keys) for part in parts]

    def product(part: PagedPart, keys: Array) -> Array:
        queries = part.queries.at[row].get(mode="clip").reshape(*row.shape, kv_heads, group, -1)
        queries = jnp.moveaxis(queries, 2, 1).reshape(len(row), kv_heads, row.shape[1] * group, -1)
        products = jnp.einsum("WKRH,WKCH->WKRC", queries, keys, preferred_element_type=jnp.float32)
        return scaled(products, part.scale)

    first_product, *other_products = map(product, parts, read_keys)
    scores = capped(call.scale * sum(other_products, start=first_product), call.softcap)
    # positions of slots, and of queries
    slot = _first_positions(call, tiles, index)[:, None] + tiles.offsets[None]
    position = row + (call.lengths - call.counts - call.first)[sequence][:, None]
    distance = position[:, :, None] - slot[:, None]
    is_seen = distance >= 0 if call.known is None else (slot < call.known[sequence][:, None])[:, None]
    is_seen = is_seen & (exists & (tile < tiles.ends[-1])[:, None])[:, :, None]
    is_seen = is_seen if call.window is None else is_seen & (distance < call.window)
    if call.rule:
        scores = _ruled(call.rule, scores, sequence, position, slot)
    scores = jnp.where(jnp.repeat(is_seen, group, axis=1)[:, None], scores, -jnp.inf)
    peak = jnp.maximum(state.peak, scores.max(axis=-1))
    weights, fade = jnp.exp(scores - peak[..., None]), jnp.exp(state.peak - peak)
    total = state.total * fade + weights.sum(axis=-1)
    tile_values = read_keys[0] if values is parts[0].keys else operand(values)
    weights = scaled(weights, value_scale).astype(dtype)
    sums = jnp.einsum("WKRC,WKCH->WKRH", weights, tile_values, preferred_element_type=jnp.float32)
    return RunningSoftmax(peak, total, state.mixed * fade[..., None] + sums)


def _ruled(rule: ScoreRule, scores: Array, sequence: Array, position: Array, slot: Array) -> Array:
    """Returns scores [M, K, block G, C] by a rule; ``position`` [M, block] are those of queries, ``slot`` [M, C] of
    keys."""
    kv_heads, rows = scores.shape[1:3]
    group = rows // position.shape[1]
    head = np.arange(kv_heads)[:, None] * group + np.arange(rows)[None] % group
    query = jnp.repeat(position, group, axis=1)[:, None, :, None]
    heads = jnp.asarray(head)[None, :, :, None]
    return rule(scores, sequence[:, None, None, None], heads, query, slot[:, None, None, :])


def _rows(call: RaggedCall, tiles: _Tiles, own: Array) -> tuple[Array, Array]:
    """Returns the rows [M, block] of queries of blocks, and which of them the sequences have."""
    sequence = tiles.sequence[own]
    row = tiles.row[own][:, None] + jnp.arange(tiles.block, dtype=jnp.int32)[None]
    return call.first[sequence][:, None] + row, row < call.counts[sequence][:, None]


def _with_blocks(call: RaggedCall, tiles: _Tiles, own: Array, found: RaggedRows, out: RaggedRows) -> RaggedRows:
    """Returns the rows with those of blocks ``own``, [M, block, N, ...]."""
    row, exists = _rows(call, tiles, own)
    # past the end, where a scatter drops it; -1 would count from the end
    row = jnp.where(exists & tiles.exists[own][:, None], row, len(out[0]))
    return tuple(old.at[row].set(new.astype(old.dtype), mode="drop") for old, new in zip(out, found, strict=True))


def _of_heads(array: Array, block: int) -> Array:
    """Returns what the queries of blocks have, [M, K, block G, ...], as [M, block, N, ...]."""
    blocks, kv_heads, _, *width = array.shape
    moved = jnp.moveaxis(array.reshape(blocks, kv_heads, block, -1, *width), 2, 1)
    return moved.reshape(blocks, block, -1, *width)


def _merged(kept: RunningSoftmax, began: Array, num_blocks: int) -> RunningSoftmax:
    """Adds the rows that lanes have of a block that another lane began, ``began``, to those of the blocks."""
    blocks = jax.tree.map(lambda x: x[:num_blocks], kept)
    lanes = jax.tree.map(lambda x: x[num_blocks:], kept)
    peak = blocks.peak.at[began].max(lanes.peak)
    fade, lane_fade = jnp.exp(blocks.peak - peak), jnp.exp(lanes.peak - peak[began])
    total = (blocks.total * fade).at[began].add(lanes.total * lane_fade)
    mixed = (blocks.mixed * fade[..., None]).at[began].add(lanes.mixed * lane_fade[..., None])
    return RunningSoftmax(peak, total, mixed)


# -- CPU ---------------------------------------------------------------------------------------------------


def _by_turns(
    call: RaggedCall, tiles: _Tiles, parts: Sequence[PagedPart], mixed: PagedValues, out: RaggedRows
) -> RaggedRows:
    """Writes the attention of each block by XLA, where each iteration costs some microseconds an operation.

    Blocks of one query share iterations. Those of several follow one another, as only few of those that could exist do.
    A tile's weights are relative to a power of two, so that sums are scaled without rounding: a block adds its tiles
    one after the other and has the same result whichever tiles share an iteration.
    """
    num_blocks, (kv_heads, width), block = len(tiles.starts), mixed.values.shape[2:], tiles.block
    group, dtype, slots = out[0].shape[1] // kv_heads, parts[0].queries.dtype, tiles.num_pages * tiles.page_len
    lanes = 1 if block > 1 else max(1, min(CPU_SLOTS // slots, max(2, num_blocks)))
    is_latent = mixed.values is parts[0].keys
    # what an iteration needs to know of its tiles is the same in all layers, which then share it
    max_tiles = -(-num_blocks * -(-call.pages.shape[1] // tiles.num_pages) // lanes) * lanes
    tile = jnp.arange(max_tiles, dtype=jnp.int32)
    block_of_tile = jnp.searchsorted(tiles.ends, tile, side="right").astype(jnp.int32)
    owner = jnp.minimum(block_of_tile, num_blocks - 1)
    sequence, index = tiles.sequence[owner], tiles.chunk[owner] + tile - tiles.starts[owner]
    row, first_pos = (call.lengths - call.counts)[sequence] + tiles.row[owner], _first_positions(call, tiles, index)
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
            scores = _ruled(call.rule, scores, sequence, row[:, None] + np.arange(block)[None], slot)
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
        row, _ = _rows(call, tiles, blocks)
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
        return _with_blocks(call, tiles, blocks, tuple(_of_heads(x, block) for x in (result, *statistics)), out)

    if block == 1:
        return attend(jnp.arange(num_blocks, dtype=jnp.int32), 0, tiles.ends[-1], out)
    count = tiles.ends - tiles.starts
    return lax.fori_loop(0, jnp.sum(tiles.exists), lambda i, out: attend(i[None], tiles.starts[i], count[i], out), out)


def _two_to(power: Array) -> Array:
    """Returns two to the power of whole numbers that are not positive, exactly."""
    # the biased exponent of a float32, 0 for a power that is too small for one
    bits = jnp.maximum(power.astype(jnp.int32) + 127, 0) << 23
    return lax.bitcast_convert_type(bits, jnp.float32)


# -- TPU ---------------------------------------------------------------------------------------------------

MOST_ROWS, MOST_PAGES = 256, 16
"""Rows, queries x heads, of a block, and pages of a tile at most. The kernel multiplies all heads with the keys of all
key heads, which costs nothing where few rows meet many keys."""

SCALAR_BYTES = 2**18
"""Bytes of the page table and the list of tiles at most, so that scalar memory has both."""


def _kernel_takes(call: RaggedCall, tiles: _Tiles, num_heads: int) -> bool:
    """True on TPUs for few rows, pages that are not tiny and tables that fit scalar memory."""
    is_small = tiles.block * num_heads <= MOST_ROWS and tiles.num_pages <= MOST_PAGES
    num_scalars = call.pages.size + len(tiles.starts) * -(-call.pages.shape[1] // tiles.num_pages)
    return call.platform == "tpu" and call.rule is None and is_small and 4 * num_scalars <= SCALAR_BYTES


def _by_kernel(
    call: RaggedCall, tiles: _Tiles, parts: Sequence[PagedPart], mixed: PagedValues, *, interpret: bool = False
) -> RaggedRows:
    """Returns the attention of each block by a kernel with a tile in each step of its grid, whose pages are fetched
    ahead. The columns of its scores are (slot, key head) pairs, as a page has them in memory."""
    from jax.experimental import pallas as pl  # Pallas takes time to import
    from jax.experimental.pallas import tpu as pltpu

    page_len, kv_heads, width = mixed.values.shape[1:]
    num_pages, num_blocks = tiles.num_pages, len(tiles.starts)
    heads, dtype = parts[0].queries.shape[1], parts[0].queries.dtype
    rows = tiles.block * heads
    max_tiles = num_blocks * -(-call.pages.shape[1] // num_pages)
    owner = jnp.minimum(jnp.searchsorted(tiles.ends, jnp.arange(max_tiles), side="right"), num_blocks - 1)
    # a tile's last pages may be beyond the table, and entries without a page may be any number
    table = jnp.clip(call.pages, 0, len(mixed.values) - 1)
    position = (call.lengths - call.counts)[tiles.sequence] + tiles.row
    position = position if call.known is None else (call.known - 1)[tiles.sequence]
    position = position - (call.spread.first if call.spread else 0)
    scalars = [owner, tiles.starts, tiles.chunk, position]
    scalars = [x.astype(jnp.int32) for x in (*scalars, tiles.sequence * table.shape[1], table.reshape(-1))]

    def page(number: int) -> Any:
        def index(tile: Array, *scalars: Any) -> Any:
            owner, starts, chunk, _, first, entries = scalars
            block = owner[tile]
            column = (chunk[block] + tile - starts[block]) * num_pages + number
            return entries[first[block] + jnp.minimum(column, table.shape[1] - 1)], 0, 0

        return index

    def of_block(tile: Array, own: Any, *_: Any) -> Any:
        return own[tile], 0, 0

    query, head = np.divmod(np.arange(rows), heads)
    query = query * (call.known is None)
    heads_first = _heads_first("tpu", mixed.values, kv_heads)
    grid = np.indices((num_pages, kv_heads, page_len))
    page_number, key_head, slot = (grid if heads_first else np.swapaxes(grid, 2, 3)).reshape(3, -1)
    slot += page_number * tiles.span
    # all heads are multiplied with the keys of all key heads, and see those of their own
    back = np.where((head // (heads // kv_heads))[:, None] == key_head, query[:, None] - slot, UNSEEN).astype(np.int32)
    sinks = jnp.full(heads, LOWEST) if call.sinks is None else call.sinks.astype(jnp.float32)
    start_peak = jnp.broadcast_to(jnp.tile(jnp.maximum(sinks, LOWEST), tiles.block)[:, None], (rows, LANE))
    row_index, _ = _rows(call, tiles, jnp.arange(num_blocks))
    queries = [part.queries.at[row_index].get(mode="clip").reshape(num_blocks, rows, -1) for part in parts]
    is_latent = mixed.values is parts[0].keys

    def of_tiles(scale: Array) -> Array:
        """Returns [tiles, 1, columns], gathered by XLA: a page of scales is not a whole number of registers."""
        page_number = (tiles.chunk[owner] + jnp.arange(max_tiles) - tiles.starts[owner])[:, None] * num_pages
        page_number = jnp.minimum(page_number + jnp.arange(num_pages)[None], table.shape[1] - 1)
        factors = _in_memory("tpu", scale)[table[tiles.sequence[owner][:, None], page_number]]
        return (factors if kv_heads == 1 or heads_first else jnp.swapaxes(factors, 2, 3)).reshape(max_tiles, 1, -1)

    has_scales, scales = mixed.scale is not None, [*(part.scale for part in parts), mixed.scale]
    gathered = [of_tiles(scale) for scale in scales if scale is not None]
    pools = [part.keys for part in parts] + ([] if is_latent else [mixed.values])
    pools = [_in_memory("tpu", pool).reshape(len(pool), page_len * kv_heads, -1) for pool in pools]
    # what all heads share beside latents is narrow and has its slots in the lanes, see `nn.cache.cache_layout`
    is_turned = [is_latent and number > 0 and pool.shape[-1] < LANE for number, pool in enumerate(pools)]
    pools = [jnp.swapaxes(pool, 1, 2) if turn else pool for pool, turn in zip(pools, is_turned, strict=True)]

    def kernel(*refs: Any) -> None:
        owner, starts, chunk, position, _, _, begin_ref, back_ref, *arrays = refs
        query_refs, scale_refs = arrays[: len(parts)], arrays[len(parts) :][: len(gathered)]
        *page_refs, peak_ref, total_ref, sums_ref = arrays[len(parts) + len(gathered) :]
        page_refs, out_refs = page_refs[: -len(widths)], page_refs[-len(widths) :]
        tile = pl.program_id(0)
        block = owner[tile]

        @pl.when(tile == starts[block])
        def begin_block() -> None:
            peak_ref[...] = begin_ref[...]
            # a sink counts as a score from before the first key
            total_ref[...] = jnp.where(begin_ref[...] > LOWEST, 1.0, 0.0)
            sums_ref[...] = jnp.zeros((rows, width), jnp.float32)

        def read(pool: int) -> Array:
            pages = [ref[0] for ref in page_refs[pool * num_pages : (pool + 1) * num_pages]]
            # TPUs have casts of bytes to float32 alone
            pages = [x.astype(jnp.float32) if x.dtype.itemsize == 1 else x for x in pages]
            return jnp.concatenate(pages, axis=int(is_turned[pool])).astype(dtype)

        keys = [read(number) for number in range(len(parts))]
        products = (
            lax.dot_general(ref[0], key, (((1,), (int(not turn),)), ((), ())), preferred_element_type=jnp.float32)
            for ref, key, turn in zip(query_refs, keys, is_turned, strict=False)
        )
        if has_scales:
            products = (product * ref[0] for product, ref in zip(products, scale_refs, strict=False))
        scores = capped(call.scale * sum(products, start=jnp.zeros(back.shape, jnp.float32)), call.softcap)
        distance = back_ref[...] + (position[block] - (chunk[block] + tile - starts[block]) * tiles.positions)
        is_seen = distance >= 0 if call.window is None else (distance >= 0) & (distance < call.window)
        scores = jnp.where(is_seen, scores, -jnp.inf)
        old_peak = peak_ref[:, :1]
        peak = jnp.maximum(old_peak, jnp.max(scores, axis=1, keepdims=True))
        weights, fade = jnp.exp(scores - peak), jnp.exp(old_peak - peak)
        total = total_ref[:, :1] * fade + jnp.sum(weights, axis=1, keepdims=True)
        values = keys[0] if is_latent else read(len(parts))
        weights = weights * scale_refs[-1][0] if has_scales else weights
        sums = sums_ref[...] * fade + jnp.dot(weights.astype(dtype), values, preferred_element_type=jnp.float32)
        peak_ref[...] = jnp.broadcast_to(peak, (rows, LANE))
        total_ref[...] = jnp.broadcast_to(total, (rows, LANE))
        sums_ref[...] = sums
        # by every tile: what the last one of a block writes stays
        out_refs[0][0] = sums / jnp.where(total > 0, total, 1.0)
        for ref, statistic in zip(out_refs[1:], (peak, total), strict=False):
            ref[0] = jnp.broadcast_to(statistic, (rows, LANE))

    widths = (width, LANE, LANE) if call.spread else (width,)
    scratch = [pltpu.VMEM((rows, size), jnp.float32) for size in (LANE, LANE, width)]
    results = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(jnp.maximum(tiles.ends[-1], 1),),
            in_specs=[
                *(pl.BlockSpec(array.shape, lambda *_: (0, 0)) for array in (start_peak, back)),
                *(pl.BlockSpec((1, *array.shape[1:]), of_block) for array in queries),
                *(pl.BlockSpec((1, *array.shape[1:]), lambda tile, *_: (tile, 0, 0)) for array in gathered),
                # pages of a tile lie anywhere in a pool, so that each is an operand of its own
                *(pl.BlockSpec((1, *pool.shape[1:]), page(number)) for pool in pools for number in range(num_pages)),
            ],
            out_specs=[pl.BlockSpec((1, rows, size), of_block) for size in widths],
            scratch_shapes=scratch,
        ),
        out_shape=[jax.ShapeDtypeStruct((num_blocks, rows, size), jnp.float32) for size in widths],
        interpret=interpret,
    )(*scalars, start_peak, jnp.asarray(back), *queries, *gathered, *(pool for pool in pools for _ in range(num_pages)))
    out, *statistics = (array.reshape(num_blocks, tiles.block, heads, -1) for array in results)
    return out, *(array[..., 0] for array in statistics)
