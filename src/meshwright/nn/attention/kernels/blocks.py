"""Attention of one head by XLA, over the blocks of scores that exist, with a running softmax.

A loop over blocks of queries (of keys in the backward pass) has an inner loop over the blocks in its list: first the
partly masked blocks, then the fully visible ones. With `TileSizes.each` 0 both are unrolled, for lists that are known
while tracing: a tile is a block of queries with all its listed keys (or a block of keys with all its listed queries),
in static slices, and a CPU's threads share the tiles, which are independent.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from meshwright.masks.table import BlockLists
from meshwright.nn.attention.kernels import scores
from meshwright.nn.attention.tiles import DynamicInt, Head, Tile, TileRule, TileSizes

_State = TypeVar("_State")
_Carry = TypeVar("_Carry")


class TogetherBlocks(NamedTuple):
    """Indices of blocks that are processed together, and which of them are real, not padding; None: all."""

    numbers: Sequence[DynamicInt]
    real: Array | None = None

    def spans(self, size: int) -> list[tuple[DynamicInt, int]]:
        """Returns starts and lengths of the blocks in an array; adjacent blocks known while tracing are joined."""
        spans: list[tuple[DynamicInt, int]] = []
        for block in self.numbers:
            if spans and isinstance(block, int) and sum(spans[-1]) == block * size:
                spans[-1] = spans[-1][0], spans[-1][1] + size
            else:
                spans.append((block * size, size))
        return spans


def _taken(x: Array, blocks: TogetherBlocks, size: int, axis: int = -1) -> Array:
    """Returns the blocks of an array, concatenated along ``axis``."""
    axis %= x.ndim
    if x.shape[axis] == size:
        return x
    slices = [_slice(x, start, length, axis) for start, length in blocks.spans(size)]
    return slices[0] if len(slices) == 1 else jnp.concatenate(slices, axis)


def _slice(x: Array, start: DynamicInt, length: int, axis: int) -> Array:
    if isinstance(start, int):
        return lax.slice_in_dim(x, start, start + length, axis=axis)
    return lax.dynamic_slice_in_dim(x, start, length, axis=axis)


def _one(number: DynamicInt) -> TogetherBlocks:
    return TogetherBlocks((number,))


def _tile(sizes: TileSizes, head: Head, rows: TogetherBlocks, columns: TogetherBlocks, *, turned: bool) -> Tile:
    """Returns the operands of a tile. Without the barrier XLA would fuse a loop's slices into the reads for every
    score."""
    barrier = lax.optimization_barrier if sizes.each else lambda x: x

    def of_rows(x: Array, axis: int) -> Array:
        return barrier(jnp.expand_dims(_taken(x, rows, sizes.q_block), axis))

    def of_columns(x: Array, axis: int) -> Array:
        return barrier(jnp.expand_dims(_taken(x, columns, sizes.kv_block), axis))

    return head.tile(sizes, of_rows, of_columns, turned=turned)


def _within(rule: TileRule, blocks: TogetherBlocks, size: int) -> TileRule:
    """Returns a rule whose mask hides the blocks that are not real; they are along the last dim of a tile."""
    if blocks.real is None:
        return rule
    is_real, inner_mask = jnp.repeat(blocks.real, size)[None], rule.mask
    return rule._replace(mask=lambda tile: is_real if inner_mask is None else is_real & inner_mask(tile))


def _put(x: Array, value: Array, start: DynamicInt, axis: int) -> Array:
    if x.shape[axis] == value.shape[axis]:
        return value
    return lax.dynamic_update_slice_in_dim(x, value, start, axis=axis)


def _added(x: Array, value: Array, blocks: TogetherBlocks, size: int) -> Array:
    """Adds ``value`` to the blocks of ``x`` along the last dim. Not a scatter: its index over all rows would be empty,
    on which jaxlib 0.11's partitioner crashes."""
    axis, offset = x.ndim - 1, 0
    for start, length in blocks.spans(size):
        value_part = lax.slice_in_dim(value, offset, offset + length, axis=axis)
        x, offset = _put(x, _slice(x, start, length, axis) + value_part, start, axis), offset + length
    return x


