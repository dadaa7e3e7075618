"""Attention by XLA on any platform, for every mask and score rule.

A CPU processes a few heads of a sequence at a time, so that their scores stay in cache; other devices process all heads
at once, over the blocks that any head needs. `blocks` has the passes of one head.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from meshwright.masks.kernels import tile_rows
from meshwright.masks.table import BlockLists
from meshwright.nn.attention.call import AttentionCall, padded, prepared
from meshwright.nn.attention.kernels import blocks, scores
from meshwright.nn.attention.tiles import DynamicInt, Head, TileRule, TileSizes

Side = Literal["queries", "keys"]

ROWS, LISTED = 256, 128
"""On a CPU: rows of a block of the outer loop (queries, or keys in the backward pass), and of a block in its list."""

LONGEST, DENSE, SPARSITY = 4096, 2048, 0.7
"""Most positions of unrolled tiles; from `DENSE` positions on, at least the share `SPARSITY` of the blocks must be
empty, because scores leave the cache."""

WHOLE = 512
"""Positions up to which tiles run all their blocks, whatever a mask's arrays leave: XLA's threads do not share less."""

HEADS_AT_ONCE = 4
"""Most heads that a CPU processes together: XLA's threads share the elements of one operation, and run one operation
after the other. The scores of more heads no longer fit in cache."""

TOGETHER = {1: 1.54, 2: 3.01, 4: 4.0}
"""Number of listed blocks that a CPU processes together -> its time, in quarters of the time for 4.

For all pairs of 4,096 positions and 8 heads of 64, both passes took 1,448, 1,417 and 940 ms (2026-11-27, two cores of
an AMD EPYC): XLA's threads share products from 16 MFLOP on.
"""

WIDE = 512
"""Queries and keys of a block on other devices."""


def block_size(length: int, most: int) -> int:
    """Returns ``length`` if at most ``most``, else its largest divisor from a quarter of ``most`` to ``most``, or
    ``most``, so that the last block is padded."""
    if length <= most:
        return length
    divisor = next(size for size in range(most, 0, -1) if length % size == 0)
    return divisor if 4 * divisor >= most else most


def _prepared(call: AttentionCall, q: Array, k: Array, *, over: Side) -> tuple[TileRule, BlockLists, TileSizes]:
    """Returns the rule, the lists of blocks and the sizes of a pass; blocks of ``over`` list the other side's."""
    seq_lens = q.shape[1], k.shape[1]
    bound_table = None
    if call.platform == "cpu" and max(seq_lens) <= LONGEST:
        sizes = min(seq_lens[0], int(tile_rows(seq_lens[0]))), min(seq_lens[1], int(tile_rows(seq_lens[1])))
        bound_table = call.bounds(q.shape[0], q.shape[2], *sizes)
        if bound_table is not None and max(seq_lens) > DENSE and bound_table.sparsity() < SPARSITY:
            bound_table = None
    if bound_table is None:
        max_sizes = (WIDE, WIDE)
        if call.platform == "cpu":
            max_sizes = (ROWS, LISTED) if over == "queries" else (LISTED, ROWS)
        sizes = block_size(seq_lens[0], max_sizes[0]), block_size(seq_lens[1], max_sizes[1])
    rule, block_table = prepared(call, q, k, sizes)
    q_idx, kv_idx = padded(jnp.asarray(call.q_idx), sizes[0], -1), padded(jnp.asarray(call.kv_idx), sizes[1], -1)
    block_table = block_table if call.platform == "cpu" else block_table.reduced()
    lists = block_table.lists(over) if bound_table is None else bound_table.reduced().lists(over)
    is_varying = block_table.kinds.shape[:2] != (1, 1) or not isinstance(block_table.kinds, np.ndarray)
    if bound_table is not None and is_varying and max(seq_lens) > WHOLE:
        lists = lists._replace(exists=block_table.exists(over))
    num_together = 1
    if call.platform == "cpu":
        num_together = _num_together(lists) if bound_table is None else 0
    return rule, lists, TileSizes(*sizes, q_idx, kv_idx, call.first_head, num_together)


