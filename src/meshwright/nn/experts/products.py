"""Products of slots and expert weights that leave out the slots nobody has.

Without a bound on its slots an expert has E / Ea times as many as are filled on average. Slots are worked through in
blocks of rows, and a block of zeros is skipped: a product makes zeros of it, and a weight's gradient gets nothing from
it, so that nothing has to be known about how the slots were filled or which way they came. Rows of packed tokens
(`nn.experts.ragged`) are blocks of their experts in the same way.

Where most slots are filled, under a bound, one batched product is as good.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from meshwright.algebra.ops.experts import BLOCK_ROWS, blocks_at_once
from meshwright.nn.attention.platform import default_platform


class Blocks(NamedTuple):
    """Which rows belong to which expert: expert e has the blocks that begin at ``starts[e, :num[e]]``, each of at
    most `BLOCK_ROWS` rows, and none of its rows is past ``ends[e]``."""

    starts: Int[Array, "E n"]
    num: Int[Array, " E"]
    ends: Int[Array, " E"]


def filled_blocks(slots: Float[Array, "E C D"], *, block_rows: int = BLOCK_ROWS) -> Blocks:
    """The blocks of ``slots``, seen as E * C rows, that have anything but zeros."""
    num_experts, capacity, _ = slots.shape
    rows = min(block_rows, capacity)
    num_blocks = -(-capacity // rows)
    filled = jnp.any(slots != 0, axis=-1)
    padded = jnp.pad(filled, ((0, 0), (0, num_blocks * rows - capacity)))
    filled_block = jnp.any(padded.reshape(num_experts, num_blocks, rows), axis=-1)
    order = jnp.argsort(~filled_block, axis=-1, stable=True).astype(jnp.int32)
    first = jnp.arange(num_experts, dtype=jnp.int32) * capacity
    return Blocks(first[:, None] + order * rows, jnp.sum(filled_block, axis=-1, dtype=jnp.int32), first + capacity)


def grouped_blocks(sizes: Int[Array, " E"], num_rows: int, *, block_rows: int = BLOCK_ROWS) -> Blocks:
    """The blocks of ``num_rows`` rows that are sorted by expert, ``sizes[e]`` of them expert e's."""
    rows = min(block_rows, num_rows)
    ends = jnp.cumsum(sizes).astype(jnp.int32)
    steps = jnp.arange(-(-num_rows // rows), dtype=jnp.int32) * rows
    return Blocks((ends - sizes)[:, None] + steps[None], (sizes + rows - 1) // rows, ends)


def num_at_once(mean_rows: float) -> int:
    """Blocks of one product, for experts that have so many rows in the mean. A CPU takes them one by one."""
    return 1 if default_platform() == "cpu" else int(blocks_at_once(mean_rows))


def block_product(
    rows: Float[Array, "R I"],
    weights: Float[Array, "E _ _"],
    blocks: Blocks,
    *,
    transposed: bool = False,
    wide: bool = False,
    block_rows: int = BLOCK_ROWS,
    at_once: int = 1,
) -> Float[Array, "R O"]:
    """``rows[r] * weights[expert of r]``, [I, O] or with ``transposed`` [O, I]; zero for a row of no block.

    The result has the dtype of the rows, or float32 with ``wide``. ``at_once`` blocks are gathered for one product.
    """
    size = min(block_rows, rows.shape[0])
    width = weights.shape[1 if transposed else 2]
    contracted = (1, 1 if transposed else 0)

    def one(expert: Array, number: Array, out: Array, weight: Array) -> Array:
        start, inside = _block(blocks, expert, number, size, rows.shape[0])
        part = jax.lax.dynamic_slice_in_dim(rows, start, size)
        made = _dot(part, weight, contracted, wide=wide)
        before = jax.lax.dynamic_slice_in_dim(out, start, size)
        return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(inside[:, None], made, before), start, 0)

    def several(expert: Array, turn: Array, out: Array, weight: Array) -> Array:
        row, inside = _several(blocks, expert, turn, size, rows.shape[0], at_once)
        made = _dot(rows[row], weight, contracted, wide=wide)
        past_the_end = rows.shape[0] + jnp.arange(row.size, dtype=jnp.int32)
        at = jnp.where(inside, row, past_the_end)
        return out.at[at].set(made, mode="drop", unique_indices=True)

    def of_expert(expert: Array, out: Array) -> Array:
        weight = jax.lax.dynamic_index_in_dim(weights, expert, 0, keepdims=False)
        turns, turn = _turns(blocks, expert, at_once), one if at_once == 1 else several
        return jax.lax.fori_loop(0, turns, lambda number, o: turn(expert, number, o, weight), out)

    zeros = jnp.zeros((rows.shape[0], width), jnp.float32 if wide else rows.dtype)
    return jax.lax.fori_loop(0, weights.shape[0], of_expert, zeros)


def block_weight_gradient(
    left: Float[Array, "R I"],
    right: Float[Array, "R O"],
    blocks: Blocks,
    *,
    block_rows: int = BLOCK_ROWS,
    at_once: int = 1,
) -> Float[Array, "E I O"]:
    """For each expert the sum over its rows of ``left[r]`` times ``right[r]``, added up in float32."""
    size = min(block_rows, left.shape[0])
    zeros = jnp.zeros((left.shape[1], right.shape[1]), jnp.float32)

    def one(expert: Array, number: Array, total: Array) -> Array:
        start, inside = _block(blocks, expert, number, size, left.shape[0])
        mine = jnp.where(inside[:, None], jax.lax.dynamic_slice_in_dim(left, start, size), jnp.zeros((), left.dtype))
        other = jax.lax.dynamic_slice_in_dim(right, start, size)
        return total + _dot(mine, other, (0, 0), wide=True)

    def several(expert: Array, turn: Array, total: Array) -> Array:
        row, inside = _several(blocks, expert, turn, size, left.shape[0], at_once)
        mine = jnp.where(inside[:, None], left[row], jnp.zeros((), left.dtype))
        return total + _dot(mine, right[row], (0, 0), wide=True)

    def of_expert(expert: Array) -> Array:
        turns, turn = _turns(blocks, expert, at_once), one if at_once == 1 else several
        total = jax.lax.fori_loop(0, turns, lambda number, t: turn(expert, number, t), zeros)
        return total.astype(left.dtype)

    return jax.lax.map(of_expert, jnp.arange(blocks.num.shape[0], dtype=jnp.int32))


def _turns(blocks: Blocks, expert: Array, at_once: int) -> Array:
    """Products of one expert, each of so many of its blocks."""
    return (blocks.num[expert] + at_once - 1) // at_once


def _several(
    blocks: Blocks, expert: Array, turn: Array, size: int, num_rows: int, at_once: int
) -> tuple[Int[Array, " n"], Array]:
    """The rows of so many blocks of an expert, and which of them are really theirs: the last product has fewer."""
    numbers = turn * at_once + jnp.arange(at_once, dtype=jnp.int32)
    first = blocks.starts[expert, jnp.minimum(numbers, blocks.starts.shape[1] - 1)]
    row = first[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
    inside = (row < blocks.ends[expert]) & (numbers < blocks.num[expert])[:, None]
    return jnp.minimum(row, num_rows - 1).reshape(-1), inside.reshape(-1)


def _block(blocks: Blocks, expert: Array, number: Array, size: int, num_rows: int) -> tuple[Array, Array]:
    """First row of the rows that are read for a block, and which of them are the block's.

    ``size`` rows are read even where fewer are left, before the end of the array or of the expert's rows.
    """
    first = blocks.starts[expert, number]
    start = jnp.minimum(first, num_rows - size)
    row = start + jnp.arange(size, dtype=jnp.int32)
    return start, (row >= first) & (row < jnp.minimum(first + size, blocks.ends[expert]))


def _dot(left: Array, right: Array, contracted: tuple[int, int], *, wide: bool = False) -> Array:
    """The product over one dim of each, added up in float32; the result in the operands' dtype unless ``wide``."""
    dims = (((contracted[0],), (contracted[1],)), ((), ()))
    made = jax.lax.dot_general(left, right, dims, preferred_element_type=jnp.float32)
    return made if wide else made.astype(left.dtype)
