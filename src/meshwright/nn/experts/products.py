"""Products of slots and expert weights that leave out the slots nobody has.

Without a bound on its slots an expert has E / Ea times as many as are filled on average. Slots are worked through in
blocks of rows, and a block of zeros is skipped: a product makes zeros of it, and a weight's gradient gets nothing from
it, so that nothing has to be known about how the slots were filled or which way they came. Rows of packed tokens are
blocks of their experts in the same way. `jax.lax.ragged_dot` is not used: on CPUs, and on GPUs by default, it becomes
a product with every expert's matrix, and took 20 times as long on two CPU cores (32 experts, 4 of them chosen).

Where most slots are filled, under a bound, one batched product is as good. Which form the slots have follows from the
derivation and the options alone:

- a bound on the slots, or few of them, or the GSPMD form: arrays [E, C, D] and batched products
- no bound, and a collective moves slots: arrays [E, C, D], products in blocks that leave out empty slots
- no bound, and slots stay on their device: `Ragged`, tokens packed by expert, products in blocks
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from meshwright.algebra.ops.dispatch import BLOCK_ROWS, FEW_SLOTS, blocks_at_once
from meshwright.algebra.steps import Step
from meshwright.nn.attention.platform import default_platform
from meshwright.nn.context import Context, as_given
from meshwright.nn.experts.slots import Ragged, Rows, Slots, rows_of, with_rows
from meshwright.spec.model import Model


def in_blocks(context: Context, *, num_slots: int) -> bool:
    """Whether empty slots are left out: not where a bound keeps most of them filled, nor where the compiler chooses
    the communication."""
    return not context.options.capacity_factor and context.constrain is as_given and num_slots > FEW_SLOTS


def packs_tokens(context: Context, step: Step, *, num_slots: int) -> bool:
    """Whether tokens are packed by expert: empty slots are left out, and no collective of the block moves slots."""
    block = next((block for block in context.derived.blocks if block.block.name == step.block), None)
    if block is None or not in_blocks(context, num_slots=num_slots):
        return False
    return not any(s.is_collective and "C" in s.result.dims for s in (*block.forward, *block.backward))


class Blocks(NamedTuple):
    """Which rows belong to which expert: expert e has the blocks that begin at ``starts[e, :num[e]]``, each of at
    most ``rows`` rows, and none of its rows is past ``ends[e]``. ``at_once`` of them are gathered for one product."""

    starts: Int[Array, "E n"]
    num: Int[Array, " E"]
    ends: Int[Array, " E"]
    rows: int
    at_once: int


def blocks_of(slots: Slots, model: Model, *, block_rows: int = BLOCK_ROWS) -> Blocks:
    """The blocks of slots, seen as E * C rows, that have anything but zeros; or those of packed tokens.

    A CPU takes blocks one by one.
    """
    if isinstance(slots, Ragged):
        found, mean_rows = _grouped(slots, block_rows), slots.rows.shape[0] / slots.sizes.shape[0]
    else:
        mean_rows = slots.shape[1] * model.experts_per_token / model.num_experts
        found = _filled(slots, block_rows)
    return Blocks(*found, block_rows, 1 if default_platform() == "cpu" else int(blocks_at_once(mean_rows)))


def _filled(slots: Float[Array, "E C D"], block_rows: int) -> tuple[Array, Array, Array]:
    num_experts, capacity, _ = slots.shape
    rows = min(block_rows, capacity)
    num_blocks = -(-capacity // rows)
    filled = jnp.any(slots != 0, axis=-1)
    padded = jnp.pad(filled, ((0, 0), (0, num_blocks * rows - capacity)))
    filled_block = jnp.any(padded.reshape(num_experts, num_blocks, rows), axis=-1)
    order = jnp.argsort(~filled_block, axis=-1, stable=True).astype(jnp.int32)
    first = jnp.arange(num_experts, dtype=jnp.int32) * capacity
    return first[:, None] + order * rows, jnp.sum(filled_block, axis=-1, dtype=jnp.int32), first + capacity


def _grouped(slots: Ragged, block_rows: int) -> tuple[Array, Array, Array]:
    num_rows = slots.rows.shape[0]
    rows = min(block_rows, num_rows)
    ends = jnp.cumsum(slots.sizes).astype(jnp.int32)
    steps = jnp.arange(-(-num_rows // rows), dtype=jnp.int32) * rows
    return (ends - slots.sizes)[:, None] + steps[None], (slots.sizes + rows - 1) // rows, ends


def slot_product(
    slots: Slots, weights: Float[Array, "E _ _"], blocks: Blocks, *, transposed: bool = False, wide: bool = False
) -> Slots:
    """Each slot times its expert's matrix, [I, O] or with ``transposed`` [O, I]; zero for a row of no block.

    The result has the dtype of the slots, or float32 with ``wide``.
    """
    rows = rows_of(slots)
    contracted = (1, 1 if transposed else 0)

    def of_expert(expert: Array, out: Array) -> Array:
        weight = jax.lax.dynamic_index_in_dim(weights, expert, 0, keepdims=False)

        def add(turn: _Turn, out: Array) -> Array:
            return turn.put(out, _dot(turn.read(rows), weight, contracted, wide=wide))

        return _over_turns(blocks, expert, rows.shape[0], add, out)

    zeros = jnp.zeros((rows.shape[0], weights.shape[1 if transposed else 2]), jnp.float32 if wide else rows.dtype)
    return with_rows(slots, jax.lax.fori_loop(0, weights.shape[0], of_expert, zeros))


def slot_weight_gradient(left: Slots, right: Slots, blocks: Blocks) -> Float[Array, "E I O"]:
    """For each expert the sum over its rows of left times right, added up in float32; a slot with zeros on either side
    adds nothing."""
    lhs, rhs = rows_of(left), rows_of(right)
    zeros = jnp.zeros((lhs.shape[1], rhs.shape[1]), jnp.float32)

    def add(turn: _Turn, total: Array) -> Array:
        mine = jnp.where(turn.inside[:, None], turn.read(lhs), jnp.zeros((), lhs.dtype))
        return total + _dot(mine, turn.read(rhs), (0, 0), wide=True)

    def of_expert(expert: Array) -> Array:
        return _over_turns(blocks, expert, lhs.shape[0], add, zeros).astype(lhs.dtype)

    return jax.lax.map(of_expert, jnp.arange(blocks.num.shape[0], dtype=jnp.int32))


class _Turn(NamedTuple):
    """The rows of one product: how they are read, which of them are really the expert's, how a result is put there."""

    inside: Array
    read: Callable[[Rows], Rows]
    put: Callable[[Rows, Rows], Rows]


