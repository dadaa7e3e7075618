"""Attention of any queries on any keys, block by block with a running softmax.

The smallest and largest positions and documents of a block of queries and a block of keys decide how much the queries
see: an unseen block of keys costs one comparison, and a block that is seen whole needs no mask.
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
    QkvCotangents,
    RunningSoftmax,
    attend,
    begin,
    finish,
    scaled,
    score_cotangents,
    transposed,
    weighted_sums,
)
from meshwright.nn.attention.visibility import (
    NO_POSITIONS,
    NOWHERE,
    AttentionCall,
    MaskKind,
    TokenPositions,
    block_visibility,
    visible,
)

_Carry = TypeVar("_Carry")

QUERY_ROWS = 256
KEY_ROWS = 512
"""Maximum rows of a block: its scores and their exponentials then fit in a core's cache."""


class BlockRows(NamedTuple):
    """Number of rows in a block of queries (positions times heads of a group) and in a block of keys."""

    query: int
    key: int


def block_positions(length: int, most: int, mask: MaskKind) -> int:
    """Returns ``length`` if at most ``most``, else its largest divisor from a quarter of ``most`` to ``most``.

    Otherwise returns ``most``, and the last block is padded; but ``length`` if every query sees every key, since
    queries would see padded keys too.
    """
    if length <= most:
        return length
    divisor = next(size for size in range(most, 0, -1) if length % size == 0)
    if 4 * divisor >= most:
        return divisor
    return length if mask == "all" else most


def takes(call: AttentionCall, q: Array, k: Array, v: Array) -> bool:
    """True: these loops compute every attention."""
    return True


