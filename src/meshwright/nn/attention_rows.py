"""Attention's arrays [B, T, N, H] as matrices of rows: the queries of all heads that share a key head in one matrix.

Rows of queries are (position, head within the group), so that a slice of heads of one sequence is such a matrix as it
lies in memory. A CPU takes these one after the other, so that its blocks of scores stay in cache; other devices take
all at once.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from meshwright.nn.attention_visibility import Places

Results = tuple[tuple[Array, ...], tuple[Array, ...]]
Core = Callable[[Sequence[Array], Sequence[Array], Places, Places], Results]
"""(arrays of query rows, arrays of key rows, places of query rows, of key rows) -> results by query row, by key row.

Arrays are [..., rows, width] or [..., rows]; results likewise."""


def by_heads(
    core: Core, queries: Sequence[Array], keys: Sequence[Array], query: Places, key: Places, *, one_by_one: bool
) -> Results:
    """The results of ``core`` on every sequence and key head, as [B, T, N, ...] and [B, S, K, ...].

    ``queries`` are [B, T, N, ...], ``keys`` [B, S, K, ...], places [B, T] and [B, S].
    """
    run = _one_by_one if one_by_one else _at_once
    return run(core, queries, keys, query, key)


def _at_once(core: Core, queries: Sequence[Array], keys: Sequence[Array], query: Places, key: Places) -> Results:
    length, heads = queries[0].shape[1:3]
    num_keys, kv_heads = keys[0].shape[1:3]
    group = heads // kv_heads
    rows = [_heads_first(x, kv_heads) for x in queries]
    columns = [_heads_first(x, kv_heads) for x in keys]
    # A dim of one where the arrays have heads.
    places = jax.tree.map(lambda x: jnp.repeat(x, group, axis=-1)[:, None], query)
    by_query, by_key = core(rows, columns, places, jax.tree.map(lambda x: x[:, None], key))
    return tuple(_heads_back(x, length) for x in by_query), tuple(_heads_back(x, num_keys) for x in by_key)


def _heads_first(x: Array, kv_heads: int) -> Array:
    batch, length, _, *rest = x.shape
    split = x.reshape(batch, length, kv_heads, -1, *rest)
    return jnp.moveaxis(split, 2, 1).reshape(batch, kv_heads, -1, *rest)


def _heads_back(x: Array, length: int) -> Array:
    batch, kv_heads, _, *rest = x.shape
    split = x.reshape(batch, kv_heads, length, -1, *rest)
    return jnp.moveaxis(split, 1, 2).reshape(batch, length, -1, *rest)


def _one_by_one(core: Core, queries: Sequence[Array], keys: Sequence[Array], query: Places, key: Places) -> Results:
    batch, length, heads = queries[0].shape[:3]
    num_keys, kv_heads = keys[0].shape[1:3]
    group = heads // kv_heads

    def one(index: Array) -> Results:
        row, head = index // kv_heads, index % kv_heads
        here, there = (
            jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, row, keepdims=False), p) for p in (query, key)
        )
        rows = [_take(x, row, head * group, group) for x in queries]
        return core(
            rows, [_take(x, row, head, 1) for x in keys], jax.tree.map(lambda x: jnp.repeat(x, group), here), there
        )

    def body(index: Array, out: Results) -> Results:
        row, head = index // kv_heads, index % kv_heads
        by_query, by_key = one(index)
        return (
            tuple(_put(x, y, row, head * group, group) for x, y in zip(out[0], by_query, strict=True)),
            tuple(_put(x, y, row, head, 1) for x, y in zip(out[1], by_key, strict=True)),
        )

    shapes = jax.eval_shape(one, jnp.int32(0))
    start = (
        tuple(jnp.zeros((batch, length, heads, *x.shape[1:]), x.dtype) for x in shapes[0]),
        tuple(jnp.zeros((batch, num_keys, kv_heads, *x.shape[1:]), x.dtype) for x in shapes[1]),
    )
    return lax.fori_loop(0, batch * kv_heads, body, start)


def _take(x: Array, row: Array, first: Array, count: int) -> Array:
    """Heads ``first`` and ``count`` - 1 after it of one sequence, as rows."""
    sizes = (1, x.shape[1], count, *x.shape[3:])
    starts = (row, jnp.int32(0), first, *[jnp.int32(0)] * (x.ndim - 3))
    return lax.dynamic_slice(x, starts, sizes).reshape(-1, *x.shape[3:])


def _put(x: Array, value: Array, row: Array, first: Array, count: int) -> Array:
    starts = (row, jnp.int32(0), first, *[jnp.int32(0)] * (x.ndim - 3))
    return lax.dynamic_update_slice(x, value.reshape(1, x.shape[1], count, *x.shape[3:]), starts)
