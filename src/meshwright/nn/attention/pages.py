"""Queries, keys and values of attention on a cache in pages, and the list of tiles that cover a call.

A tile is a block of queries of one sequence and a few of its pages.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from meshwright.nn.attention.platform import default_platform

TILE_SLOTS, CPU_TILE_SLOTS = 128, (32, 128)
"""Least slots of a tile, if the page table has as many (pages are not split); on CPUs for blocks of one query, and for
blocks of several."""

LN2, NO_PEAK = math.log(2.0), -(2.0**22)
"""On CPUs the largest scores are rounded up to whole multiples of `LN2`, at least `NO_PEAK` of them."""

NOTHING_SEEN = NO_PEAK * LN2
"""The largest score of a query that sees no key; its sum of exponentials is 1."""


class PagedPart(NamedTuple):
    """One of the terms that add up to the scores: queries of N heads times pages of keys of the same width.

    Keys have K heads, N = K * G, in any dtype; with a ``scale`` each slot and head of the keys has a scale.
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
    ``first[b]`` to ``first[b] + counts[b] - 1``, at its last positions. A query sees positions up to its own; with
    ``window`` only the last ``window`` of them or, if ``chunked``, those in its own chunk of ``window`` positions.
    ``longest`` is at least the largest count. ``sinks`` are an extra logit per head. With ``spread`` this device has
    only some slots of each page. With ``known`` all queries of sequence b see its first ``known[b]`` positions instead.
    A ``rule`` changes scores, and may forbid pairs.
    """

    scale: float
    window: int | None = None
    chunked: bool = False
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
    """On CPUs: pools are views of arrays [Pg, K, Pl, ...], which a CPU multiplies without transposing."""

    def within(self, is_seen: Array, query_pos: Array, slot_pos: Array) -> Array:
        """Returns ``is_seen`` without the pairs outside of the window or chunk."""
        if self.window is None:
            return is_seen
        if self.chunked:
            return is_seen & (query_pos // self.window == slot_pos // self.window)
        return is_seen & (query_pos - slot_pos < self.window)

    def first_seen(self, query_pos: Array) -> Array:
        """Returns the first position that each query sees."""
        if self.window is None:
            return jnp.zeros_like(query_pos)
        return query_pos // self.window * self.window if self.chunked else jnp.maximum(query_pos - self.window + 1, 0)


ScoreRule = Callable[[Array, Array, Array, Array, Array], Array]
"""(scores, sequences, heads, query positions, key positions) -> scores, minus infinity where a mask forbids a pair."""


@dataclass(frozen=True)
class SpreadSlots:
    """This device's slots of every page: those from ``first`` on; a page has ``page_len`` slots on all devices."""

    first: Int[Array, ""] | int
    page_len: int


RaggedRows = tuple[Array, ...]
"""For each row and head the result [R, N, Hv]; with spread pages also the largest score and the sum of exponentials."""


class PageTiles(NamedTuple):
    """The list of tiles: block i has tiles ``starts[i]`` to ``ends[i] - 1``, on chunks of pages from ``chunk[i]`` on,
    and ``block`` rows of its sequence from ``row[i]`` on. Blocks without ``exists`` are padding at the end. A tile has
    ``num_pages`` pages; a page has ``page_len`` slots on this device and ``span`` on all devices."""

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
    call: RaggedCall

    @property
    def positions(self) -> int:
        """Positions of a tile, over all devices."""
        return self.num_pages * self.span

    @property
    def offsets(self) -> np.ndarray:
        """Positions of this device's slots of a tile, relative to the first of these slots."""
        return (np.arange(self.num_pages)[:, None] * self.span + np.arange(self.page_len)).ravel()

    def first_positions(self, index: Array) -> Array:
        """Returns the position [M] of this device's first slot in each chunk ``index`` of a sequence's pages."""
        return index * self.positions + (self.call.spread.first if self.call.spread else 0)

    def query_rows(self, blocks: Array) -> tuple[Array, Array]:
        """Returns the rows [M, block] of the blocks' queries, and which of these rows belong to the sequence."""
        sequence = self.sequence[blocks]
        rows = self.row[blocks][:, None] + jnp.arange(self.block, dtype=jnp.int32)[None]
        return self.call.first[sequence][:, None] + rows, rows < self.call.counts[sequence][:, None]

    def by_head(self, array: Array) -> Array:
        """Reshapes values of the blocks' queries from [M, K, block G, ...] to [M, block, N, ...]."""
        num_blocks, kv_heads, _, *widths = array.shape
        queries_first = jnp.moveaxis(array.reshape(num_blocks, kv_heads, self.block, -1, *widths), 2, 1)
        return queries_first.reshape(num_blocks, self.block, -1, *widths)

    def written(self, blocks: Array, results: RaggedRows, out: RaggedRows) -> RaggedRows:
        """Returns ``out`` with ``results``, [M, block, N, ...], written to the rows of ``blocks``."""
        row, has_query = self.query_rows(blocks)
        # past the end, where a scatter drops it; -1 would count from the end
        row = jnp.where(has_query & self.exists[blocks][:, None], row, len(out[0]))
        return tuple(old.at[row].set(new.astype(old.dtype), mode="drop") for old, new in zip(out, results, strict=True))


