"""Products of slots and expert weights that skip empty slots.

Without a capacity limit an expert has E / Ea times the slots that are filled on average. Slots are processed in blocks
of rows, and a block of zeros is skipped: its product is zero, and it adds nothing to a weight's gradient. Packed tokens
are processed in blocks too, each block of one expert.

TPUs and Hopper have kernels for packed tokens (`nn.experts.grouped`); elsewhere `jax.lax.ragged_dot` becomes a product
with every expert's matrix, and took 20 times as long on two CPU cores (32 experts, 4 of them chosen).

Where a capacity limit keeps most slots filled, one batched product is as fast. The derivation and the options decide
the form of the slots:

- a capacity limit, few slots, or the GSPMD form (`TrainStep`): arrays [E, C, D] and batched products
- no limit: `Ragged`, tokens packed by expert, products by kernels or in blocks; `nn.experts.exchange` moves them
- no limit, but collectives that cannot move packed tokens: arrays [E, C, D], products in blocks, empty ones skipped"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from meshwright.algebra.ops.dispatch import BLOCK_ROWS, FEW_SLOTS, blocks_at_once, packs
from meshwright.algebra.steps import Step
from meshwright.nn.attention.platform import default_platform
from meshwright.nn.context import Context
from meshwright.nn.experts import grouped
from meshwright.nn.experts.slots import ExpertSlots, Ragged, SlotRows, rows_of, with_rows
from meshwright.spec.model import Model


def in_blocks(context: Context, *, num_slots: int) -> bool:
    """True if empty slots are skipped: more than `FEW_SLOTS` slots, no capacity limit, not the GSPMD form."""
    return not context.options.capacity_factor and context.constrain is None and num_slots > FEW_SLOTS


def packs_tokens(context: Context, moves: tuple[Step, ...], *, num_slots: int) -> bool:
    """True if tokens are packed by expert: empty slots are skipped, and ``moves`` can exchange packed tokens."""
    return in_blocks(context, num_slots=num_slots) and packs(moves)


class ExpertBlocks(NamedTuple):
    """Blocks of each expert's rows: expert e has ``num[e]`` blocks that begin at ``starts[e, i]`` and end before row
    ``ends[e, i]``, each of at most ``rows`` rows. ``at_once`` blocks are gathered for one product."""

    starts: Int[Array, "E n"]
    num: Int[Array, " E"]
    ends: Int[Array, "E n"]
    rows: int
    at_once: int


def blocks_of(slots: ExpertSlots, model: Model, *, block_rows: int = BLOCK_ROWS) -> ExpertBlocks:
    """Returns the nonzero blocks of slots, as E * C rows, or the blocks of packed tokens.

    CPUs process one block at a time.
    """
    if isinstance(slots, Ragged):
        block_arrays, mean_rows = _grouped(slots, block_rows), slots.rows.shape[0] / slots.sizes.shape[1]
    else:
        mean_rows = slots.shape[1] * model.experts_per_token / model.num_experts
        block_arrays = _filled(slots, block_rows)
    return ExpertBlocks(*block_arrays, block_rows, 1 if default_platform() == "cpu" else int(blocks_at_once(mean_rows)))


def _filled(slots: Float[Array, "E C D"], block_rows: int) -> tuple[Array, Array, Array]:
    num_experts, capacity, _ = slots.shape
    rows_per_block = min(block_rows, capacity)
    num_blocks = -(-capacity // rows_per_block)
    is_filled_slot = jnp.any(slots != 0, axis=-1)
    is_filled_padded = jnp.pad(is_filled_slot, ((0, 0), (0, num_blocks * rows_per_block - capacity)))
    is_filled_block = jnp.any(is_filled_padded.reshape(num_experts, num_blocks, rows_per_block), axis=-1)
    first_rows = jnp.arange(num_experts, dtype=jnp.int32)[:, None] * capacity
    start_rows = first_rows + jnp.arange(num_blocks, dtype=jnp.int32)[None] * rows_per_block
    return _in_front(start_rows, jnp.broadcast_to(first_rows + capacity, start_rows.shape), is_filled_block)


def _grouped(slots: Ragged, block_rows: int) -> tuple[Array, Array, Array]:
    (num_pieces, num_experts), piece_rows = slots.sizes.shape, slots.rows.shape[0] // slots.sizes.shape[0]
    rows_per_block = min(block_rows, piece_rows)
    end_rows = jnp.arange(num_pieces, dtype=jnp.int32)[:, None] * piece_rows + jnp.cumsum(slots.sizes, axis=1)
    offsets = jnp.arange(-(-piece_rows // rows_per_block), dtype=jnp.int32)[None, None] * rows_per_block
    starts = (end_rows - slots.sizes)[..., None] + offsets
    all_blocks = (starts, jnp.broadcast_to(end_rows[..., None], starts.shape), offsets < slots.sizes[..., None])
    starts, end_rows, is_filled = (jnp.moveaxis(array, 1, 0).reshape(num_experts, -1) for array in all_blocks)
    if num_pieces == 1:  # the filled ones come first
        return starts, jnp.sum(is_filled, axis=-1, dtype=jnp.int32), end_rows
    return _in_front(starts, end_rows, is_filled)


def _in_front(start_rows: Array, end_rows: Array, is_filled: Array) -> tuple[Array, Array, Array]:
    """Returns the start and end rows with filled blocks first, and the number of filled blocks between them."""
    filled_first = jnp.argsort(~is_filled, axis=-1, stable=True)
    start_rows, end_rows = (jnp.take_along_axis(array, filled_first, axis=-1) for array in (start_rows, end_rows))
    return start_rows, jnp.sum(is_filled, axis=-1, dtype=jnp.int32), end_rows


def slot_product(
    slots: ExpertSlots,
    weights: Float[Array, "E _ _"],
    blocks: ExpertBlocks,
    *,
    transposed: bool = False,
    wide: bool = False,
) -> ExpertSlots:
    """Multiplies each slot by its expert's matrix, [I, O] or with ``transposed`` [O, I]; rows outside the blocks are
    zero.

    A kernel multiplies packed tokens where the platform has one. The result has the dtype of the slots, or float32 with
    ``wide``."""
    rows = rows_of(slots)
    if isinstance(slots, Ragged) and not wide and grouped.takes(slots, weights):
        return slots.with_rows(grouped.product(slots, weights, transposed=transposed))
    contracted_dims = (1, 1 if transposed else 0)

    def of_expert(expert: Array, out: Array) -> Array:
        weight = jax.lax.dynamic_index_in_dim(weights, expert, 0, keepdims=False)

        def add(rows_at_once: _RowsAtOnce, out: Array) -> Array:
            return rows_at_once.put(out, _dot(rows_at_once.read(rows), weight, contracted_dims, wide=wide))

        return _over_products(blocks, expert, rows.shape[0], add, out)

    zero_rows = jnp.zeros((rows.shape[0], weights.shape[1 if transposed else 2]), jnp.float32 if wide else rows.dtype)
    return with_rows(slots, jax.lax.fori_loop(0, weights.shape[0], of_expert, zero_rows))


def slot_weight_gradient(left: ExpertSlots, right: ExpertSlots, blocks: ExpertBlocks) -> Float[Array, "E I O"]:
    """Returns left^T right over each expert's rows, summed in float32, in left's dtype; zero slots add nothing."""
    lhs, rhs = rows_of(left), rows_of(right)
    if isinstance(left, Ragged) and isinstance(right, Ragged) and grouped.takes(left, rhs):
        return grouped.weight_gradient(left, right)
    zero_gradient = jnp.zeros((lhs.shape[1], rhs.shape[1]), jnp.float32)

    def add(rows_at_once: _RowsAtOnce, gradient_sum: Array) -> Array:
        own_rows = jnp.where(rows_at_once.inside[:, None], rows_at_once.read(lhs), jnp.zeros((), lhs.dtype))
        return gradient_sum + _dot(own_rows, rows_at_once.read(rhs), (0, 0), wide=True)

    def of_expert(expert: Array) -> Array:
        return _over_products(blocks, expert, lhs.shape[0], add, zero_gradient).astype(lhs.dtype)

    return jax.lax.map(of_expert, jnp.arange(blocks.num.shape[0], dtype=jnp.int32))


class _RowsAtOnce(NamedTuple):
    """The rows of one product: a mask of the expert's rows, and functions to read and to write all of them."""

    inside: Array
    read: Callable[[SlotRows], SlotRows]
    put: Callable[[SlotRows, SlotRows], SlotRows]