def _over(
    lists: BlockLists, each: int, row: DynamicInt, step: Callable[[TogetherBlocks, _State, bool], _State], start: _State
) -> _State:
    """Runs ``step(blocks, carry, is_masked)`` over the listed blocks of a row, ``each`` together.

    The first group, of masked blocks, is filled up with blocks that are not real. Static lists leave out loops that are
    empty.
    """
    if isinstance(row, int) and not each:
        numbers = sorted(lists.index[row][: lists.total[row]].tolist())
        is_masked = bool(lists.partial[row])
        run_tile = lambda numbers: step(TogetherBlocks(numbers), start, is_masked)  # noqa: E731
        return _fewest(lists.exists, row, numbers, run_tile) if numbers else start
    static = all(isinstance(x, np.ndarray) for x in lists[:3])
    if lists.index.shape[-2:] == (1, 1):
        # a single block needs no loop
        return step(_one(0), start, not static or bool(lists.partial[0])) if not static or lists.total[0] else start
    fills = -lists.total % each
    masked_steps, steps = (lists.partial + fills + each - 1) // each, (lists.total + fills) // each
    masked_end, end_step, row_fill, block_ids = (jnp.asarray(x)[row] for x in (masked_steps, steps, fills, lists.index))

    def run(is_masked: bool) -> Callable[[Array, _State], _State]:
        def body(n: Array, carry: _State) -> _State:
            positions = [n * each - row_fill + offset for offset in range(each)]
            # positions below 0 are blocks that are not real: they read the first one, and the mask hides it
            numbers = [block_ids[jnp.maximum(x, 0) if is_masked and each > 1 else x] for x in positions]
            is_real = jnp.stack(positions) >= 0 if is_masked and each > 1 else None
            return step(TogetherBlocks(numbers, is_real), carry, is_masked)

        return body

    if not static or masked_steps.any():
        start = lax.fori_loop(0, masked_end, run(True), start)
    if not static or (steps > masked_steps).any():
        start = lax.fori_loop(masked_end, end_step, run(False), start)
    return start


def _fewest(exists: Array | None, row: int, blocks: list[int], run: Callable[[list[int]], _State]) -> _State:
    """Runs a tile with its blocks or, if the mask's arrays leave nothing of the half farther from the diagonal, with
    the nearer half, and so on."""
    if exists is None or len(blocks) == 1:
        return run(blocks)
    half = len(blocks) // 2
    is_below = row - blocks[0] > blocks[-1] - row
    near_blocks, far_blocks = (blocks[half:], blocks[:half]) if is_below else (blocks[:-half], blocks[-half:])
    sees_far = jnp.asarray(exists)[row, np.array(far_blocks)].any()
    return lax.cond(sees_far, lambda: run(blocks), lambda: _fewest(exists, row, near_blocks, run))


def _rows(
    sizes: TileSizes,
    block_len: int,
    body: Callable[[DynamicInt, _Carry], tuple[_Carry, tuple[Array, ...]]],
    start: _Carry,
    outs: tuple[Array, ...],
) -> tuple[_Carry, tuple[Array, ...]]:
    """Runs ``body(row, carry)`` over rows of blocks; returns the last carry, and ``outs`` with each row's values
    written to them."""
    num_blocks = len(outs[0]) // block_len

    def step(row: DynamicInt, state: tuple[_Carry, tuple[Array, ...]]) -> tuple[_Carry, tuple[Array, ...]]:
        carry, values = body(row, state[0])
        return carry, tuple(_put(x, y, row * block_len, 0) for x, y in zip(state[1], values, strict=True))

    if sizes.each:
        return step(0, (start, outs)) if num_blocks == 1 else lax.fori_loop(0, num_blocks, step, (start, outs))
    values_by_row = []
    for row in range(num_blocks):
        start, values = body(row, start)
        values_by_row.append(values)
    return start, tuple(map(jnp.concatenate, zip(*values_by_row, strict=True)))