def page_tiles(call: RaggedCall, block: int, num_rows: int, page_len: int) -> PageTiles:
    """Lists the tiles of all sequences with one query (for ``block`` 1), or of all with several queries (otherwise)."""
    num_seqs, pages_per_seq = call.pages.shape
    min_slots = CPU_TILE_SLOTS[block > 1] if call.platform == "cpu" else TILE_SLOTS
    num_pages = min(pages_per_seq, -(-min_slots // page_len))
    page_span = call.spread.page_len if call.spread else page_len
    tile_positions = num_pages * page_span
    query_counts = jnp.where((call.counts == 1) == (block == 1), call.counts, 0)
    block_ends = jnp.cumsum(-(-query_counts // block))
    block_ids = jnp.arange(num_rows // block + (min(num_seqs, num_rows) if block > 1 else 0), dtype=jnp.int32)
    block_ids = block_ids[: num_seqs * (1 if block == 1 else -(-call.longest // block))]
    exists = block_ids < block_ends[-1]
    sequence = jnp.minimum(jnp.searchsorted(block_ends, block_ids, side="right").astype(jnp.int32), num_seqs - 1)
    seq_row = block * (block_ids - (block_ends - (-(-query_counts // block)))[sequence])
    seq_len = call.lengths[sequence]
    query_pos = seq_len - query_counts[sequence] + seq_row
    last_pos = (jnp.minimum(query_pos + block, seq_len) if call.known is None else call.known[sequence]) - 1
    first_chunk, end_chunk = call.first_seen(query_pos) // tile_positions, last_pos // tile_positions + 1
    ends = jnp.cumsum(jnp.where(exists, end_chunk - first_chunk, 0))
    starts = jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]])
    return PageTiles(sequence, seq_row, first_chunk, starts, ends, exists, block, num_pages, page_len, page_span, call)


def has_heads_first(platform: str, pool: Array, kv_heads: int) -> bool:
    """True if a pool has its heads before its slots in memory, or has a single head."""
    return platform != "tpu" or pool.ndim == 3 or kv_heads < 4 // pool.dtype.itemsize


def in_memory(platform: str, pool: Array) -> Array:
    """Returns a pool with its dims in memory order (`nn.cache.cache_layout`), and without the heads' dim for one head.

    In any other order, and with a dim of 1, XLA copies the pool before a loop that reads it.
    """
    if pool.shape[2] == 1:
        return pool[:, :, 0]
    return jnp.swapaxes(pool, 1, 2) if has_heads_first(platform, pool, pool.shape[2]) else pool


def ruled(rule: ScoreRule, scores: Array, sequence: Array, position: Array, slot: Array) -> Array:
    """Applies a score rule to scores [M, K, block G, C]; ``position`` [M, block] and ``slot`` [M, C] are the positions
    of queries and keys."""
    kv_heads, num_rows = scores.shape[1:3]
    group_size = num_rows // position.shape[1]
    head_of_row = np.arange(kv_heads)[:, None] * group_size + np.arange(num_rows)[None] % group_size
    query_pos = jnp.repeat(position, group_size, axis=1)[:, None, :, None]
    heads = jnp.asarray(head_of_row)[None, :, :, None]
    return rule(scores, sequence[:, None, None, None], heads, query_pos, slot[:, None, None, :])
