"""Attention of rows on themselves in order: what lies after a query, or before its window, is left out while tracing.

Queries (forward) or keys (backward) are cut into a handful of tiles, each held against exactly the rows that it may
see or that may see it, by slices known to the compiler: the masked half is neither computed nor stored, there is no
running softmax to rescale, and the tiles are independent, so that a CPU's threads share them.
"""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from meshwright.algebra.ops.attention import MOST_TILES, TILE_ROWS
from meshwright.nn.attention.rows import Results, both_passes, by_heads
from meshwright.nn.attention.scores import attend_once, finish, scaled, score_cotangents, turned, weighed
from meshwright.nn.attention.visibility import AttentionCall, Places, visible

LONGEST = 2048
"""The length from which scores would leave the cache."""


def tile_size(length: int) -> int:
    """Positions per tile: 128, or an eighth of the length, rounded up to 128s."""
    eighth = -(-length // MOST_TILES)
    return TILE_ROWS * -(-eighth // TILE_ROWS)


def _tiles(length: int) -> Iterator[tuple[int, int]]:
    size = tile_size(length)
    return ((first, min(first + size, length)) for first in range(0, length, size))


def first_key(first_query: int, length: int, window: int | None) -> int:
    """The first key that a tile of queries may see, rounded down to whole tiles."""
    size = tile_size(length)
    return 0 if window is None else max(0, first_query - window + 1) // size * size


def last_query(end_key: int, length: int, window: int | None) -> int:
    """One after the last query that may see a key before ``end_key``, rounded up to whole tiles."""
    size = tile_size(length)
    return length if window is None else min(length, -(-(end_key - 1 + window) // size) * size)


def _part(places: Places, first: int, end: int) -> Places:
    return jax.tree.map(lambda x: x[..., first:end], places)


def takes(call: AttentionCall, q: Array, k: Array, v: Array) -> bool:
    """True for rows in order, no more than fit in cache."""
    return call.order == "rows" and q.shape[1] <= LONGEST


def _forward(call: AttentionCall, queries: Sequence[Array], keys: Sequence[Array]) -> Results:
    q, *sinks = queries
    k, v = keys
    length = k.shape[-2]
    group = q.shape[-2] // length
    outs, sums = [], []
    for first, end in _tiles(length):
        rows, start = slice(first * group, end * group), first_key(first, length, call.window)
        tile, of_tile = scaled(q[..., rows, :], call)
        here, there = _part(call.query, rows.start, rows.stop), _part(call.key, start, end)
        seen = visible(here.over_keys(), there.over_queries(), window=call.window)
        sink = sinks[0][..., rows] if sinks else None
        out, lse = finish(attend_once(sink, tile, (k[..., start:end, :], v[..., start:end, :]), of_tile, seen))
        outs.append(out.astype(q.dtype))
        sums.append(lse)
    return (jnp.concatenate(outs, axis=-2), jnp.concatenate(sums, axis=-1)), ()


def _backward(call: AttentionCall, queries: Sequence[Array], keys: Sequence[Array]) -> Results:
    q, dout, lse, delta = queries
    k, v = keys
    length = k.shape[-2]
    group = q.shape[-2] // length
    tall, rest = scaled(q, call)
    columns = turned(k)
    # Summed as columns: products with keys turned round are the ones that need no transposed factor.
    dq = jnp.zeros((*q.shape[:-2], q.shape[-1], q.shape[-2]), jnp.float32)
    dks, dvs = [], []
    for first, end in _tiles(length):
        rows = slice(first * group, last_query(end, length, call.window) * group)
        tile, dtile = tall[..., rows, :], dout[..., rows, :]
        here, there = _part(call.query, rows.start, rows.stop), _part(call.key, first, end)
        seen = visible(here.over_queries(), there.over_keys(), window=call.window)
        of_tile, part = (tile, dtile, lse[..., rows], delta[..., rows]), (k[..., first:end, :], v[..., first:end, :])
        p, ds = score_cotangents(of_tile, part, rest, seen)
        dvs.append(weighed(p, dtile).astype(v.dtype))
        dks.append((weighed(ds, tile) * rest.scale).astype(k.dtype))
        # no scatter: where it takes all rows its index is empty, on which jaxlib 0.11's partitioner dies
        added = dq[..., rows] + weighed(columns[..., first:end], ds.astype(k.dtype))
        dq = lax.dynamic_update_slice_in_dim(dq, added, rows.start, axis=-1)
    # Of a single tile the compiler would turn the product itself, whose factors would then lie the slow way round.
    dq = lax.optimization_barrier(dq)
    turned_back = (jnp.swapaxes(dq, -1, -2) * call.scale).astype(q.dtype)
    return (turned_back,), (jnp.concatenate(dks, axis=-2), jnp.concatenate(dvs, axis=-2))


forward, backward = both_passes(by_heads, _forward, _backward)
