"""Attention by XLA on a CPU where the blocks are known while tracing: every tile is an operation of its own.

A tile is a block of queries with all keys that its blocks leave (or a block of keys with all queries), in static
slices. So no running softmax is rescaled, and a CPU's threads share the tiles, which are independent.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from meshwright.masks.table import BlockLists
from meshwright.nn.attention.kernels.scores import (
    attend,
    finish,
    reads,
    scaled,
    score_cotangents,
    transposed,
    weighted_sums,
)
from meshwright.nn.attention.tiles import Head, Tile, TileSizes

LONGEST, DENSE, SPARSITY = 4096, 2048, 0.7
"""Maximum positions; positions from which on blocks have to be at least so sparse, because scores leave the cache."""
WHOLE = 512
"""Positions up to which tiles are run whole, whatever a mask's arrays leave: XLA's threads do not share less."""


def _tiles(lists: BlockLists) -> Iterator[tuple[int, list[int], bool]]:
    """Returns the blocks of each row, rising, and whether any of them needs its mask."""
    for row, (partial, total, index) in enumerate(zip(*lists[:3], strict=True)):
        yield row, sorted(index[:total].tolist()), bool(partial)


def _fewest(head: Head, row: int, blocks: list[int], run: Callable[[list[int]], Any]) -> Any:
    """Runs a tile with its blocks, or with the half of them nearest to the diagonal, and so on, where the arrays that
    the mask reads leave nothing of the others."""
    if head.lists.exists is None or len(blocks) == 1:
        return run(blocks)
    half = len(blocks) // 2
    is_below = row - blocks[0] > blocks[-1] - row
    near, far = (blocks[half:], blocks[:half]) if is_below else (blocks[:-half], blocks[-half:])
    sees_far = jnp.asarray(head.lists.exists)[row, np.array(far)].any()
    return lax.cond(sees_far, lambda: run(blocks), lambda: _fewest(head, row, near, run))


def _taken(x: Array, blocks: Sequence[int], size: int, axis: int = -1) -> Array:
    """Returns blocks of an array, one after the other; neighbours are one slice."""
    axis %= x.ndim
    if not blocks:
        return lax.slice_in_dim(x, 0, 0, axis=axis)
    cuts = [n for n in range(1, len(blocks)) if blocks[n] != blocks[n - 1] + 1]
    runs = [
        (blocks[a] * size, (blocks[b - 1] + 1) * size) for a, b in zip([0, *cuts], [*cuts, len(blocks)], strict=True)
    ]
    parts = [lax.slice_in_dim(x, *run, axis=axis) for run in runs]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)


def _tile(sizes: TileSizes, head: Head, rows: Sequence[int], columns: Sequence[int], *, turned: bool) -> Tile:
    def of_rows(x: Array, axis: int) -> Array:
        return jnp.expand_dims(_taken(x, rows, sizes.q_block), axis)

    def of_columns(x: Array, axis: int) -> Array:
        return jnp.expand_dims(_taken(x, columns, sizes.kv_block), axis)

    return head.tile(sizes, of_rows, of_columns, turned=turned)


def forward(sizes: TileSizes, scale: float, head: Head, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Returns the result [T, Hv] and log-sum-exp [T] of one head."""
    outs, lses = [], []
    q, rest = scaled(q, scale)
    for i, blocks, is_masked in _tiles(head.lists):
        tall = _taken(q, [i], sizes.q_block, -2)
        if not blocks:
            outs.append(jnp.zeros((*tall.shape[:-1], v.shape[-1]), q.dtype))
            lses.append(jnp.full(tall.shape[:-1], -jnp.inf, jnp.float32))
            continue

        def row(blocks: list[int], i: int = i, tall: Array = tall, is_masked: bool = is_masked) -> tuple[Array, Array]:
            keys = _taken(k, blocks, sizes.kv_block, -2), _taken(v, blocks, sizes.kv_block, -2)
            tile = _tile(sizes, head, [i], blocks, turned=False)
            return finish(attend(None, tall, keys, rest, head.rule, tile, is_masked=is_masked))

        out, lse = _fewest(head, i, blocks, row)
        outs.append(out.astype(q.dtype))
        lses.append(lse)
    return jnp.concatenate(outs, -2), jnp.concatenate(lses, -1)


