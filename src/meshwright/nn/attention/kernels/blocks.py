"""Attention by XLA, over the blocks of scores that exist, with a running softmax.

A loop over blocks of queries (of keys in the backward pass) has an inner loop over the blocks that its list names:
first those whose mask has to be evaluated, then those that are seen whole. A CPU processes a few heads of a sequence
after the other, so that blocks of scores stay in cache; other devices process all at once, over the blocks that any of
them has.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from meshwright.masks.table import BlockLists
from meshwright.nn.attention.kernels import unrolled
from meshwright.nn.attention.kernels.scores import (
    RunningSoftmax,
    attend,
    begin,
    finish,
    reads,
    scaled,
    score_cotangents,
    transposed,
    weighted_sums,
)
from meshwright.nn.attention.tiles import Head, Tile, TileRule, TileSizes

HEADS_AT_ONCE = 4
"""Most heads that a CPU processes together: XLA's threads share the elements of one operation, and run one operation
after the other. The scores of more heads no longer fit in cache."""


class TogetherBlocks(NamedTuple):
    """Blocks that are processed together, by their numbers, and which of them are real; None: all are."""

    numbers: Sequence[Any]
    real: Array | None = None


def _taken(x: Array, blocks: TogetherBlocks, size: int, axis: int = -1) -> Array:
    """Returns blocks of an array, one after the other."""
    if x.shape[axis] == size:
        return x
    parts = [lax.dynamic_slice_in_dim(x, number * size, size, axis=axis % x.ndim) for number in blocks.numbers]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)


def _one(number: Any) -> TogetherBlocks:
    return TogetherBlocks((number,))


def _tile(sizes: TileSizes, head: Head, rows: TogetherBlocks, columns: TogetherBlocks, *, turned: bool) -> Tile:
    """Returns the operands of a tile. Without the barrier XLA would read them at an offset for every score."""

    def of_rows(x: Array, axis: int) -> Array:
        return lax.optimization_barrier(jnp.expand_dims(_taken(x, rows, sizes.q_block), axis))

    def of_columns(x: Array, axis: int) -> Array:
        return lax.optimization_barrier(jnp.expand_dims(_taken(x, columns, sizes.kv_block), axis))

    return head.tile(sizes, of_rows, of_columns, turned=turned)


def _within(rule: TileRule, blocks: TogetherBlocks, size: int) -> TileRule:
    """Returns a rule whose mask leaves out blocks that are not real; they are along the last dim of a tile."""
    if blocks.real is None:
        return rule
    real, inner = jnp.repeat(blocks.real, size)[None], rule.mask
    return rule._replace(mask=lambda tile: real if inner is None else real & inner(tile))


def _put(x: Array, value: Array, index: Any, axis: int) -> Array:
    axis %= x.ndim
    if x.shape[axis] == value.shape[axis]:
        return value.astype(x.dtype)
    return lax.dynamic_update_slice_in_dim(x, value.astype(x.dtype), index * value.shape[axis], axis)


def _added(x: Array, value: Array, blocks: TogetherBlocks, size: int) -> Array:
    """Adds to the blocks, along the last dim, that `_taken` takes."""
    for n, number in enumerate(blocks.numbers):
        part = lax.slice_in_dim(value, n * size, (n + 1) * size, axis=value.ndim - 1)
        x = _put(x, _taken(x, _one(number), size) + part, number, -1)
    return x


def _over(lists: BlockLists, each: int, row: Any, step: Callable[[TogetherBlocks, Any, bool], Any], start: Any) -> Any:
    """Runs ``step(blocks, carry, is_masked)`` over the blocks of a row, ``each`` together.

    The first ones, of which some need their mask, are filled up with blocks that are not real. Static lists leave out
    loops that are empty.
    """
    static = all(isinstance(x, np.ndarray) for x in lists[:3])
    if lists.index.shape[-2:] == (1, 1):
        # a single block needs no loop
        return step(_one(0), start, not static or bool(lists.partial[0])) if not static or lists.total[0] else start
    fill = -lists.total % each
    masked_steps, steps = (lists.partial + fill + each - 1) // each, (lists.total + fill) // each
    masked_end, end, missing, index = (jnp.asarray(x)[row] for x in (masked_steps, steps, fill, lists.index))

    def run(is_masked: bool) -> Callable[[Any, Any], Any]:
        def body(n: Any, carry: Any) -> Any:
            positions = [n * each - missing + number for number in range(each)]
            # positions below 0 are blocks that are not real: they read the first one, and the mask hides it
            numbers = [index[jnp.maximum(x, 0) if is_masked and each > 1 else x] for x in positions]
            real = jnp.stack(positions) >= 0 if is_masked and each > 1 else None
            return step(TogetherBlocks(numbers, real), carry, is_masked)

        return body

    if not static or masked_steps.any():
        start = lax.fori_loop(0, masked_end, run(True), start)
    if not static or (steps > masked_steps).any():
        start = lax.fori_loop(masked_end, end, run(False), start)
    return start


def _rows(count: int, body: Callable[[Any, Any], Any], start: Any) -> Any:
    return body(0, start) if count == 1 else lax.fori_loop(0, count, body, start)


def _forward(sizes: TileSizes, scale: float, head: Head, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Returns the result [T, Hv] and log-sum-exp [T] of one head."""

    def one(i: Any, out: tuple[Array, Array]) -> tuple[Array, Array]:
        queries, rest_scale = scaled(_taken(q, _one(i), sizes.q_block, -2), scale)

        def step(blocks: TogetherBlocks, running: RunningSoftmax, is_masked: bool) -> RunningSoftmax:
            keys = _taken(k, blocks, sizes.kv_block, -2), _taken(v, blocks, sizes.kv_block, -2)
            rule = _within(head.rule, blocks, sizes.kv_block)
            tile = _tile(sizes, head, _one(i), blocks, turned=False)
            return attend(running, queries, keys, rest_scale, rule, tile, is_masked=is_masked)

        mixed, lse = finish(_over(head.lists, sizes.each, i, step, begin(queries, v.shape[-1])))
        return _put(out[0], mixed, i, -2), _put(out[1], lse, i, -1)

    start = jnp.zeros((*q.shape[:-1], v.shape[-1]), q.dtype), jnp.zeros(q.shape[:-1], jnp.float32)
    return _rows(q.shape[-2] // sizes.q_block, one, start)


def _backward(
    sizes: TileSizes, scale: float, head: Head, rows: Sequence[Array], k: Array, v: Array
) -> tuple[Array, Array, Array, Any]:
    """Returns (dq [T, H], dk [S, H], dv [S, Hv], cotangents of what the score rule reads) of one head; float32 but dq.

    ``rows`` are queries, cotangents of results, log-sum-exps and delta.
    """
    columns = transposed(k)
    queries, rest_scale = scaled(rows[0], scale)

    def one(j: Any, out: tuple[Array, Array, Array, Any]) -> tuple[Array, Array, Array, Any]:
        keys = _taken(k, _one(j), sizes.kv_block, -2), _taken(v, _one(j), sizes.kv_block, -2)
        columns_j = _taken(columns, _one(j), sizes.kv_block)

        def step(blocks: TogetherBlocks, before: Any, is_masked: bool) -> Any:
            dq, dk, dv, drule = before
            q, dout = (_taken(x, blocks, sizes.q_block, -2) for x in (queries, rows[1]))
            lse, delta = (_taken(x, blocks, sizes.q_block) for x in rows[2:])
            rule = _within(head.rule, blocks, sizes.q_block)
            tile = _tile(sizes, head, blocks, _one(j), turned=True)
            p, ds, dreads = score_cotangents((q, dout, lse, delta), keys, rest_scale, rule, tile, is_masked=is_masked)
            dq = _added(dq, weighted_sums(columns_j, ds.astype(k.dtype)), blocks, sizes.q_block)
            add_by_name: dict[str, Any] = {
                "heads": lambda x, y: x + y.sum(),
                "rows": lambda x, y: _added(x, y.sum(0), blocks, sizes.q_block),
                "columns": lambda x, y: _added(x, y.sum(1), _one(j), sizes.kv_block),
                "tables": jnp.add,
            }
            drule = {name: jax.tree.map(add_by_name[name], drule[name], dreads[name]) for name in drule}
            return dq, dk + weighted_sums(ds, q), dv + weighted_sums(p, dout), drule

        zeros = [jnp.zeros(x.shape, jnp.float32) for x in keys]
        dq, dk, dv, drule = _over(head.lists, sizes.each, j, step, (out[0], *zeros, out[3]))
        return dq, _put(out[1], dk * rest_scale, j, -2), _put(out[2], dv, j, -2), drule

    # The cotangents of queries are columns, see `score_cotangents`.
    q = rows[0]
    start = (
        jnp.zeros((*q.shape[:-2], q.shape[-1], q.shape[-2]), jnp.float32),
        *(jnp.zeros(x.shape, jnp.float32) for x in (k, v)),
        jax.tree.map(jnp.zeros_like, reads(head.rule)),
    )
    dq, dk, dv, drule = _rows(k.shape[-2] // sizes.kv_block, one, start)
    # Without it XLA would transpose a single product instead, and its factors would have the slow layout.
    dq = lax.optimization_barrier(dq)
    return (jnp.swapaxes(dq, -1, -2) * scale).astype(q.dtype), dk, dv, drule


MOST_PARTS, MOST_TILES = 3, 12
"""Parts in one iteration of a loop over unrolled tiles, and their tiles: a CPU's threads share these, and the scores of
more no longer fit in cache."""


class HeadPart(NamedTuple):
    """A sequence and a few of its heads, from ``head`` on: what a CPU processes together."""

    sequence: Array
    head: Array
    heads: int
    group: int

    def rows(self, x: Array, *, is_keys: bool = False) -> Array:
        """Returns [1, T, heads, ...] of [B, T, N, ...], or [1, S, kv heads, ...] of [B, S, K, ...]."""
        num_heads = max(1, self.heads // self.group) if is_keys else self.heads
        return lax.dynamic_slice(x, self._start(x, is_keys), (1, x.shape[1], num_heads, *x.shape[3:]))

    def put(self, x: Array, value: Array, *, is_keys: bool = False) -> Array:
        """Writes what `rows` reads."""
        return lax.dynamic_update_slice(x, value.astype(x.dtype), self._start(x, is_keys))

    def _start(self, x: Array, is_keys: bool) -> tuple[Any, ...]:
        return self.sequence, 0, self.head // self.group if is_keys else self.head, *[0] * (x.ndim - 3)

    def own(self, x: Any) -> Any:
        """Returns [1, 1 | heads, ...] of [B | 1, N | 1, ...]."""
        if x.shape[:2] == (1, 1):
            return x
        sizes = 1, min(self.heads, x.shape[1]), *x.shape[2:]
        return lax.dynamic_slice(jnp.asarray(x), self._own_start(x), sizes)

    def added(self, x: Array, value: Array) -> Array:
        """Adds to what `own` reads."""
        return lax.dynamic_update_slice(x, self.own(x) + value, self._own_start(x))

    def _own_start(self, x: Any) -> tuple[Any, ...]:
        start = self.sequence if x.shape[0] > 1 else 0, self.head if x.shape[1] > 1 else 0
        return *start, *[0] * (x.ndim - 2)

    def rule(self, rule: TileRule) -> TileRule:
        """Returns the rule of these heads."""
        return rule._replace(
            heads=tuple(map(self.own, rule.heads)),
            rows=tuple(map(self.own, rule.rows)),
            columns=tuple(map(self.own, rule.columns)),
        )


_BY_HEAD = "heads", "rows", "columns"


def forward(
    rule: TileRule, lists: BlockLists, sizes: TileSizes, scale: float, q: Array, k: Array, v: Array, *, in_parts: bool
) -> tuple[Array, Array]:
    """Returns the result [B, T, N, Hv] and the log-sum-exp [B, T, N] in float32 of q [B, T, N, H], k [B, S, K, H] and
    v [B, S, K, Hv]; T and S are whole blocks. A query that sees no key gets zeros and minus infinity.

    ``in_parts`` processes a few heads of one sequence after the other.
    """
    run = partial(_forward if sizes.each else unrolled.forward, sizes, scale)
    if not in_parts:
        o, lse = _together(run, rule, lists, (q,), k, v)
        return _heads_back(o), _heads_back(lse)

    def step(part: HeadPart, out: tuple[Array, Array]) -> tuple[Array, Array]:
        keys = [part.rows(x, is_keys=True) for x in (k, v)]
        own_lists = jax.tree.map(part.own, lists)
        results = _together(run, part.rule(rule), own_lists, (part.rows(q),), keys[0], keys[1], part)
        o, lse = (part.put(x, _heads_back(y)) for x, y in zip(out, results, strict=True))
        return o, lse

    start = jnp.zeros((*q.shape[:3], v.shape[-1]), q.dtype), jnp.zeros(q.shape[:3], jnp.float32)
    return _in_parts(q, k, lists, sizes, step, start)


def backward(
    rule: TileRule,
    lists: BlockLists,
    sizes: TileSizes,
    scale: float,
    rows: Sequence[Array],
    k: Array,
    v: Array,
    *,
    in_parts: bool,
) -> tuple[Array, Array, Array, Any]:
    """Returns (dq, dk, dv, cotangents of what the score rule reads); ``rows`` are q, dout [B, T, N, ...], lse and delta
    [B, T, N], ``lists`` those of blocks of keys."""

    def run(head: Head, *given: Array) -> Any:
        function = _backward if sizes.each else unrolled.backward
        return function(sizes, scale, head, given[:4], *given[4:])

    def together(rule: TileRule, *given: Any) -> tuple[Array, Array, Array, Any]:
        dq, dk, dv, drule = _together(run, rule, *given)
        dk, dv = (_heads_back(x.sum(2, keepdims=True)) for x in (dk, dv))
        return _heads_back(dq), dk, dv, {n: jax.tree.map(_sum_like, x, drule[n]) for n, x in reads(rule).items()}

    if not in_parts:
        dq, dk, dv, drule = together(rule, lists, rows, k, v)
        return dq, dk.astype(k.dtype), dv.astype(v.dtype), drule

    def step(part: HeadPart, out: Any) -> Any:
        keys = (part.rows(x, is_keys=True) for x in (k, v))
        inputs = part.rule(rule), jax.tree.map(part.own, lists), [part.rows(x) for x in rows]
        dq, *dkeys, drule = together(*inputs, *keys, part)
        # only parts of one group add to the same key heads
        if part.heads % part.group:
            dkeys = [part.rows(x, is_keys=True) + y for x, y in zip(out[1:3], dkeys, strict=True)]
        # Otherwise nothing is read that was written: XLA would copy the whole array in every iteration.
        dk, dv = (part.put(x, y, is_keys=True) for x, y in zip(out[1:3], dkeys, strict=True))
        adders = {name: part.added if name in _BY_HEAD else jnp.add for name in drule}
        return part.put(out[0], dq), dk, dv, {n: jax.tree.map(adders[n], out[3][n], x) for n, x in drule.items()}

    start = (
        jnp.zeros_like(rows[0]),
        *(jnp.zeros(x.shape, jnp.float32) for x in (k, v)),
        jax.tree.map(jnp.zeros_like, reads(rule)),
    )
    dq, dk, dv, drule = _in_parts(rows[0], k, lists, sizes, step, start)
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), drule


def _in_parts(
    q: Array, k: Array, lists: BlockLists, sizes: TileSizes, step: Callable[[HeadPart, Any], Any], start: Any
) -> Any:
    """Runs ``step`` for all sequences and heads, `HEADS_AT_ONCE` together where their blocks are the same; where tiles
    are unrolled, the heads that share a key head."""
    batch, _, heads = q.shape[:3]
    group = heads // k.shape[2]
    is_by_head = any(x.shape[1] > 1 for x in jax.tree.leaves(lists))
    limit = 1 if is_by_head else HEADS_AT_ONCE
    # heads that share a key head, or all heads of some key heads
    counts = [n for n in range(1, limit + 1) if group % n == 0 or (sizes.each and n % group == 0 and heads % n == 0)]
    num_parts = heads // counts[-1]
    max_parts = min(MOST_PARTS, max(1, MOST_TILES // lists.index.shape[2])) if not sizes.each else 1
    unroll = next(n for n in range(max_parts, 0, -1) if num_parts % n == 0)

    def sequence(b: Any, out: Any) -> Any:
        def one(n: Any, out: Any) -> Any:
            return step(HeadPart(b, n * counts[-1], counts[-1], group), out)

        return one(0, out) if num_parts == 1 else lax.fori_loop(0, num_parts, one, out, unroll=unroll)

    return _rows(batch, sequence, start)


def _together(
    run: Callable[..., Any],
    rule: TileRule,
    lists: BlockLists,
    rows: Sequence[Array],
    k: Array,
    v: Array,
    part: HeadPart | None = None,
) -> Any:
    """Runs a pass on all heads at once, over the blocks of the first; its results get the dims [B, K, G]."""
    batch, _, heads = rows[0].shape[:3]
    kv_heads = k.shape[2]
    split = batch, kv_heads, heads // kv_heads
    origin = (0, 0) if part is None else (part.sequence, part.head)

    def by_head(x: Array) -> Array:
        return jnp.broadcast_to(x, (batch, heads, *x.shape[2:])).reshape(*split, *x.shape[2:])

    def heads_first(x: Array, *shape: int) -> Array:
        return jnp.moveaxis(x.reshape(batch, x.shape[1], *shape, *x.shape[3:]), 1, 1 + len(shape))

    values = {name: tuple(map(by_head, getattr(rule, name))) for name in _BY_HEAD}
    places = by_head(origin[0] + jnp.arange(batch)[:, None]), by_head(origin[1] + jnp.arange(heads)[None])
    one_list = jax.tree.map(lambda x: x[0, 0], lists)

    def one(own: Any, places: Any, rows: Any, k: Array, v: Array) -> Any:
        return run(Head(rule._replace(**own), one_list, places), *rows, k, v)

    # first over a group, whose heads share keys and values: these get no dim and no copy
    for axes, size in zip(((0, 0, 0, None, None), (0,) * 5, (0,) * 5), reversed(split), strict=True):
        one = jax.vmap(one, axes) if size > 1 else _of_one(one, axes)
    return one(values, places, [heads_first(x, *split[1:]) for x in rows], *(heads_first(x, kv_heads) for x in (k, v)))


def _of_one(function: Callable[..., Any], axes: tuple[int | None, ...]) -> Callable[..., Any]:
    """Returns what `jax.vmap` would over dims of 1, without products of such dims, which XLA computes more slowly."""

    def mapped(*given: Any) -> Any:
        single = [x if axis is None else jax.tree.map(lambda y: y[0], x) for x, axis in zip(given, axes, strict=True)]
        return jax.tree.map(lambda y: y[None], function(*single))

    return mapped


def _heads_back(x: Array) -> Array:
    """Returns [B, T, N, ...] of [B, K, G, T, ...]."""
    moved = jnp.moveaxis(x, 3, 1)
    return moved.reshape(*moved.shape[:2], -1, *moved.shape[4:])


def _sum_like(like: Array, more: Array) -> Array:
    """Sums cotangents [B, K, G, ...] to the shape of [B | 1, N | 1, ...], or of a table."""
    if like.ndim != more.ndim - 1 or like.shape[2:] != more.shape[3:]:
        return more.sum((0, 1, 2))
    more = more.reshape(more.shape[0], -1, *more.shape[3:])
    return more.sum(tuple(axis for axis in (0, 1) if like.shape[axis] == 1), keepdims=True)
