"""Collective matmuls inside `shard_map`: products block by block, beside blocks that go round the devices.

Device r of n has block r. One way, a block goes to the next device n - 1 times; two ways, one half of it goes to the
next device and the other to the one before, each n - 1 times. The moves stand in the program one after the other, so
that a platform that sends while it computes has the next block under way during a product; with more than
`MAX_WRITTEN_OUT` devices they are a loop.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
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
"""Devices up to which every move stands in the program by itself."""

State = Any


class Factor(NamedTuple):
    """An array of a product, and its axis along the dim that is cut into blocks; None where it lacks the dim."""

    value: Array
    axis: int | None


@dataclass(frozen=True, kw_only=True)
class Product:
    """One product, computed by ``apply`` for a block of its dim; ``factors`` are what stays, None what goes round.

    ``axis`` is that of the result along the dim; None where the product sums over it.
    """

    apply: Callable[..., Array]
    factors: tuple[Factor | None, ...]
    axis: int | None

    def of(self, start: Array | int, length: int, block: Array | None = None) -> Array:
        """The part of a block that begins at ``start``."""
        return self.apply(*(block if factor is None else _part(factor, start, length) for factor in self.factors))


@dataclass(frozen=True, kw_only=True)
class Round(Ring):
    """The ring of one collective matmul, round which blocks go one way or two."""

    ways: int = 1

    def pieces(self, length: int) -> tuple["Piece", ...]:
        """What goes round of a block: all of it, or its two halves; a block of one goes one way."""
        half = (length + 1) // 2
        if self.ways == 1 or half == length:
            return (Piece(0, length, 1),)
        return Piece(0, half, 1), Piece(half, length - half, -1)

    def send(self, values: Sequence[Array], pieces: Sequence["Piece"]) -> list[Array]:
        """Pieces from the device before, or after, to this one."""
        return [self.shift(value, piece.by) for value, piece in zip(values, pieces, strict=True)]


class Piece(NamedTuple):
    """A part of a block that goes round: where it begins, how long it is, and to which side it goes."""

    start: int
    length: int
    by: int


def all_gather_matmul(
    block: Array, products: Sequence[Product], ring: Round, *, axis: int, gathers: bool = False
) -> tuple[Array, ...]:
    """The results of products of what the blocks of all devices are together, joined along ``axis``.

    With ``gathers`` the joined array comes last. Sums over blocks are made in the dtype that products give.
    """
    length, size, rank = block.shape[axis], ring.size, ring.rank
    pieces = ring.pieces(length)
    wanted = [*products, *([Product(apply=lambda x: x, factors=(None,), axis=axis)] if gathers else [])]

    def meet(results: list[Array], values: Sequence[Array], step: Array | int) -> list[Array]:
        for value, piece in zip(values, pieces, strict=True):
            start = (rank - piece.by * step) % size * length + piece.start
            results = [_with_part(r, p, start, piece.length, value) for r, p in zip(results, wanted, strict=True)]
        return results

    own = [product.of(rank * length, length, block) for product in wanted]
    results = [_whole(found, p, rank * length, size) for found, p in zip(own, wanted, strict=True)]
    values = [lax.slice_in_dim(block, p.start, p.start + p.length, axis=axis) for p in pieces]

    def step(number: Array | int, carry: tuple[list[Array], list[Array]]) -> tuple[list[Array], list[Array]]:
        passing, found = carry
        return ring.send(passing, pieces), meet(found, passing, number)

    values, results = _repeat(1, size - 1, step, (ring.send(values, pieces), results))
    return tuple(meet(results, values, size - 1))


def matmul_reduce_scatter(products: Sequence[Product], ring: Round, *, length: int) -> Array:
    """This device's block, of ``length``, of the sum of all products over all devices."""
    size, rank = ring.size, ring.rank
    pieces = ring.pieces(length)

    def part(piece: Piece, step: Array | int) -> Array:
        # a sum that this device sees in a step has size - 1 - step moves to go to where it belongs
        start = (rank - piece.by * (1 + step)) % size * length + piece.start
        first, *others = (product.of(start, piece.length) for product in products)
        return sum(others, start=first)

    def step(number: Array | int, sums: list[Array]) -> list[Array]:
        passing = ring.send(sums, pieces)
        return [s + part(piece, number) for s, piece in zip(passing, pieces, strict=True)]

    sums = _repeat(1, size, step, [part(piece, 0) for piece in pieces])
    axis = products[0].axis
    assert axis is not None, "what is scattered has the dim that it is scattered along"
    return sums[0] if len(sums) == 1 else jnp.concatenate(sums, axis=axis)


