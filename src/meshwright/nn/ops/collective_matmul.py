"""Collective matmuls inside `shard_map`: products block by block, overlapped with permutes of blocks around a ring.

Device r of n has block r. With one direction a block is sent to the next device n - 1 times; with two, one half is sent
to the next device and the other to the previous one, n - 1 times each. The permutes are unrolled, so that the next
block is in flight during a product; with more than `MAX_WRITTEN_OUT` iterations they are a loop.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array
from msgspec.structs import replace

from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.steps import Step
from meshwright.core.errors import InputError
from meshwright.nn.collectives import Ring
from meshwright.nn.context import Context
from meshwright.nn.ops.einsum import einsum
from meshwright.nn.ops.quantised_einsum import quantised_einsum

MAX_WRITTEN_OUT = 16
"""Maximum number of iterations for which the permutes are unrolled."""

_Carry = TypeVar("_Carry")


class Factor(NamedTuple):
    """A factor of a product, and its axis along the dim that is cut into blocks; None if it lacks the dim."""

    value: Array
    axis: int | None

    def part(self, start: Array | int, length: int) -> Array:
        if self.axis is None:
            return self.value
        return lax.dynamic_slice_in_dim(self.value, start, length, axis=self.axis)


@dataclass(frozen=True, kw_only=True)
class BlockedProduct:
    """One product, computed by ``apply`` for a block of a dim; ``factors`` stay on the device, except None: the sent
    block.

    ``axis`` is the dim's axis in the result; None if the product sums over the dim."""

    apply: Callable[..., Array]
    factors: tuple[Factor | None, ...]
    axis: int | None

    def of(self, start: Array | int, length: int, block: Array | None = None) -> Array:
        """Computes the product for ``length`` entries of the dim from ``start`` on; ``block`` is the sent factor."""
        return self.apply(*(block if factor is None else factor.part(start, length) for factor in self.factors))


@dataclass(frozen=True, kw_only=True)
class MatmulRing(Ring):
    """The ring of one collective matmul; blocks are sent in one direction (``ways`` 1) or in both (2)."""

    ways: int = 1

    def pieces(self, length: int) -> tuple["BlockPart", ...]:
        """Returns the parts of a block to send: the whole in one direction, halves in two; one entry is sent whole."""
        half_len = (length + 1) // 2
        if self.ways == 1 or half_len == length:
            return (BlockPart(0, length, 1),)
        return BlockPart(0, half_len, 1), BlockPart(half_len, length - half_len, -1)

    def send(self, values: Sequence[Array], pieces: Sequence["BlockPart"]) -> list[Array]:
        """Sends each part to the next or the previous device, and returns the received parts."""
        return [self.shift(value, piece.by) for value, piece in zip(values, pieces, strict=True)]


class BlockPart(NamedTuple):
    """A part of a block: its start, its length, and to which device it is sent: 1 the next, -1 the previous."""

    start: int
    length: int
    by: int


def all_gather_matmul(
    block: Array, products: Sequence[BlockedProduct], ring: MatmulRing, *, axis: int, gathers: bool = False
) -> tuple[Array, ...]:
    """Multiplies the blocks of all devices, which together are one array along ``axis``, and returns the whole results.

    With ``gathers`` the gathered array is the last result. Blocks are summed in the dtype of the products.
    """
    block_len, num_devices, rank = block.shape[axis], ring.size, ring.rank
    pieces = ring.pieces(block_len)
    computed = [*products, *([BlockedProduct(apply=lambda x: x, factors=(None,), axis=axis)] if gathers else [])]

    def add_blocks(results: list[Array], values: Sequence[Array], step: Array | int) -> list[Array]:
        for value, piece in zip(values, pieces, strict=True):
            start = (rank - piece.by * step) % num_devices * block_len + piece.start
            result_parts = [
                (result, product.of(start, piece.length, value), product.axis)
                for result, product in zip(results, computed, strict=True)
            ]
            results = [
                result + term if axis is None else lax.dynamic_update_slice_in_dim(result, term, start, axis=axis)
                for result, term, axis in result_parts
            ]
        return results

    own_results = [product.of(rank * block_len, block_len, block) for product in computed]
    results = [
        _whole(own_result, product, rank * block_len, num_devices)
        for own_result, product in zip(own_results, computed, strict=True)
    ]
    passing_blocks = [lax.slice_in_dim(block, piece.start, piece.start + piece.length, axis=axis) for piece in pieces]

    def step(step_index: Array | int, carry: tuple[list[Array], list[Array]]) -> tuple[list[Array], list[Array]]:
        passing_parts, results_so_far = carry
        return ring.send(passing_parts, pieces), add_blocks(results_so_far, passing_parts, step_index)

    passing_blocks, results = _repeat(1, num_devices - 1, step, (ring.send(passing_blocks, pieces), results))
    return tuple(add_blocks(results, passing_blocks, num_devices - 1))