def _num_together(lists: BlockLists) -> int:
    """Returns how many listed blocks to process together: the fastest number, or the largest if lists are unknown."""
    max_blocks = lists.index.shape[-1]
    block_counts = [n for n in TOGETHER if n <= max_blocks]
    if not isinstance(lists.total, np.ndarray):
        return max(block_counts)
    return min(block_counts, key=lambda n: float(np.ceil(lists.total / n).sum()) * TOGETHER[n])


MOST_PARTS, MOST_TILES = 3, 12
"""Parts in one iteration of a loop over unrolled tiles, and their tiles, at most: a CPU's threads share these, and more
scores no longer fit in cache."""


class HeadPart(NamedTuple):
    """A sequence and a few of its heads, from ``head`` on, which a CPU processes together."""

    sequence: DynamicInt
    head: DynamicInt
    heads: int
    group: int

    def rows(self, x: Array, *, is_keys: bool = False) -> Array:
        """Slices [1, T, heads, ...] from [B, T, N, ...], or for keys [1, S, kv heads, ...] from [B, S, K, ...]."""
        num_heads = max(1, self.heads // self.group) if is_keys else self.heads
        return lax.dynamic_slice(x, self._start(x, is_keys), (1, x.shape[1], num_heads, *x.shape[3:]))

    def put(self, x: Array, value: Array, *, is_keys: bool = False) -> Array:
        """Returns ``x`` with ``value`` written to the slice that `rows` reads."""
        return lax.dynamic_update_slice(x, value.astype(x.dtype), self._start(x, is_keys))

    def _start(self, x: Array, is_keys: bool) -> tuple[DynamicInt, ...]:
        return self.sequence, 0, self.head // self.group if is_keys else self.head, *[0] * (x.ndim - 3)

    def own(self, x: Array) -> Array:
        """Slices [1, 1 | heads, ...] from [B | 1, N | 1, ...]."""
        if x.shape[:2] == (1, 1):
            return x
        own_shape = 1, min(self.heads, x.shape[1]), *x.shape[2:]
        return lax.dynamic_slice(jnp.asarray(x), self._own_start(x), own_shape)

    def added(self, x: Array, value: Array) -> Array:
        """Returns ``x`` with ``value`` added to the slice that `own` reads."""
        return lax.dynamic_update_slice(x, self.own(x) + value, self._own_start(x))

    def _own_start(self, x: Array) -> tuple[DynamicInt, ...]:
        first_indices = self.sequence if x.shape[0] > 1 else 0, self.head if x.shape[1] > 1 else 0
        return *first_indices, *[0] * (x.ndim - 2)

    def lists(self, lists: BlockLists) -> BlockLists:
        """Returns the lists of blocks of these heads."""
        return jax.tree.map(self.own, lists)

    def rule(self, rule: TileRule) -> TileRule:
        """Returns the rule with the arrays of these heads."""
        heads, rows, columns = (tuple(map(self.own, getattr(rule, name))) for name in _BY_HEAD)
        return rule._replace(heads=heads, rows=rows, columns=columns)


_BY_HEAD = "heads", "rows", "columns"
_State = TypeVar("_State")
_Cotangents = tuple[Array, Array, Array, scores.Learned]


def forward(call: AttentionCall, q: Array, k: Array, v: Array) -> scores.AttentionResult:
    """Returns the result and the log-sum-exp in float32; zeros and minus infinity for a query that sees no key."""
    rule, lists, sizes = _prepared(call, q, k, over="queries")
    padded_q, *padded_kv = padded(q, sizes.q_block, 1), *(padded(x, sizes.kv_block, 1) for x in (k, v))
    run_pass = partial(blocks.forward, sizes, call.scale)

    def step(part: HeadPart, out: tuple[Array, Array]) -> tuple[Array, Array]:
        part_kv = [part.rows(x, is_keys=True) for x in padded_kv]
        o_and_lse = _together(run_pass, part.rule(rule), part.lists(lists), (part.rows(padded_q),), part_kv, part)
        o, lse = (part.put(x, _heads_back(y)) for x, y in zip(out, o_and_lse, strict=True))
        return o, lse

    if call.platform == "cpu":
        zero_out = jnp.zeros((*padded_q.shape[:3], v.shape[-1]), q.dtype), jnp.zeros(padded_q.shape[:3], jnp.float32)
        o, lse = _in_parts(padded_q, k, lists, sizes, step, zero_out)
    else:
        o, lse = map(_heads_back, _together(run_pass, rule, lists, (padded_q,), padded_kv))
    return o[:, : q.shape[1]], lse[:, : q.shape[1]]


def backward(call: AttentionCall, given: scores.BackwardInputs, q: Array, k: Array, v: Array) -> tuple[Array, ...]:
    """Returns (dq, dk, dv) and, with ``call.learns``, the cotangents of the score rule's arrays."""
    score = call.score
    if not call.learns or score is None:
        return _cotangents(call, given, q, k, v)[0]

    def read(arrays: tuple[Array, ...]) -> scores.Learned:
        learning_call = replace(call, score=score._replace(arrays=arrays), sinks=None)
        return scores.reads(_prepared(learning_call, q, k, over="keys")[0])

    # the kernel gives cotangents of values looked up before it, which JAX carries back to these arrays
    _, pull_back = jax.vjp(read, tuple(jnp.asarray(x) for x in score.arrays))
    dqkv, drule = _cotangents(call, given, q, k, v)
    (learned,) = pull_back(drule)
    return (*dqkv, *learned)


def _cotangents(
    call: AttentionCall, given: scores.BackwardInputs, q: Array, k: Array, v: Array
) -> tuple[scores.QkvCotangents, scores.Learned]:
    """Returns (dq, dk, dv), and the cotangents of the tile rule's arrays that the score reads."""
    rule, lists, sizes = _prepared(call, q, k, over="keys")
    dout, _, lse = given[:3]
    q_arrays = [padded(x, sizes.q_block, 1) for x in (q, dout.astype(q.dtype), scores.safe(lse), scores.deltas(given))]
    padded_kv = [padded(x, sizes.kv_block, 1) for x in (k, v)]

    def run(head: Head, *arrays: Array) -> _Cotangents:
        return blocks.backward(sizes, call.scale, head, arrays[:4], *arrays[4:])

    def together(rule: TileRule, lists: BlockLists, *arrays: Any) -> _Cotangents:
        dq, dk, dv, drule = _together(run, rule, lists, *arrays)
        dk, dv = (_heads_back(x.sum(2, keepdims=True)) for x in (dk, dv))
        return _heads_back(dq), dk, dv, {n: jax.tree.map(_sum_like, x, drule[n]) for n, x in scores.reads(rule).items()}

    def step(part: HeadPart, out: _Cotangents) -> _Cotangents:
        part_kv = [part.rows(x, is_keys=True) for x in padded_kv]
        dq, *dkv, drule = together(part.rule(rule), part.lists(lists), [part.rows(x) for x in q_arrays], part_kv, part)
        # only parts of one group add to the same key heads
        if part.heads % part.group:
            dkv = [part.rows(x, is_keys=True) + y for x, y in zip(out[1:3], dkv, strict=True)]
        # Otherwise nothing is read that was written: XLA would copy the whole array in every iteration.
        dk, dv = (part.put(x, y, is_keys=True) for x, y in zip(out[1:3], dkv, strict=True))
        adder_of = {name: part.added if name in _BY_HEAD else jnp.add for name in drule}
        return part.put(out[0], dq), dk, dv, {n: jax.tree.map(adder_of[n], out[3][n], x) for n, x in drule.items()}

    if call.platform == "cpu":
        dk, dv = (jnp.zeros(x.shape, jnp.float32) for x in padded_kv)
        zero_cotangents = jnp.zeros_like(q_arrays[0]), dk, dv, jax.tree.map(jnp.zeros_like, scores.reads(rule))
        dq, dk, dv, drule = _in_parts(q_arrays[0], k, lists, sizes, step, zero_cotangents)
    else:
        dq, dk, dv, drule = together(rule, lists, q_arrays, padded_kv)
    return (dq[:, : q.shape[1]], dk.astype(k.dtype)[:, : k.shape[1]], dv.astype(v.dtype)[:, : v.shape[1]]), drule


def _in_parts(
    q: Array, k: Array, lists: BlockLists, sizes: TileSizes, step: Callable[[HeadPart, _State], _State], start: _State
) -> _State:
    """Runs ``step`` for all sequences and heads, up to `HEADS_AT_ONCE` heads together if they have the same blocks; if
    tiles are unrolled, only heads that share a key head."""
    batch, _, heads = q.shape[:3]
    group = heads // k.shape[2]
    is_by_head = any(x.shape[1] > 1 for x in jax.tree.leaves(lists))
    max_n = 1 if is_by_head else HEADS_AT_ONCE
    # heads that share a key head, or all heads of some key heads
    counts = [n for n in range(1, max_n + 1) if group % n == 0 or (sizes.each and n % group == 0 and heads % n == 0)]
    num_parts = heads // counts[-1]
    max_parts = min(MOST_PARTS, max(1, MOST_TILES // lists.index.shape[2])) if not sizes.each else 1
    unroll = next(n for n in range(max_parts, 0, -1) if num_parts % n == 0)

    def sequence(b: DynamicInt, state: _State) -> _State:
        def one(n: DynamicInt, state: _State) -> _State:
            return step(HeadPart(b, n * counts[-1], counts[-1], group), state)

        return one(0, state) if num_parts == 1 else lax.fori_loop(0, num_parts, one, state, unroll=unroll)

    return sequence(0, start) if batch == 1 else lax.fori_loop(0, batch, sequence, start)


def _together(
    run: Callable[..., _State],
    rule: TileRule,
    lists: BlockLists,
    rows: Sequence[Array],
    keys: Sequence[Array],
    part: HeadPart | None = None,
) -> _State:
    """Runs a pass on all heads at once, over the lists of the first head; results get the leading dims [B, K, G]."""
    batch, _, num_heads = rows[0].shape[:3]
    kv_heads = keys[0].shape[2]
    dims = batch, kv_heads, num_heads // kv_heads
    first_place = (0, 0) if part is None else (part.sequence, part.head)

    def by_head(x: Array) -> Array:
        return jnp.broadcast_to(x, (batch, num_heads, *x.shape[2:])).reshape(*dims, *x.shape[2:])

    def heads_first(x: Array, *shape: int) -> Array:
        return jnp.moveaxis(x.reshape(batch, x.shape[1], *shape, *x.shape[3:]), 1, 1 + len(shape))

    by_field = {name: tuple(map(by_head, getattr(rule, name))) for name in _BY_HEAD}
    places = by_head(first_place[0] + jnp.arange(batch)[:, None]), by_head(first_place[1] + jnp.arange(num_heads)[None])
    first_lists = jax.tree.map(lambda x: x[0, 0], lists)

    def one(arrays: Any, places: Any, rows: Any, k: Array, v: Array) -> _State:
        return run(Head(rule._replace(**arrays), first_lists, places), *rows, k, v)

    # first over a group, whose heads share keys and values: these get no dim and no copy
    for in_axes, dim_size in zip(((0, 0, 0, None, None), (0,) * 5, (0,) * 5), reversed(dims), strict=True):
        one = jax.vmap(one, in_axes) if dim_size > 1 else _of_one(one, in_axes)
    return one(by_field, places, [heads_first(x, *dims[1:]) for x in rows], *(heads_first(x, kv_heads) for x in keys))


def _of_one(function: Callable[..., Any], axes: tuple[int | None, ...]) -> Callable[..., Any]:
    """Returns `jax.vmap` of a function over dims of 1, without products of these dims, which XLA computes slowly."""

    def mapped(*args: Any) -> Any:
        inputs = [x if axis is None else jax.tree.map(lambda y: y[0], x) for x, axis in zip(args, axes, strict=True)]
        return jax.tree.map(lambda y: y[None], function(*inputs))

    return mapped


def _heads_back(x: Array) -> Array:
    """Reshapes [B, K, G, T, ...] to [B, T, N, ...]."""
    by_position = jnp.moveaxis(x, 3, 1)
    return by_position.reshape(*by_position.shape[:2], -1, *by_position.shape[4:])


def _sum_like(like_array: Array, cotangent: Array) -> Array:
    """Sums cotangents [B, K, G, ...] to the shape [B | 1, N | 1, ...] of ``like_array``, or to that of a table."""
    if like_array.ndim != cotangent.ndim - 1 or like_array.shape[2:] != cotangent.shape[3:]:
        return cotangent.sum((0, 1, 2))
    cotangent = cotangent.reshape(cotangent.shape[0], -1, *cotangent.shape[3:])
    return cotangent.sum(tuple(axis for axis in (0, 1) if like_array.shape[axis] == 1), keepdims=True)