def block_length(products: Sequence[Product], size: int) -> int:
    """Length of one of ``size`` blocks of the dim that products are cut along."""
    factors = (f for product in products for f in product.factors if f is not None)
    whole = next(int(f.value.shape[f.axis]) for f in factors if f.axis is not None)
    if whole % size:
        raise InputError(
            f"a collective matmul over {size} devices cannot cut {whole} into equal blocks. Use an axis that divides "
            f'it, or strategy.collective_matmul = "none".'
        )
    return whole // size


def _repeat(first: int, end: int, step: Callable[[Any, State], State], state: State) -> State:
    """``step`` for the numbers from ``first`` up to ``end``, written out where they are few."""
    if end - first > MAX_WRITTEN_OUT:
        return lax.fori_loop(first, end, step, state)
    for number in range(first, end):
        state = step(number, state)
    return state


def _part(factor: Factor, start: Array | int, length: int) -> Array:
    if factor.axis is None:
        return factor.value
    return lax.dynamic_slice_in_dim(factor.value, start, length, axis=factor.axis)


def _whole(part: Array, product: Product, start: Array, size: int) -> Array:
    """A result with one block in it, or the sum that begins with it."""
    if product.axis is None:
        return part
    shape = [size * n if axis == product.axis else n for axis, n in enumerate(part.shape)]
    return lax.dynamic_update_slice_in_dim(jnp.zeros(shape, part.dtype), part, start, axis=product.axis)


def _with_part(result: Array, product: Product, start: Array, length: int, block: Array) -> Array:
    part = product.of(start, length, block)
    if product.axis is None:
        return result + part
    return lax.dynamic_update_slice_in_dim(result, part, start, axis=product.axis)


# -- the step --------------------------------------------------------------------------------

_PRODUCTS: dict[str, Callable[..., Any]] = {"einsum": einsum, "quantised_einsum": quantised_einsum}


def _collective_matmul(context: Context, step: Step, *given: jax.Array) -> tuple[jax.Array, ...]:
    """The parts of a collective matmul block by block, and the gathered array where it is one of the results.

    Sums over blocks are made in float32. What is given by no input is the array that goes round.
    """
    values = dict(zip(step.inputs, given, strict=True))
    ring = Round(axes=step.details.axes, ways=step.details.ways, divergent=context.divergent)
    products = [_block_product(context, part, step.dim, values) for part in step.parts]
    if step.details.form != "all_gather":
        return (matmul_reduce_scatter(products, ring, length=block_length(products, ring.size)),)
    results = (step.result, *step.more)
    axis, gathers = step.inputs[0].dims.index(step.dim), len(results) > len(products)
    found = all_gather_matmul(given[0], products, ring, axis=axis, gathers=gathers)
    return tuple(
        array.astype(given[0].dtype) if result.dtype == "" else array
        for result, array in zip(results, found, strict=True)
    )


def _block_product(context: Context, part: Step, dim: str, values: Mapping[ShardedArray, jax.Array]) -> Product:
    def axis(array: ShardedArray) -> int | None:
        return array.dims.index(dim) if dim in array.dims else None

    sums = replace(part, result=part.result.replace(dtype="fp32")) if axis(part.result) is None else part
    return Product(
        apply=lambda *factors: _PRODUCTS[part.op](context, sums, *factors),
        factors=tuple(Factor(values[a], axis(a)) if a in values else None for a in part.inputs),
        axis=axis(part.result),
    )


STEPS = {"collective_matmul": _collective_matmul}