def forward(sizes: TileSizes, scale: float, head: Head, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Returns the result [T, Hv] and the log-sum-exp [T] in float32 of one head; zeros and minus infinity for a query
    that sees no key."""

    def one(i: DynamicInt, carry: None) -> tuple[None, tuple[Array, Array]]:
        queries, rest_scale = scores.scaled(_taken(q, _one(i), sizes.q_block, 0), scale)

        def step(blocks: TogetherBlocks, running: scores.RunningSoftmax, is_masked: bool) -> scores.RunningSoftmax:
            kv = _taken(k, blocks, sizes.kv_block, 0), _taken(v, blocks, sizes.kv_block, 0)
            rule = _within(head.rule, blocks, sizes.kv_block)
            tile = _tile(sizes, head, _one(i), blocks, turned=False)
            # a tile of its own begins, and rescales nothing
            softmax_before = running if sizes.each else None
            return scores.attend(softmax_before, queries, kv, rest_scale, rule, tile, is_masked=is_masked)

        mean_values, lse = scores.finish(_over(head.lists, sizes.each, i, step, scores.begin(queries, v.shape[-1])))
        return None, (mean_values.astype(q.dtype), lse)

    outs = jnp.zeros((len(q), v.shape[-1]), q.dtype), jnp.zeros(len(q), jnp.float32)
    _, (o, lse) = _rows(sizes, sizes.q_block, one, None, outs)
    return o, lse


def backward(
    sizes: TileSizes, scale: float, head: Head, rows: Sequence[Array], k: Array, v: Array
) -> tuple[Array, Array, Array, scores.Learned]:
    """Returns (dq [T, H], dk [S, H], dv [S, Hv], cotangents of the score rule's arrays) of one head; float32 except dq.

    ``rows`` are queries, cotangents of results, log-sum-exps and delta.
    """
    k_columns = scores.transposed(k)
    queries, rest_scale = scores.scaled(rows[0], scale)
    # Without it scores would read these at the stride of the heads, which XLA does not vectorise.
    row_vectors = lax.optimization_barrier(tuple(rows[2:]))

    def one(
        j: DynamicInt, carry: tuple[Array, scores.Learned]
    ) -> tuple[tuple[Array, scores.Learned], tuple[Array, Array]]:
        kv = _taken(k, _one(j), sizes.kv_block, 0), _taken(v, _one(j), sizes.kv_block, 0)
        columns_j = _taken(k_columns, _one(j), sizes.kv_block)

        def step(
            blocks: TogetherBlocks, sums: tuple[Array, Array, Array, scores.Learned], is_masked: bool
        ) -> tuple[Array, Array, Array, scores.Learned]:
            dq, dk, dv, drule = sums
            q, dout = (_taken(x, blocks, sizes.q_block, 0) for x in (queries, rows[1]))
            lse, delta = (_taken(x, blocks, sizes.q_block) for x in row_vectors)
            rule = _within(head.rule, blocks, sizes.q_block)
            tile = _tile(sizes, head, blocks, _one(j), turned=True)
            p, ds, dreads = scores.score_cotangents(
                (q, dout, lse, delta), kv, rest_scale, rule, tile, is_masked=is_masked
            )
            dq = _added(dq, scores.weighted_sums(columns_j, ds.astype(k.dtype)), blocks, sizes.q_block)
            add_by_field: dict[str, Callable[[Array, Array], Array]] = {
                "heads": lambda x, y: x + y.sum(),
                "rows": lambda x, y: _added(x, y.sum(0), blocks, sizes.q_block),
                "columns": lambda x, y: _added(x, y.sum(1), _one(j), sizes.kv_block),
                "tables": jnp.add,
            }
            drule = {name: jax.tree.map(add_by_field[name], drule[name], dreads[name]) for name in drule}
            return dq, dk + scores.weighted_sums(ds, q), dv + scores.weighted_sums(p, dout), drule

        zero_dkv = [jnp.zeros(x.shape, jnp.float32) for x in kv]
        dq, dk, dv, drule = _over(head.lists, sizes.each, j, step, (carry[0], zero_dkv[0], zero_dkv[1], carry[1]))
        # scaled queries give dk its scale, else ``rest_scale`` does; the keys in the products of dq are unscaled
        return (dq, drule), (dk * rest_scale, dv)

    # The cotangents of queries are columns, see `score_cotangents`.
    start = jnp.zeros(rows[0].shape[::-1], jnp.float32), jax.tree.map(jnp.zeros_like, scores.reads(head.rule))
    outs = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    (dq, drule), (dk, dv) = _rows(sizes, sizes.kv_block, one, start, outs)
    # Without it XLA would transpose a single product instead, and its factors would have the slow layout.
    dq = lax.optimization_barrier(dq)
    return (dq.T * scale).astype(rows[0].dtype), dk, dv, drule