def _over_products(
    blocks: ExpertBlocks, expert: Array, num_rows: int, body: Callable[[_RowsAtOnce, Array], Array], start: Array
) -> Array:
    """Folds ``body`` over an expert's blocks, ``at_once`` blocks per call, from ``start``; returns the result."""
    size = min(blocks.rows, num_rows)
    read_blocks = _one_block if blocks.at_once == 1 else _several_blocks
    num_turns = (blocks.num[expert] + blocks.at_once - 1) // blocks.at_once
    return jax.lax.fori_loop(0, num_turns, lambda n, x: body(read_blocks(blocks, expert, n, size, num_rows), x), start)


def _one_block(blocks: ExpertBlocks, expert: Array, block_index: Array, size: int, num_rows: int) -> _RowsAtOnce:
    """Reads ``size`` rows even where the array or the expert has fewer left; ``inside`` masks the surplus."""
    first_row = blocks.starts[expert, block_index]
    start_row = jnp.minimum(first_row, num_rows - size)
    row_index = start_row + jnp.arange(size, dtype=jnp.int32)
    is_inside = (row_index >= first_row) & (row_index < jnp.minimum(first_row + size, blocks.ends[expert, block_index]))

    def read(rows: SlotRows) -> SlotRows:
        return jax.lax.dynamic_slice_in_dim(rows, start_row, size)

    def put(out: SlotRows, rows: SlotRows) -> SlotRows:
        return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(is_inside[:, None], rows, read(out)), start_row, 0)

    return _RowsAtOnce(is_inside, read, put)