def matmul_reduce_scatter(products: Sequence[BlockedProduct], ring: MatmulRing, *, length: int) -> Array:
    """Returns this device's block, of ``length``, of the sum of all products over all devices."""
    num_devices, rank = ring.size, ring.rank
    pieces = ring.pieces(length)

    def part(piece: BlockPart, step: Array | int) -> Array:
        # the sum that this device adds to is size - 1 - step sends away from its own device
        start_index = (rank - piece.by * (1 + step)) % num_devices * length + piece.start
        first_product, *other_products = (product.of(start_index, piece.length) for product in products)
        return sum(other_products, start=first_product)

    def step(step_index: Array | int, sums: list[Array]) -> list[Array]:
        passing_sums = ring.send(sums, pieces)
        return [passing_sum + part(piece, step_index) for passing_sum, piece in zip(passing_sums, pieces, strict=True)]

    partial_sums = _repeat(1, num_devices, step, [part(piece, 0) for piece in pieces])
    axis = products[0].axis
    assert axis is not None, "a result that is scattered must have the dim"
    return partial_sums[0] if len(partial_sums) == 1 else jnp.concatenate(partial_sums, axis=axis)


def block_length(products: Sequence[BlockedProduct], size: int) -> int:
    """Returns 1/``size`` of the length of the products' common dim. Raises InputError if it does not divide."""
    factors = (factor for product in products for factor in product.factors if factor is not None)
    dim_len = next(int(factor.value.shape[factor.axis]) for factor in factors if factor.axis is not None)
    if dim_len % size:
        raise InputError(
            f"a collective matmul over {size} devices cannot cut {dim_len} into equal blocks. Use an axis that divides "
            f'it, or strategy.collective_matmul = "none".'
        )
    return dim_len // size


def _repeat(first: int, end: int, step: Callable[[Array | int, _Carry], _Carry], state: _Carry) -> _Carry:
    """Applies ``step`` to the numbers from ``first`` to ``end`` - 1 in order, unrolled if they are few."""
    if end - first > MAX_WRITTEN_OUT:
        return lax.fori_loop(first, end, step, state)
    for step_index in range(first, end):
        state = step(step_index, state)
    return state


def _whole(part: Array, product: BlockedProduct, start: Array, size: int) -> Array:
    """Returns zeros of the whole result with one block filled in, or ``part`` itself if the product sums over it."""
    if product.axis is None:
        return part
    whole_shape = [size * dim_size if axis == product.axis else dim_size for axis, dim_size in enumerate(part.shape)]
    return lax.dynamic_update_slice_in_dim(jnp.zeros(whole_shape, part.dtype), part, start, axis=product.axis)


# -- the step --------------------------------------------------------------------------------

_PRODUCTS: dict[str, Callable[..., Any]] = {"einsum": einsum, "quantised_einsum": quantised_einsum}


def _collective_matmul(context: Context, step: Step, *operands: Array) -> tuple[Array, ...]:
    """Runs the products of a collective matmul block by block; also returns the gathered array if the step has it.

    Blocks are summed in float32. The factor that is not an input of the step is the gathered array.
    """
    value_by_array = dict(zip(step.inputs, operands, strict=True))
    ring = MatmulRing(axes=step.details.axes, ways=step.details.ways, divergent=context.divergent)
    products = [_block_product(context, part, step.dim, value_by_array) for part in step.parts]
    if step.details.form != "all_gather":
        return (matmul_reduce_scatter(products, ring, length=block_length(products, ring.size)),)
    result_arrays = (step.result, *step.more)
    dim_index, gathers = step.inputs[0].dims.index(step.dim), len(result_arrays) > len(products)
    result_values = all_gather_matmul(operands[0], products, ring, axis=dim_index, gathers=gathers)
    return tuple(
        value.astype(operands[0].dtype) if result_array.dtype == "" else value
        for result_array, value in zip(result_arrays, result_values, strict=True)
    )


def _block_product(context: Context, product: Step, dim: str, values: Mapping[ShardedArray, Array]) -> BlockedProduct:
    def axis(array: ShardedArray) -> int | None:
        return array.dims.index(dim) if dim in array.dims else None

    wide_part = (
        replace(product, result=product.result.replace(dtype="fp32")) if axis(product.result) is None else product
    )
    return BlockedProduct(
        apply=lambda *factors: _PRODUCTS[product.op](context, wide_part, *factors),
        factors=tuple(Factor(values[a], axis(a)) if a in values else None for a in product.inputs),
        axis=axis(product.result),
    )


STEPS = {"collective_matmul": _collective_matmul}
