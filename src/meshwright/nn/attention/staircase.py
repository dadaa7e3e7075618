"""Causal self-attention of rows in order; keys that no query of a tile sees are left out while tracing.

Queries (forward) or keys (backward) are cut into at most `MOST_TILES` tiles. Each is multiplied with a static slice of
the keys that it may see, or of the queries that may see it. So the masked half is neither computed nor stored, no
running softmax is rescaled, and a CPU's threads share the tiles, which are independent.
"""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from meshwright.algebra.ops.attention import MOST_TILES, TILE_ROWS
from meshwright.nn.attention.rows import Results, both_passes, by_heads
from meshwright.nn.attention.scores import attend_once, finish, scaled, score_cotangents, transposed, weighted_sums
from meshwright.nn.attention.visibility import AttentionCall, TokenPositions, visible

LONGEST = 2048
"""Maximum length whose scores fit in cache."""


def tile_size(length: int) -> int:
    """Returns the positions of a tile: an eighth of the length, rounded up to a multiple of 128."""
    eighth = -(-length // MOST_TILES)
    return TILE_ROWS * -(-eighth // TILE_ROWS)


def _tiles(length: int) -> Iterator[tuple[int, int]]:
    size = tile_size(length)
    return ((first, min(first + size, length)) for first in range(0, length, size))


def first_key(first_query: int, length: int, window: int | None) -> int:
    """Returns the first key that a tile of queries may see, rounded down to whole tiles."""
    size = tile_size(length)
    return 0 if window is None else max(0, first_query - window + 1) // size * size


def last_query(end_key: int, length: int, window: int | None) -> int:
    """Returns one after the last query that may see a key before ``end_key``, rounded up to whole tiles."""
    size = tile_size(length)
    return length if window is None else min(length, -(-(end_key - 1 + window) // size) * size)


def _part(positions: TokenPositions, first: int, end: int) -> TokenPositions:
    return jax.tree.map(lambda x: x[..., first:end], positions)


def takes(call: AttentionCall, q: Array, k: Array, v: Array) -> bool:
    """True for a mask "rows" of at most `LONGEST` positions."""
    return call.mask == "rows" and q.shape[1] <= LONGEST


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
    columns = transposed(k)
    # dq is accumulated as columns: its products with transposed keys then have no other transposed factor.
    dq = jnp.zeros((*q.shape[:-2], q.shape[-1], q.shape[-2]), jnp.float32)
    dks, dvs = [], []
    for first, end in _tiles(length):
        rows = slice(first * group, last_query(end, length, call.window) * group)
        tile, dtile = tall[..., rows, :], dout[..., rows, :]
        here, there = _part(call.query, rows.start, rows.stop), _part(call.key, first, end)
        seen = visible(here.over_queries(), there.over_keys(), window=call.window)
        of_tile, part = (tile, dtile, lse[..., rows], delta[..., rows]), (k[..., first:end, :], v[..., first:end, :])
        p, ds = score_cotangents(of_tile, part, rest, seen)
        dvs.append(weighted_sums(p, dtile).astype(v.dtype))
        dks.append((weighted_sums(ds, tile) * rest.scale).astype(k.dtype))
        # Not a scatter: over all rows its index is empty, and jaxlib 0.11's partitioner crashes on that.
        added = dq[..., rows] + weighted_sums(columns[..., first:end], ds.astype(k.dtype))
        dq = lax.dynamic_update_slice_in_dim(dq, added, rows.start, axis=-1)
    # Without it XLA would transpose the product of a single tile instead, and its factors would have the slow layout.
    dq = lax.optimization_barrier(dq)
    turned_back = (jnp.swapaxes(dq, -1, -2) * call.scale).astype(q.dtype)
    return (turned_back,), (jnp.concatenate(dks, axis=-2), jnp.concatenate(dvs, axis=-2))


forward, backward = both_passes(by_heads, _forward, _backward)