def _over_turns(
    blocks: Blocks, expert: Array, num_rows: int, body: Callable[[_Turn, Array], Array], start: Array
) -> Array:
    """``body`` for each product of an expert."""
    size = min(blocks.rows, num_rows)
    turn = _one_block if blocks.at_once == 1 else _several_blocks
    num_turns = (blocks.num[expert] + blocks.at_once - 1) // blocks.at_once
    return jax.lax.fori_loop(0, num_turns, lambda n, x: body(turn(blocks, expert, n, size, num_rows), x), start)


def _one_block(blocks: Blocks, expert: Array, number: Array, size: int, num_rows: int) -> _Turn:
    """``size`` rows are read even where fewer are left, before the end of the array or of the expert's rows."""
    first = blocks.starts[expert, number]
    start = jnp.minimum(first, num_rows - size)
    row = start + jnp.arange(size, dtype=jnp.int32)
    inside = (row >= first) & (row < jnp.minimum(first + size, blocks.ends[expert]))

    def read(rows: Rows) -> Rows:
        return jax.lax.dynamic_slice_in_dim(rows, start, size)

    def put(out: Rows, made: Rows) -> Rows:
        return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(inside[:, None], made, read(out)), start, 0)

    return _Turn(inside, read, put)


def _several_blocks(blocks: Blocks, expert: Array, turn: Array, size: int, num_rows: int) -> _Turn:
    """The last product of an expert has fewer blocks."""
    numbers = turn * blocks.at_once + jnp.arange(blocks.at_once, dtype=jnp.int32)
    first = blocks.starts[expert, jnp.minimum(numbers, blocks.starts.shape[1] - 1)]
    rows = first[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
    inside = ((rows < blocks.ends[expert]) & (numbers < blocks.num[expert])[:, None]).reshape(-1)
    row = jnp.minimum(rows, num_rows - 1).reshape(-1)

    def put(out: Rows, made: Rows) -> Rows:
        past_the_end = num_rows + jnp.arange(row.size, dtype=jnp.int32)
        return out.at[jnp.where(inside, row, past_the_end)].set(made, mode="drop", unique_indices=True)

    return _Turn(inside, lambda rows: rows[row], put)


def _dot(left: Array, right: Array, contracted: tuple[int, int], *, wide: bool = False) -> Array:
    """The product over one dim of each, added up in float32; the result in the operands' dtype unless ``wide``."""
    dims = (((contracted[0],), (contracted[1],)), ((), ()))
    made = jax.lax.dot_general(left, right, dims, preferred_element_type=jnp.float32)
    return made if wide else made.astype(left.dtype)
