"""A chain of products whose shardings are free: its arrays, and the shardings that each may have."""

import itertools
from collections.abc import Mapping, Sequence

import msgspec

from meshwright.algebra.notation import ShardedArray, Sizes, check, parse_array, product
from meshwright.calculators.sharding.parsing import parse_einsum, refuse_unknown_dims
from meshwright.core.errors import InputError, nearest

MAX_AXES = 3
"""Most mesh axes of several devices: with four, an array of two dims has 261 shardings, and pairs are searched."""


class ChainProduct(msgspec.Struct, frozen=True, kw_only=True):
    """One product of a chain, its arrays unsharded: ``carried`` is the previous result, ``other`` an input.

    In the first product both are inputs. ``swapped`` says that ``carried`` is the right operand.
    """

    carried: ShardedArray
    other: ShardedArray
    out: ShardedArray
    swapped: bool = False

    @property
    def dims(self) -> tuple[str, ...]:
        """Every dim of the product, those of the carried array first."""
        return tuple(dict.fromkeys((*self.carried.dims, *self.other.dims)))

    def operands(self, carried: ShardedArray, other: ShardedArray) -> tuple[ShardedArray, ShardedArray]:
        """Returns both operands in the order of the text, left and right."""
        return (other, carried) if self.swapped else (carried, other)


class Chain(msgspec.Struct, frozen=True, kw_only=True):
    """Products in order, sizes, and for each array by name the shardings that it may have.

    Arrays are in the order in which the search settles them: operands, then the result, of each product.
    """

    products: tuple[ChainProduct, ...]
    dims: dict[str, int]
    mesh: dict[str, int]
    choices: dict[str, tuple[ShardedArray, ...]]
    fixed: frozenset[str] = frozenset()

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the arrays that no product makes."""
        return (self.products[0].carried.name, *(p.other.name for p in self.products))


def shardings(array: ShardedArray, dims: Sizes, mesh: Mapping[str, int]) -> tuple[ShardedArray, ...]:
    """Returns every even sharding of the array over the mesh, nothing unreduced; axes in mesh order come first.

    An axis may split any one dim or none, and axes on one dim have any order: only the minor one can be gathered alone.
    """
    axes = [axis for axis, size in mesh.items() if size > 1]
    found: list[ShardedArray] = []
    for places in itertools.product((None, *array.dims), repeat=len(axes)):
        groups = [[a for a, place in zip(axes, places, strict=True) if place == dim] for dim in array.dims]
        sizes = [product(mesh[axis] for axis in group) for group in groups]
        if any(dims[dim] % size for dim, size in zip(array.dims, sizes, strict=True)):
            continue
        found.extend(array.replace(axes=orders) for orders in itertools.product(*map(itertools.permutations, groups)))
    return tuple(found)


def parse_chain(
    texts: Sequence[str],
    *,
    dims: dict[str, int],
    mesh: dict[str, int],
    fixed: Sequence[str] = (),
    dtype: str = "bf16",
) -> Chain:
    """Returns the chain of products such as ``A[I,J] * B[J,K] -> C[I,K]``, each of which takes the previous result.

    An array written with a mesh axis keeps that sharding; one of ``fixed`` keeps the sharding written there.
    Raises InputError if the products are no chain, an array is used twice, or a size is missing.
    """
    if (several := sum(size > 1 for size in mesh.values())) > MAX_AXES:
        raise InputError(
            f"the mesh has {several} axes above 1; a chain is searched over at most {MAX_AXES}. Merge some."
        )
    products: list[ChainProduct] = []
    kept: dict[str, ShardedArray] = {}
    for text in texts:
        products.append(_product(text, products[-1].out if products else None, kept, dtype))
    names = [products[0].carried.name, *(a.name for p in products for a in (p.other, p.out))]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"array {name} is used in more than one place of the chain. Give each array its own name.")
    arrays = {a.name: a for p in products for a in (p.carried, p.other, p.out)}
    for text in fixed:
        array = parse_array(text).replace(dtype=dtype)
        if array.name not in arrays:
            raise InputError(f"--fixed {text} is no array of the chain.{nearest(array.name, arrays)}")
        _same_dims(array, arrays[array.name])
        kept[array.name] = array
    refuse_unknown_dims(dims, arrays.values())
    for array in (*arrays.values(), *kept.values()):
        check(array, dims, mesh)
    choices = {name: (kept[name],) if name in kept else shardings(arrays[name], dims, mesh) for name in names}
    return Chain(products=tuple(products), dims=dims, mesh=mesh, choices=choices, fixed=frozenset(kept))


def _product(text: str, before: ShardedArray | None, kept: dict[str, ShardedArray], dtype: str) -> ChainProduct:
    trio = parse_einsum(text)
    if any(a.dtype for a in trio) or not all(a.name in text for a in trio) or any(a.unreduced for a in trio):
        raise InputError(
            f"{text!r}: give each array of a chain a name of its own, nothing unreduced and no dtype but --dtype."
        )
    lhs, rhs, out = (_whole(a, kept, dtype) for a in trio)
    if before is None or lhs.name == before.name:
        carried, other, swapped = lhs, rhs, False
    elif rhs.name == before.name:
        carried, other, swapped = rhs, lhs, True
    else:
        raise InputError(f"{text!r} does not take {before.name}, the result of the product before. Put it on the left.")
    if before is not None:
        _same_dims(carried, before)
    return ChainProduct(
        carried=carried.replace(dims=before.dims) if before else carried, other=other, out=out, swapped=swapped
    )


def _whole(array: ShardedArray, kept: dict[str, ShardedArray], dtype: str) -> ShardedArray:
    typed = array.replace(dtype=dtype)
    if array.spread:
        if kept.get(array.name, typed) != typed:
            raise InputError(f"{array} is also written as {kept[array.name]}. Give it one sharding.")
        kept[array.name] = typed
    return typed.replace(axes=((),) * len(array.dims))


def _same_dims(array: ShardedArray, wanted: ShardedArray) -> None:
    if array.dims != wanted.dims:
        raise InputError(
            f"{array} and {wanted} are one array with different dims. Write the same dims in the same order."
        )
