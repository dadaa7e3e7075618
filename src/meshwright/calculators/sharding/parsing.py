"""Reads a question of `shard`: a product, one array, or one array and the sharding that it moves to.

Also the exact block that a device holds of an array of given sizes.
"""

import re
from collections.abc import Iterable

import msgspec

from meshwright.algebra.einsum import einsum_steps, reshard
from meshwright.algebra.notation import ShardedArray, Sizes, parse_array
from meshwright.algebra.steps import Step
from meshwright.core.errors import InputError
from meshwright.core.notation import compact

_ARROW = re.compile(r"\s*(?:->|→)\s*")
_TIMES = re.compile(r"\]\s*(\{[^\]]*?\})?\s*[*.@·]\s*")


def parse_einsum(text: str) -> tuple[ShardedArray, ShardedArray, ShardedArray]:
    """Parses ``In[B_X,D_Y] * Win[D_X,F_Y] -> Tmp[B_X,F_Y]`` into (lhs, rhs, out); the product sign may be * . @ or ·.

    Raises InputError for other texts, and for a dim of the result that no operand has.
    """
    text = compact(text)
    side_texts = _ARROW.split(text)
    if len(side_texts) != 2:
        raise InputError(f"{text!r} is not one product. Write A[I,J] * B[J,K] -> C[I,K].")
    product_sign = _TIMES.search(side_texts[0])
    if product_sign is None:
        raise InputError(f"{side_texts[0]!r} is not a product of two arrays. Write A[I,J] * B[J,K] before the arrow.")
    lhs = parse_array(side_texts[0][: product_sign.start() + 1] + (product_sign.group(1) or ""))
    rhs, out = parse_array(side_texts[0][product_sign.end() :]), parse_array(side_texts[1])
    for dim in out.dims:
        if dim not in lhs.dims and dim not in rhs.dims:
            raise InputError(f"dim {dim} of {out} is in neither {lhs} nor {rhs}; an output dim comes from an input.")
    return distinct_names(lhs, rhs, out)


def distinct_names(*arrays: ShardedArray) -> tuple[ShardedArray, ShardedArray, ShardedArray]:
    """Returns the arrays, renamed A, B, C if any has a dtype or two have the same name."""
    array_names = [a.name for a in arrays]
    if len(set(array_names)) == 3 and not any(a.dtype for a in arrays):
        return arrays[0], arrays[1], arrays[2]
    lhs, rhs, out = (a.replace(name=n) for a, n in zip(arrays, ("A", "B", "C"), strict=True))
    return lhs, rhs, out


def refuse_unknown_dims(dims: Sizes, arrays: Iterable[ShardedArray]) -> None:
    """Raises InputError if ``dims`` has a size for a dim that no array has."""
    all_dims = dict.fromkeys(dim for array in arrays for dim in array.dims)
    for dim in dims:
        if dim not in all_dims:
            raise InputError(f"--dims {dim}: no array has this dim. Choose of {', '.join(all_dims)}, or leave it out.")


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
        """The last array."""
        return self.arrays[-1]


def parse_asked(text: str, *, dtype: str) -> ShardQuestion:
    """Parses a product, an array, or an array and its new sharding; arrays without a dtype get ``dtype``.

    Raises InputError for an array that changes dims or dtype.
    """
    text = compact(text)
    side_texts = _ARROW.split(text)
    if len(side_texts) > 2 or text.count("[") not in (1, 2):
        lhs, rhs, out = (_typed(a, dtype) for a in parse_einsum(text))
        return ShardQuestion(title=text, arrays=(lhs, rhs, out), steps=einsum_steps(lhs, rhs, out), factors=(lhs, rhs))
    if len(side_texts) == 1:
        return ShardQuestion(title=text, arrays=(_typed(parse_array(text), dtype),), steps=())
    source, target = (parse_array(side) for side in side_texts)
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
    """Returns the array with a dtype: ``dtype`` if it has none; named A if its name was a dtype."""
    if not array.dtype:
        return array.replace(dtype=dtype)
    return array.replace(name="A") if array.name == array.dtype else array
