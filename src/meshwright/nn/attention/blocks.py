"""Attention of any queries on any keys, block by block with a running softmax.

What a block of queries sees of a block of keys is told from least and greatest positions and documents: a block that
is not seen costs one comparison, and one that is wholly seen needs no mask.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from meshwright.nn.attention.rows import Results, both_passes, by_heads
from meshwright.nn.attention.scores import (
    Cotangents,
    Running,
    attend,
    begin,
    finish,
    scaled,
    score_cotangents,
    turned,
    weighed,
)
from meshwright.nn.attention.visibility import NO_PLACES, NOWHERE, AttentionCall, Order, Places, block_sight, visible

State = TypeVar("State")

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


def takes(call: AttentionCall, q: Array, k: Array, v: Array) -> bool:
    """True: this form computes every attention."""
    return True


def _in_blocks(
    core: Callable[..., Results], call: AttentionCall, queries: Sequence[Array], keys: Sequence[Array]
) -> Results:
    """`by_heads` on rows filled up to whole blocks."""
    length, heads = queries[0].shape[1:3]
    num_keys, kv_heads = keys[0].shape[1:3]
    group = heads // kv_heads
    here = block_positions(length, max(16, QUERY_ROWS // group), call.order)
    there = block_positions(num_keys, KEY_ROWS, call.order)
    # Rows that fill up are nowhere, in any document.
    query, key = _filled_places(call.query, here, -1), _filled_places(call.key, there, NOWHERE)
    by_query, by_key = by_heads(
        partial(core, Blocks(here * group, there)),
        replace(call, query=query, key=key),
        [_filled(x, here) for x in queries],
        [_filled(x, there) for x in keys],
    )
    return tuple(x[:, :length] for x in by_query), tuple(x[:, :num_keys] for x in by_key)


def _filled(x: Array, block: int, value: int = 0) -> Array:
    """Dim 1 filled up to whole blocks."""
    missing = -x.shape[1] % block
    widths = [(0, missing if dim == 1 else 0) for dim in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value) if missing else x


def _filled_places(places: Places, block: int, position: int) -> Places:
    document = None if places.document is None else _filled(places.document, block)
    return NO_PLACES if places.position is None else Places(_filled(places.position, block, position), document)


def _forward(blocks: Blocks, call: AttentionCall, queries: Sequence[Array], keys: Sequence[Array]) -> Results:
    q, *sinks = queries
    k, v = keys
    sight = _sight(call, blocks)

    def one(i: Array, out: tuple[Array, Array]) -> tuple[Array, Array]:
        tile, rest = scaled(_block(q, i, blocks.query, -2), call)
        here = _places(call.query, i, blocks.query).over_keys()

        def step(j: Array, running: Running) -> Running:
            # Sliced outside of the branch: see `attention_rows` on places that are read at an offset.
            there = _places(call.key, j, blocks.key).over_queries()

            def meet(seen: Array | None) -> Running:
                return attend(running, tile, (_block(k, j, blocks.key, -2), _block(v, j, blocks.key, -2)), rest, seen)

            kind = None if sight is None else sight[i, j]
            return _met(kind, running, meet, partial(visible, here, there, window=call.window))

        sink = _block(sinks[0], i, blocks.query, -1) if sinks else None
        running = lax.fori_loop(0, k.shape[-2] // blocks.key, step, begin(sink, tile, v.shape[-1]))
        mixed, lse = finish(running)
        return _put(out[0], mixed, i, -2), _put(out[1], lse, i, -1)

    start = (jnp.zeros((*q.shape[:-1], v.shape[-1]), q.dtype), jnp.zeros(q.shape[:-1], jnp.float32))
    return lax.fori_loop(0, q.shape[-2] // blocks.query, one, start), ()


def _backward(blocks: Blocks, call: AttentionCall, queries: Sequence[Array], keys: Sequence[Array]) -> Results:
    q, dout, lse, delta = queries
    k, v = keys
    sight = _sight(call, blocks)
    tall, rest = scaled(q, call)
    columns = turned(k)

    def one(j: Array, out: Cotangents) -> Cotangents:
        keys_j, values_j, columns_j = (_block(x, j, blocks.key, axis) for x, axis in ((k, -2), (v, -2), (columns, -1)))
        there = _places(call.key, j, blocks.key).over_keys()

        def step(i: Array, before: Cotangents) -> Cotangents:
            dq, dk, dv = before
            part, sums, deltas = (_block(x, i, blocks.query, -1) for x in (dq, lse, delta))
            here = _places(call.query, i, blocks.query).over_queries()

            def meet(seen: Array | None) -> Cotangents:
                tile, dtile = _block(tall, i, blocks.query, -2), _block(dout, i, blocks.query, -2)
                p, ds = score_cotangents((tile, dtile, sums, deltas), (keys_j, values_j), rest, seen)
                return part + weighed(columns_j, ds.astype(k.dtype)), dk + weighed(ds, tile), dv + weighed(p, dtile)

            kind = None if sight is None else sight[i, j]
            seen = partial(visible, here, there, window=call.window)
            part, dk, dv = _met(kind, (part, dk, dv), meet, seen)
            return _put(dq, part, i, -1), dk, dv

        zeros = (jnp.zeros(x.shape, jnp.float32) for x in (keys_j, values_j))
        dq, dk, dv = lax.fori_loop(0, q.shape[-2] // blocks.query, step, (out[0], *zeros))
        return dq, _put(out[1], dk * rest.scale, j, -2), _put(out[2], dv, j, -2)

    # Cotangents of queries as columns, see `turned`.
    start = (jnp.zeros((*q.shape[:-2], q.shape[-1], q.shape[-2]), jnp.float32), jnp.zeros_like(k), jnp.zeros_like(v))
    dq, dk, dv = lax.fori_loop(0, k.shape[-2] // blocks.key, one, start)
    return ((jnp.swapaxes(dq, -1, -2) * call.scale).astype(q.dtype),), (dk, dv)


def _sight(call: AttentionCall, blocks: Blocks) -> Array | None:
    if call.order == "all":
        return None
    return block_sight(call.query, call.key, window=call.window, query_block=blocks.query, key_block=blocks.key)


def _met(kind: Array | None, before: State, meet: Callable[[Array | None], State], seen: Callable[[], Array]) -> State:
    """``meet`` with a mask, without one, or not at all, by what a block of queries sees of a block of keys."""
    if kind is None:
        return meet(None)
    return lax.switch(kind, (lambda: before, lambda: meet(seen()), lambda: meet(None)))


def _block(x: Array, index: Array, size: int, axis: int) -> Array:
    return lax.dynamic_slice_in_dim(x, index * size, size, axis=axis % x.ndim)


def _places(places: Places, index: Array, size: int) -> Places:
    return jax.tree.map(lambda x: _block(x, index, size, -1), places)


def _put(x: Array, value: Array, index: Array, axis: int) -> Array:
    axis %= x.ndim
    return lax.dynamic_update_slice_in_dim(x, value.astype(x.dtype), index * value.shape[axis], axis)


forward, backward = both_passes(_in_blocks, _forward, _backward)
