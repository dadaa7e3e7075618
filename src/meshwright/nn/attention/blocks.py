"""Attention of any queries on any keys, block by block with a running softmax.

What a block of queries sees of a block of keys is told from least and greatest positions and documents: a block that
is not seen costs one comparison, and one that is wholly seen needs no mask.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from meshwright.nn.attention.rows import Results
from meshwright.nn.attention.scores import Running, attend, begin, finish, scaled, score_cotangents, turned, weighed
from meshwright.nn.attention.visibility import Order, Places, Rule, block_sight, visible

QUERY_ROWS = 256
KEY_ROWS = 512
"""Rows of a block, at most: its scores and their exponentials then stay in a core's cache."""


class Blocks(NamedTuple):
    """Rows of a block of queries (heads of a group counted) and of a block of keys."""

    query: int
    key: int


def block_positions(length: int, most: int, order: Order) -> int:
    """The largest divisor of ``length`` up to ``most``, unless it is less than a quarter of that.

    Then ``most``, and the last block has to be filled up; or, where every row given is seen, the whole length.
    """
    if length <= most:
        return length
    divisor = next(size for size in range(most, 0, -1) if length % size == 0)
    if 4 * divisor >= most:
        return divisor
    return length if order == "all" else most


def filled(x: Array, block: int, value: int = 0) -> Array:
    """Dim 1 filled up to whole blocks."""
    missing = -x.shape[1] % block
    widths = [(0, missing if dim == 1 else 0) for dim in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value) if missing else x


def filled_places(places: Places, block: int, position: int) -> Places:
    """Places of rows that fill up: at ``position``, in any document."""
    document = None if places.document is None else filled(places.document, block)
    return Places(filled(places.position, block, position), document)


def forward(
    rule: Rule,
    order: Order,
    blocks: Blocks,
    queries: Sequence[Array],
    keys: Sequence[Array],
    query: Places,
    key: Places,
) -> Results:
    """(result, log-sum-exp) by query row; no result by key row. Queries are (q,) or (q, sinks), keys (k, v)."""
    q, *sinks = queries
    k, v = keys
    sight = _sight(rule, order, blocks, query, key)

    def one(i: Array, out: tuple[Array, Array]) -> tuple[Array, Array]:
        tile, rest = scaled(_block(q, i, blocks.query, -2), rule)
        here = _places(query, i, blocks.query).over_keys()

        def step(j: Array, running: Running) -> Running:
            # Sliced outside of the branch: see `attention_rows` on places that are read at an offset.
            there = _places(key, j, blocks.key).over_queries()

            def meet(seen: Array | None) -> Running:
                return attend(running, tile, _block(k, j, blocks.key, -2), _block(v, j, blocks.key, -2), rest, seen)

            if sight is None:
                return meet(None)

            def some() -> Running:
                return meet(visible(here, there, window=rule.window))

            return lax.switch(sight[i, j], (lambda: running, some, lambda: meet(None)))

        sink = _block(sinks[0], i, blocks.query, -1) if sinks else None
        running = lax.fori_loop(0, k.shape[-2] // blocks.key, step, begin(sink, tile, v.shape[-1]))
        mixed, lse = finish(running)
        return _put(out[0], mixed, i, -2), _put(out[1], lse, i, -1)

    start = (jnp.zeros((*q.shape[:-1], v.shape[-1]), q.dtype), jnp.zeros(q.shape[:-1], jnp.float32))
    return lax.fori_loop(0, q.shape[-2] // blocks.query, one, start), ()


def backward(
    rule: Rule,
    order: Order,
    blocks: Blocks,
    queries: Sequence[Array],
    keys: Sequence[Array],
    query: Places,
    key: Places,
) -> Results:
    """(dq,) by query row, (dk, dv) by key row. Queries are (q, dout, lse, delta), keys (k, v)."""
    q, dout, lse, delta = queries
    k, v = keys
    sight = _sight(rule, order, blocks, query, key)
    tall, rest = scaled(q, rule)
    columns = turned(k)

    def one(j: Array, out: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        keys_j, values_j, columns_j = (_block(x, j, blocks.key, axis) for x, axis in ((k, -2), (v, -2), (columns, -1)))
        there = _places(key, j, blocks.key).over_keys()

        def step(i: Array, before: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            dq, dk, dv = before
            part, sums, deltas = (_block(x, i, blocks.query, -1) for x in (dq, lse, delta))
            here = _places(query, i, blocks.query).over_queries()

            def meet(seen: Array | None) -> tuple[Array, Array, Array]:
                tile, dtile = _block(tall, i, blocks.query, -2), _block(dout, i, blocks.query, -2)
                p, ds = score_cotangents(tile, keys_j, values_j, dtile, sums, deltas, rest, seen)
                return part + weighed(columns_j, ds.astype(k.dtype)), dk + weighed(ds, tile), dv + weighed(p, dtile)

            def some() -> tuple[Array, Array, Array]:
                return meet(visible(here, there, window=rule.window))

            if sight is None:
                part, dk, dv = meet(None)
            else:
                part, dk, dv = lax.switch(sight[i, j], (lambda: (part, dk, dv), some, lambda: meet(None)))
            return _put(dq, part, i, -1), dk, dv

        zeros = (jnp.zeros(x.shape, jnp.float32) for x in (keys_j, values_j))
        dq, dk, dv = lax.fori_loop(0, q.shape[-2] // blocks.query, step, (out[0], *zeros))
        return dq, _put(out[1], dk * rest.scale, j, -2), _put(out[2], dv, j, -2)

    # Cotangents of queries as columns, see `turned`.
    start = (jnp.zeros((*q.shape[:-2], q.shape[-1], q.shape[-2]), jnp.float32), jnp.zeros_like(k), jnp.zeros_like(v))
    dq, dk, dv = lax.fori_loop(0, k.shape[-2] // blocks.key, one, start)
    return ((jnp.swapaxes(dq, -1, -2) * rule.scale).astype(q.dtype),), (dk, dv)


def _sight(rule: Rule, order: Order, blocks: Blocks, query: Places, key: Places) -> Array | None:
    if order == "all":
        return None
    return block_sight(query, key, window=rule.window, query_block=blocks.query, key_block=blocks.key)


def _block(x: Array, index: Array, size: int, axis: int) -> Array:
    return lax.dynamic_slice_in_dim(x, index * size, size, axis=axis % x.ndim)


def _places(places: Places, index: Array, size: int) -> Places:
    return jax.tree.map(lambda x: _block(x, index, size, -1), places)


def _put(x: Array, value: Array, index: Array, axis: int) -> Array:
    axis %= x.ndim
    return lax.dynamic_update_slice_in_dim(x, value.astype(x.dtype), index * value.shape[axis], axis)
