"""A chain of products whose shardings are free: its arrays, their shardings, and the graph that is searched.

Between two products only the sharding of the carried array matters, so that a chain is a path: carried array as
stored -> moved to where blocks can be multiplied -> multiplied -> result as stored.
Memory of a device: all inputs as stored, from beginning to end, and the largest sum of other arrays alive in a step.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Literal

import msgspec

from meshwright.algebra.einsum import local_product, reshard
from meshwright.algebra.notation import ShardedArray, Sizes, check, local_elements, parse_array, product
from meshwright.algebra.steps import Step
from meshwright.calculators.sharding.einsum_cost import EinsumRates, price_einsum
from meshwright.calculators.sharding.parsing import parse_einsum, refuse_unknown_dims
from meshwright.core.dims import DTYPE_BYTES
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
        """Every dim of the product; the dims of the carried array are first."""
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
    """Returns every even sharding of the array over the mesh without unreduced axes; axes in mesh order are first.

    Each axis splits one dim or none. Axes on one dim are tried in every order, as only the minor one can be gathered by
    itself.
    """
    axes = [axis for axis, size in mesh.items() if size > 1]
    layouts: list[ShardedArray] = []
    for dim_by_axis in itertools.product((None, *array.dims), repeat=len(axes)):
        dim_axes = [[a for a, axis_dim in zip(axes, dim_by_axis, strict=True) if axis_dim == dim] for dim in array.dims]
        shards_by_dim = [product(mesh[axis] for axis in group) for group in dim_axes]
        if any(dims[dim] % size for dim, size in zip(array.dims, shards_by_dim, strict=True)):
            continue
        layouts.extend(array.replace(axes=perms) for perms in itertools.product(*map(itertools.permutations, dim_axes)))
    return tuple(layouts)


def parse_chain(
    texts: Sequence[str], *, dims: dict[str, int], mesh: dict[str, int], fixed: Sequence[str] = (), dtype: str = "bf16"
) -> Chain:
    """Returns the chain of products such as ``A[I,J] * B[J,K] -> C[I,K]``, each of which takes the previous result.

    An array written with a mesh axis keeps that sharding; one of ``fixed`` keeps the sharding written there.
    Raises InputError if the products are no chain, an array is used twice, or a size is missing.
    """
    if (n_axes := sum(size > 1 for size in mesh.values())) > MAX_AXES:
        raise InputError(f"the mesh has {n_axes} axes above 1; a chain is searched on at most {MAX_AXES}. Merge some.")
    products: list[ChainProduct] = []
    pin_by_name: dict[str, ShardedArray] = {}
    for text in texts:
        products.append(_product(text, products[-1].out if products else None, pin_by_name, dtype))
    names = [products[0].carried.name, *(a.name for p in products for a in (p.other, p.out))]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"array {name} is used in more than one place of the chain. Give each array its own name.")
    array_by_name = {a.name: a for p in products for a in (p.carried, p.other, p.out)}
    for text in fixed:
        array = parse_array(text).replace(dtype=dtype)
        if array.name not in array_by_name:
            raise InputError(f"--fixed {text} is no array of the chain.{nearest(array.name, array_by_name)}")
        _same_dims(array, array_by_name[array.name])
        pin_by_name[array.name] = array
    refuse_unknown_dims(dims, array_by_name.values())
    for array in (*array_by_name.values(), *pin_by_name.values()):
        check(array, dims, mesh)
    choices = {n: (pin_by_name[n],) if n in pin_by_name else shardings(array_by_name[n], dims, mesh) for n in names}
    return Chain(products=tuple(products), dims=dims, mesh=mesh, choices=choices, fixed=frozenset(pin_by_name))


def _product(text: str, before: ShardedArray | None, pinned: dict[str, ShardedArray], dtype: str) -> ChainProduct:
    arrays = parse_einsum(text)
    if any(a.dtype for a in arrays) or not all(a.name in text for a in arrays) or any(a.unreduced for a in arrays):
        raise InputError(
            f"{text!r}: give each array of a chain a name of its own, nothing unreduced and no dtype but --dtype."
        )
    lhs, rhs, out = (_whole(a, pinned, dtype) for a in arrays)
    if before is None or lhs.name == before.name:
        carried, other, is_swapped = lhs, rhs, False
    elif rhs.name == before.name:
        carried, other, is_swapped = rhs, lhs, True
    else:
        raise InputError(f"{text!r} does not take {before.name}, the result of the product before. Put it on the left.")
    if before is not None:
        _same_dims(carried, before)
    return ChainProduct(
        carried=carried.replace(dims=before.dims) if before else carried, other=other, out=out, swapped=is_swapped
    )


def _whole(array: ShardedArray, pinned_by_name: dict[str, ShardedArray], dtype: str) -> ShardedArray:
    typed_array = array.replace(dtype=dtype)
    if array.spread:
        if pinned_by_name.get(array.name, typed_array) != typed_array:
            raise InputError(f"{array} is also written as {pinned_by_name[array.name]}. Give it one sharding.")
        pinned_by_name[array.name] = typed_array
    return typed_array.replace(axes=((),) * len(array.dims))


def _same_dims(array: ShardedArray, wanted: ShardedArray) -> None:
    if array.dims != wanted.dims:
        raise InputError(f"{array} and {wanted} are one array with different dims. Write the same dims in one order.")


class Label(msgspec.Struct, frozen=True, kw_only=True):
    """A path through the graph, or a part of one: seconds, bytes of its inputs, peak of other bytes alive, its history.

    ``held_bytes`` are still alive after its last step.
    """

    time_s: float = 0.0
    input_bytes: float = 0.0
    alive_bytes: float = 0.0
    held_bytes: float = 0.0
    arrays: tuple[ShardedArray, ...] = ()
    steps: tuple[Step, ...] = ()

    def then(self, part: "Label") -> "Label":
        """Returns this path followed by ``part``, whose ``alive_bytes`` count all that is alive in it."""
        return Label(
            time_s=self.time_s + part.time_s,
            input_bytes=self.input_bytes + part.input_bytes,
            alive_bytes=max(self.alive_bytes, part.alive_bytes),
            held_bytes=part.held_bytes,
            arrays=self.arrays + part.arrays,
            steps=self.steps + part.steps,
        )

    def matches(self, other: "Label") -> bool:
        """True if this path is at least as good in seconds and bytes."""
        return (
            self.time_s <= other.time_s
            and self.input_bytes <= other.input_bytes
            and self.alive_bytes <= other.alive_bytes
        )


class ChainNode(msgspec.Struct, frozen=True):
    """A state in product ``index``: its carried array as stored or moved, or the blocks multiplied.

    ``stays`` says that the array is an input as stored, whose bytes are counted with the inputs.
    """

    index: int
    stage: Literal["stored", "moved", "multiplied"]
    array: ShardedArray
    stays: bool = False


class Graph:
    """The nodes of one chain on one mesh and the edges between them, computed when they are first needed."""

    def __init__(self, chain: Chain, rates: EinsumRates) -> None:
        self.chain, self.rates = chain, rates
        # bytes of an array's block on a device, and the price of one step
        self.bytes = cache(
            lambda array: float(local_elements(array, chain.dims, chain.mesh) * DTYPE_BYTES[array.dtype])
        )
        self.price = cache(lambda step: price_einsum((step,), chain.dims, chain.mesh, rates)[0])
        self.time_to_go, self.edges, self._move = cache(self._time_to_go), cache(self._edges), cache(self._moved)
        self._layouts, self._inputs = cache(self._find_layouts), cache(self._find_inputs)
        smallest_bytes = [min(map(self.bytes, chain.choices[p.other.name])) for p in chain.products]
        self.inputs_to_go = [sum(smallest_bytes[i:]) for i in range(len(smallest_bytes) + 1)]

    def _time_to_go(self, node: ChainNode) -> float:
        """Returns seconds from a node to the end, without a limit on memory."""
        return min((label.time_s + self.time_to_go(next_node) for next_node, label in self.edges(node)), default=0.0)

    def starts(self) -> Iterator[tuple[ChainNode, Label]]:
        """Yields the first array in each of its shardings."""
        for array in self.chain.choices[self.chain.products[0].carried.name]:
            yield ChainNode(0, "stored", array, True), Label(input_bytes=self.bytes(array), arrays=(array,))

    def _edges(self, node: ChainNode) -> list[tuple[ChainNode, Label]]:
        """Returns the nodes that follow a node, each with the part of the path that leads there."""
        if node.index == len(self.chain.products):
            return []
        method_by_stage = {"stored": self._move_carried, "moved": self._multiply, "multiplied": self._store}
        return list(method_by_stage[node.stage](node))

    def _move_carried(self, node: ChainNode) -> Iterator[tuple[ChainNode, Label]]:
        """Yields the carried array moved to every sharding in which blocks can be multiplied."""
        for target in self._layouts(node.index):
            move_label = self._move(node.array, target, stays=node.stays)
            yield ChainNode(node.index, "moved", target, node.stays and not move_label.steps), move_label

    def _multiply(self, node: ChainNode) -> Iterator[tuple[ChainNode, Label]]:
        """Yields the product in every layout, after the second operand is moved to match the first."""
        chain_product = self.chain.products[node.index]
        held_bytes = 0.0 if node.stays else self.bytes(node.array)
        for operand in self._layouts(node.index)[node.array]:
            lhs, rhs = chain_product.operands(node.array, operand)
            step = Step(op="einsum", inputs=(lhs, rhs), result=local_product(lhs, rhs, chain_product.out))
            for input_label in self._inputs(chain_product, operand):
                all_bytes = held_bytes + input_label.held_bytes + self.bytes(step.result)
                label = Label(
                    time_s=input_label.time_s + (self.price(step).time_s or 0.0),
                    input_bytes=input_label.input_bytes,
                    alive_bytes=max(held_bytes + input_label.alive_bytes, all_bytes),
                    arrays=input_label.arrays,
                    steps=(*input_label.steps, step),
                )
                yield ChainNode(node.index, "multiplied", step.result), label

    def _find_layouts(self, index: int) -> dict[ShardedArray, list[ShardedArray]]:
        """Returns the shardings in which blocks can be multiplied: carried operand -> matching shardings of the input.

        A mesh axis splits at most one dim of the product, in the same way in both operands.
        """
        chain_product = self.chain.products[index]
        others_of: dict[ShardedArray, list[ShardedArray]] = {}
        unsharded_array = ShardedArray("layout", chain_product.dims, ((),) * len(chain_product.dims))
        for layout in shardings(unsharded_array, self.chain.dims, self.chain.mesh):
            axes = dict(zip(layout.dims, layout.axes, strict=True))
            others_of.setdefault(chain_product.carried.resharded(axes), []).append(chain_product.other.resharded(axes))
        return others_of

    def _find_inputs(self, chain_product: ChainProduct, target: ShardedArray) -> list[Label]:
        """Returns the paths of the input operand to ``target``, from each sharding that it may be stored in."""
        return [
            Label(input_bytes=self.bytes(array), arrays=(array,)).then(self._move(array, target, stays=True))
            for array in self.chain.choices[chain_product.other.name]
        ]

    def _store(self, node: ChainNode) -> Iterator[tuple[ChainNode, Label]]:
        """Yields the result moved to every sharding that it may have, with sums scattered, or else made whole first."""
        out = self.chain.products[node.index].out
        for array in self.chain.choices[out.name]:
            next_node = ChainNode(node.index + 1, "stored", array)
            stored_label = Label(arrays=(array,))
            yield next_node, stored_label.then(self._move(node.array, array, stays=False))
            reduced_array = node.array.replace(unreduced=())
            if reduced_array not in (node.array, array):
                sum_label = self._move(node.array, reduced_array, stays=False)
                yield next_node, stored_label.then(sum_label.then(self._move(reduced_array, array, stays=False)))

    def _moved(self, source: ShardedArray, target: ShardedArray, *, stays: bool) -> Label:
        """Returns the path from one sharding to another; of an array that ``stays`` only copies count as alive."""
        steps = reshard(source, target)
        peak_bytes = held_bytes = 0.0 if stays else self.bytes(source)
        for step in steps:
            peak_bytes, held_bytes = max(peak_bytes, held_bytes + self.bytes(step.result)), self.bytes(step.result)
        time_s = sum(self.price(step).time_s or 0.0 for step in steps)
        return Label(time_s=time_s, alive_bytes=peak_bytes, held_bytes=held_bytes, steps=steps)
