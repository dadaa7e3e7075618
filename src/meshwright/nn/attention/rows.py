"""Runs attention on matrices of rows: the queries of all heads that share a key head form one matrix.

Rows of queries are (position, head within the group), so a slice of heads of one sequence of [B, T, N, H] is such a
matrix without a copy. A CPU processes the matrices one by one, so that blocks of scores stay in cache; other devices
process all at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from meshwright.nn.attention.scores import AttentionResult, BackwardInputs, QkvCotangents, row_products, safe
from meshwright.nn.attention.visibility import AttentionCall

HEADS_PER_STEP = (3, 2)
"""Key heads in one loop iteration on a CPU, whose threads share its operations: the first that divides the number of
heads, else 1. The scores of six heads no longer fit in cache."""

Results = tuple[tuple[Array, ...], tuple[Array, ...]]
AttentionPass = Callable[..., tuple[Array, ...]]
Core = Callable[[AttentionCall, Sequence[Array], Sequence[Array]], Results]
"""(call with the positions of these rows, query arrays, key arrays) -> results by query row, results by key row.

Arrays are [..., rows, width] or [..., rows]; results likewise."""


def both_passes(
    run: Callable[..., Results], forward: Callable[..., Results], backward: Callable[..., Results]
) -> tuple[AttentionPass, AttentionPass]:
    """Returns the forward and backward pass on [B, T, N, H] from functions of rows.

    ``forward`` gets (q,) or (q, sinks) and (k, v), and returns (result, log-sum-exp) by query row. ``backward`` gets
    (q, dout, lse, delta) and (k, v), and returns (dq,) by query row, (dk, dv) by key row. ``run`` is like `by_heads`.
    """

    def whole_forward(call: AttentionCall, q: Array, k: Array, v: Array) -> AttentionResult:
        sinks = call.sinks
        more = () if sinks is None else (jnp.broadcast_to(sinks.astype(jnp.float32)[None, None], q.shape[:3]),)
        (o, lse), _ = run(forward, call, (q, *more), (k, v))
        return o, lse

    def whole_backward(call: AttentionCall, given: BackwardInputs, q: Array, k: Array, v: Array) -> QkvCotangents:
        dout, o, lse = given
        rows = (q, dout.astype(q.dtype), safe(lse), row_products(dout, o))
        (dq,), (dk, dv) = run(backward, call, rows, (k, v))
        return dq, dk, dv

    return whole_forward, whole_backward


def by_heads(core: Core, call: AttentionCall, queries: Sequence[Array], keys: Sequence[Array]) -> Results:
    """Applies ``core`` to every sequence and key head; results are [B, T, N, ...] and [B, S, K, ...].

    ``queries`` are [B, T, N, ...], ``keys`` [B, S, K, ...].
    """
    run = _one_by_one if call.platform == "cpu" else _at_once
    return run(core, call, queries, keys)


def _at_once(core: Core, call: AttentionCall, queries: Sequence[Array], keys: Sequence[Array]) -> Results:
    length, heads = queries[0].shape[1:3]
    num_keys, kv_heads = keys[0].shape[1:3]
    # Positions get a dim of one where the arrays have key heads.
    query = jax.tree.map(lambda x: jnp.repeat(x, heads // kv_heads, axis=-1)[:, None], call.query)
    key = jax.tree.map(lambda x: x[:, None], call.key)
    rows, columns = ([_heads_first(x, kv_heads) for x in arrays] for arrays in (queries, keys))
    by_query, by_key = core(replace(call, query=query, key=key), rows, columns)
    return tuple(_heads_back(x, length) for x in by_query), tuple(_heads_back(x, num_keys) for x in by_key)


def _heads_first(x: Array, kv_heads: int) -> Array:
    batch, length, _, *rest = x.shape
    split = x.reshape(batch, length, kv_heads, -1, *rest)
    return jnp.moveaxis(split, 2, 1).reshape(batch, kv_heads, -1, *rest)


def _heads_back(x: Array, length: int) -> Array:
    batch, kv_heads, _, *rest = x.shape
    split = x.reshape(batch, kv_heads, length, -1, *rest)
    return jnp.moveaxis(split, 1, 2).reshape(batch, length, -1, *rest)


def _one_by_one(core: Core, call: AttentionCall, queries: Sequence[Array], keys: Sequence[Array]) -> Results:
    batch, length, heads = queries[0].shape[:3]
    num_keys, kv_heads = keys[0].shape[1:3]
    group = heads // kv_heads
    # Arrays of one number per row are read in loops over scores, which XLA would not vectorise with a stride of heads.
    queries = [x if x.ndim == 4 else _heads_first(x, kv_heads) for x in queries]

    def of_sequence(row: Array) -> AttentionCall:
        query, key = (
            jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, row, keepdims=False), positions)
            for positions in (call.query, call.key)
        )
        return replace(call, query=jax.tree.map(lambda x: jnp.repeat(x, group), query), key=key)

    def one(row: Array, head: Array, here: AttentionCall) -> Results:
        rows = [_take(x, row, head, group) for x in queries]
        return core(here, rows, [_take(x, row, head, 1) for x in keys])

    def sequence(row: Array, out: Results) -> Results:
        here = of_sequence(row)

        # The loop over heads is separate, so that it has the positions of one sequence as whole arrays: reading these
        # at an offset inside the loop over scores makes that loop several times as slow.
        def step(head: Array, out: Results) -> Results:
            by_query, by_key = one(row, head, here)
            return (
                tuple(_put(x, y, row, head, group) for x, y in zip(out[0], by_query, strict=True)),
                tuple(_put(x, y, row, head, 1) for x, y in zip(out[1], by_key, strict=True)),
            )

        return lax.fori_loop(0, kv_heads, step, out, unroll=next((n for n in HEADS_PER_STEP if kv_heads % n == 0), 1))

    shapes = jax.eval_shape(lambda first: one(first, first, of_sequence(first)), jnp.int32(0))

    def empty(x: jax.ShapeDtypeStruct, length: int) -> Array:
        """Returns [B, T, N, width] for rows with a width, [B, K, rows] for one number per row."""
        rows, *width = x.shape
        shape = (batch, length, rows // length * kv_heads, *width) if width else (batch, kv_heads, rows)
        return jnp.zeros(shape, x.dtype)

    start = tuple(tuple(empty(x, n) for x in part) for part, n in zip(shapes, (length, num_keys), strict=True))
    by_query, by_key = lax.fori_loop(0, batch, sequence, start)
    return tuple(x if x.ndim == 4 else _heads_back(x, length) for x in by_query), by_key


def _take(x: Array, row: Array, head: Array, group: int) -> Array:
    """Returns the rows of one sequence and key head."""
    if x.ndim == 3:
        return x[row, head]
    sizes = (1, x.shape[1], group, x.shape[3])
    return lax.dynamic_slice(x, _start(row, head, group), sizes).reshape(-1, x.shape[3])


def _put(x: Array, value: Array, row: Array, head: Array, group: int) -> Array:
    if x.ndim == 3:
        return lax.dynamic_update_slice(x, value[None, None], (row, head, jnp.int32(0)))
    return lax.dynamic_update_slice(x, value.reshape(1, x.shape[1], group, x.shape[3]), _start(row, head, group))


def _start(row: Array, head: Array, group: int) -> tuple[Array, Array, Array, Array]:
    return row, jnp.int32(0), head * group, jnp.int32(0)
