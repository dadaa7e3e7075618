"""What `meshwright shard` is asked about: a product, one array, or one array on its way to another sharding."""

import re

import msgspec

from meshwright.algebra.einsum import einsum_steps, reshard
from meshwright.algebra.notation import ShardedArray, parse_array
from meshwright.algebra.steps import Step
from meshwright.calculators.sharding.parsing import parse_einsum
from meshwright.core.errors import InputError

_ARROW = re.compile(r"\s*(?:->|→)\s*")


class ShardQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """The arrays in the order they were written, and the steps to the last one.

    ``factors`` are the two operands of a product, () where there is none.
    """

    title: str
    arrays: tuple[ShardedArray, ...]
    steps: tuple[Step, ...]
    factors: tuple[ShardedArray, ...] = ()

    @property
    def result(self) -> ShardedArray:
        """What is wanted in the end."""
        return self.arrays[-1]

    @property
    def drawn(self) -> tuple[ShardedArray, ...]:
        """Arrays of the picture, the last as the steps leave it."""
        return (*self.arrays[:-1], self.steps[-1].result) if self.steps else self.arrays

    def key(self, array: ShardedArray) -> str:
        """Its name, or the whole notation where two arrays have the same name."""
        names = [a.name for a in self.arrays]
        return array.name if names.count(array.name) == 1 else str(array)


def parse_asked(text: str, *, dtype: str) -> ShardQuestion:
    """The product, array or resharding that is written; arrays without a dtype have ``dtype``."""
    sides = _ARROW.split(text.strip())
    if len(sides) > 2 or text.count("[") not in (1, 2):
        lhs, rhs, out = (_typed(a, dtype) for a in parse_einsum(text))
        return ShardQuestion(title=text, arrays=(lhs, rhs, out), steps=einsum_steps(lhs, rhs, out), factors=(lhs, rhs))
    if len(sides) == 1:
        return ShardQuestion(title=text, arrays=(_typed(parse_array(text), dtype),), steps=())
    source, target = (parse_array(side) for side in sides)
    if source.dims != target.dims:
        raise InputError(
            f"{source} and {target} differ in their dims: an array that moves keeps them. "
            f"Write a product as A[I,J] * B[J,K] -> C[I,K]."
        )
    if source.dtype and target.dtype and source.dtype != target.dtype:
        raise InputError(f"{source.dtype} and {target.dtype} are two dtypes of one array. Leave one of them out.")
    source = _typed(source, target.dtype or dtype)
    target = target.replace(name=source.name, dtype=source.dtype)
    arrays = (source,) if source == target else (source, target)
    return ShardQuestion(title=text, arrays=arrays, steps=reshard(source, target))


def _typed(array: ShardedArray, dtype: str) -> ShardedArray:
    """The array with a dtype, and with a name other than that."""
    if not array.dtype:
        return array.replace(dtype=dtype)
    return array.replace(name="A") if array.name == array.dtype else array