def backward(
    sizes: TileSizes, scale: float, head: Head, rows: Sequence[Array], k: Array, v: Array
) -> tuple[Array, Array, Array, Any]:
    """Returns (dq, dk, dv, cotangents of what the score rule reads) of one head, as `blocks` does."""
    queries, rest = scaled(rows[0], scale)
    columns = transposed(k)
    # Without it scores would read these at the stride of the heads, which XLA does not vectorise.
    by_row = lax.optimization_barrier(tuple(rows[2:]))
    # dq is accumulated as columns: its products with transposed keys then have no other transposed factor.
    dq = jnp.zeros((*queries.shape[:-2], queries.shape[-1], queries.shape[-2]), jnp.float32)
    drule = jax.tree.map(jnp.zeros_like, reads(head.rule))
    dks, dvs = [], []
    for j, blocks, is_masked in _tiles(head.lists):
        keys = _taken(k, [j], sizes.kv_block, -2), _taken(v, [j], sizes.kv_block, -2)
        if not blocks:
            dks.append(jnp.zeros(keys[0].shape, jnp.float32))
            dvs.append(jnp.zeros(keys[1].shape, jnp.float32))
            continue
        before = dq, drule

        def column(
            blocks: list[int], j: int = j, keys: Any = keys, before: Any = before, is_masked: bool = is_masked
        ) -> Any:
            dq, drule = before
            q, dout = (_taken(x, blocks, sizes.q_block, -2) for x in (queries, rows[1]))
            lse, delta = (_taken(x, blocks, sizes.q_block) for x in by_row)
            tile = _tile(sizes, head, blocks, [j], turned=True)
            p, ds, dreads = score_cotangents((q, dout, lse, delta), keys, rest, head.rule, tile, is_masked=is_masked)
            part = weighted_sums(_taken(columns, [j], sizes.kv_block), ds.astype(k.dtype))
            add_by_name: dict[str, Any] = {
                "heads": lambda x, y: x + y.sum(),
                "rows": lambda x, y: _added(x, y.sum(0), blocks, sizes.q_block),
                "columns": lambda x, y: _added(x, y.sum(1), [j], sizes.kv_block),
                "tables": jnp.add,
            }
            drule = {name: jax.tree.map(add_by_name[name], drule[name], dreads[name]) for name in drule}
            return _added(dq, part, blocks, sizes.q_block), weighted_sums(ds, q) * rest, weighted_sums(p, dout), drule

        dq, dk, dv, drule = _fewest(head, j, blocks, column)
        dks.append(dk)
        dvs.append(dv)
    # Without it XLA would transpose the product of a single tile instead, and its factors would have the slow layout.
    dq = lax.optimization_barrier(dq)
    # dk has the scale by the scaled queries, or by ``rest``; the keys in products of dq have none
    turned_back = (jnp.swapaxes(dq, -1, -2) * scale).astype(rows[0].dtype)
    return turned_back, jnp.concatenate(dks, -2), jnp.concatenate(dvs, -2), drule


def _added(x: Array, value: Array, blocks: Sequence[int], size: int) -> Array:
    """Adds ``value`` to the blocks that `_taken` takes. Not a scatter: over all rows its index is empty, and jaxlib
    0.11's partitioner crashes on that."""
    start, end = blocks[0] * size, (blocks[-1] + 1) * size
    if len(blocks) * size < end - start:
        for n, block in enumerate(blocks):
            x = _added(x, lax.slice_in_dim(value, n * size, (n + 1) * size, axis=value.ndim - 1), [block], size)
        return x
    added = lax.slice_in_dim(x, start, end, axis=x.ndim - 1) + value
    return lax.dynamic_update_slice_in_dim(x, added, start, axis=x.ndim - 1)