def _several_blocks(blocks: ExpertBlocks, expert: Array, turn_index: Array, size: int, num_rows: int) -> _RowsAtOnce:
    """Gathers ``at_once`` blocks; ``inside`` masks rows past the expert's last and surplus blocks."""
    block_ids = turn_index * blocks.at_once + jnp.arange(blocks.at_once, dtype=jnp.int32)
    clipped_ids = jnp.minimum(block_ids, blocks.starts.shape[1] - 1)
    first_rows, end_rows = blocks.starts[expert, clipped_ids], blocks.ends[expert, clipped_ids]
    row_ids = first_rows[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
    is_inside = ((row_ids < end_rows[:, None]) & (block_ids < blocks.num[expert])[:, None]).reshape(-1)
    row_index = jnp.minimum(row_ids, num_rows - 1).reshape(-1)

    def put(out: SlotRows, new_rows: SlotRows) -> SlotRows:
        past_the_end = num_rows + jnp.arange(row_index.size, dtype=jnp.int32)
        return out.at[jnp.where(is_inside, row_index, past_the_end)].set(new_rows, mode="drop", unique_indices=True)

    return _RowsAtOnce(is_inside, lambda rows: rows[row_index], put)


def _dot(left: Array, right: Array, contracted: tuple[int, int], *, wide: bool = False) -> Array:
    """Contracts one dim of each array, in float32; the result has the left array's dtype, or float32 with ``wide``."""
    dim_numbers = (((contracted[0],), (contracted[1],)), ((), ()))
    product = jax.lax.dot_general(left, right, dim_numbers, preferred_element_type=jnp.float32)
    return product if wide else product.astype(left.dtype)