def _in_blocks(
    core: Callable[..., Results], call: AttentionCall, queries: Sequence[Array], keys: Sequence[Array]
) -> Results:
    """Runs `by_heads` on rows padded to whole blocks."""
    length, heads = queries[0].shape[1:3]
    num_keys, kv_heads = keys[0].shape[1:3]
    group = heads // kv_heads
    here = block_positions(length, max(16, QUERY_ROWS // group), call.mask)
    there = block_positions(num_keys, KEY_ROWS, call.mask)
    # Padding has positions that neither see nor are seen, so its document does not matter.
    query, key = _padded_positions(call.query, here, -1), _padded_positions(call.key, there, NOWHERE)
    by_query, by_key = by_heads(
        partial(core, BlockRows(here * group, there)),
        replace(call, query=query, key=key),
        [_padded(x, here) for x in queries],
        [_padded(x, there) for x in keys],
    )
    return tuple(x[:, :length] for x in by_query), tuple(x[:, :num_keys] for x in by_key)


def _padded(x: Array, block: int, value: int = 0) -> Array:
    """Pads dim 1 to whole blocks."""
    missing = -x.shape[1] % block
    widths = [(0, missing if dim == 1 else 0) for dim in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value) if missing else x


def _padded_positions(positions: TokenPositions, block: int, position: int) -> TokenPositions:
    if positions.position is None:
        return NO_POSITIONS
    document = None if positions.document is None else _padded(positions.document, block)
    return TokenPositions(_padded(positions.position, block, position), document)


def _forward(blocks: BlockRows, call: AttentionCall, queries: Sequence[Array], keys: Sequence[Array]) -> Results:
    q, *sinks = queries
    k, v = keys
    visibility = _visibility(call, blocks)

    def one(i: Array, out: tuple[Array, Array]) -> tuple[Array, Array]:
        tile, rest = scaled(_block(q, i, blocks.query, -2), call)
        here = _positions(call.query, i, blocks.query).over_keys()

        def step(j: Array, running: RunningSoftmax) -> RunningSoftmax:
            # Sliced outside of the branch: see `rows` on positions read at an offset.
            there = _positions(call.key, j, blocks.key).over_queries()

            def attend_block(seen: Array | None) -> RunningSoftmax:
                return attend(running, tile, (_block(k, j, blocks.key, -2), _block(v, j, blocks.key, -2)), rest, seen)

            kind = None if visibility is None else visibility[i, j]
            return _attend_visible(kind, running, attend_block, partial(visible, here, there, window=call.window))

        sink = _block(sinks[0], i, blocks.query, -1) if sinks else None
        running = lax.fori_loop(0, k.shape[-2] // blocks.key, step, begin(sink, tile, v.shape[-1]))
        mixed, lse = finish(running)
        return _put(out[0], mixed, i, -2), _put(out[1], lse, i, -1)

    start = (jnp.zeros((*q.shape[:-1], v.shape[-1]), q.dtype), jnp.zeros(q.shape[:-1], jnp.float32))
    return lax.fori_loop(0, q.shape[-2] // blocks.query, one, start), ()


def _backward(blocks: BlockRows, call: AttentionCall, queries: Sequence[Array], keys: Sequence[Array]) -> Results:
    q, dout, lse, delta = queries
    k, v = keys
    visibility = _visibility(call, blocks)
    tall, rest = scaled(q, call)
    columns = transposed(k)

    def one(j: Array, out: QkvCotangents) -> QkvCotangents:
        keys_j, values_j, columns_j = (_block(x, j, blocks.key, axis) for x, axis in ((k, -2), (v, -2), (columns, -1)))
        there = _positions(call.key, j, blocks.key).over_keys()

        def step(i: Array, before: QkvCotangents) -> QkvCotangents:
            dq, dk, dv = before
            part, sums, deltas = (_block(x, i, blocks.query, -1) for x in (dq, lse, delta))
            here = _positions(call.query, i, blocks.query).over_queries()

            def attend_block(seen: Array | None) -> QkvCotangents:
                tile, dtile = _block(tall, i, blocks.query, -2), _block(dout, i, blocks.query, -2)
                p, ds = score_cotangents((tile, dtile, sums, deltas), (keys_j, values_j), rest, seen)
                return (
                    part + weighted_sums(columns_j, ds.astype(k.dtype)),
                    dk + weighted_sums(ds, tile),
                    dv + weighted_sums(p, dtile),
                )

            kind = None if visibility is None else visibility[i, j]
            seen = partial(visible, here, there, window=call.window)
            part, dk, dv = _attend_visible(kind, (part, dk, dv), attend_block, seen)
            return _put(dq, part, i, -1), dk, dv

        zeros = (jnp.zeros(x.shape, jnp.float32) for x in (keys_j, values_j))
        dq, dk, dv = lax.fori_loop(0, q.shape[-2] // blocks.query, step, (out[0], *zeros))
        return dq, _put(out[1], dk * rest.scale, j, -2), _put(out[2], dv, j, -2)

    # The cotangents of queries are columns, see `score_cotangents`.
    start = (jnp.zeros((*q.shape[:-2], q.shape[-1], q.shape[-2]), jnp.float32), jnp.zeros_like(k), jnp.zeros_like(v))
    dq, dk, dv = lax.fori_loop(0, k.shape[-2] // blocks.key, one, start)
    return ((jnp.swapaxes(dq, -1, -2) * call.scale).astype(q.dtype),), (dk, dv)


def _visibility(call: AttentionCall, blocks: BlockRows) -> Array | None:
    if call.mask == "all":
        return None
    return block_visibility(call.query, call.key, window=call.window, query_block=blocks.query, key_block=blocks.key)


def _attend_visible(
    kind: Array | None, before: _Carry, attend_block: Callable[[Array | None], _Carry], seen: Callable[[], Array]
) -> _Carry:
    """Returns ``attend_block(mask)`` for keys seen in part, ``attend_block(None)`` if seen whole, else ``before``."""
    if kind is None:
        return attend_block(None)
    return lax.switch(kind, (lambda: before, lambda: attend_block(seen()), lambda: attend_block(None)))


def _block(x: Array, index: Array, size: int, axis: int) -> Array:
    return lax.dynamic_slice_in_dim(x, index * size, size, axis=axis % x.ndim)


def _positions(positions: TokenPositions, index: Array, size: int) -> TokenPositions:
    return jax.tree.map(lambda x: _block(x, index, size, -1), positions)


def _put(x: Array, value: Array, index: Array, axis: int) -> Array:
    axis %= x.ndim
    return lax.dynamic_update_slice_in_dim(x, value.astype(x.dtype), index * value.shape[axis], axis)


forward, backward = both_passes(_in_blocks, _forward, _backward)
