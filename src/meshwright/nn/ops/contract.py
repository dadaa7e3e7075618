"""The product of two arrays by the letters of their dims, in the order of work that the platform is fast at.

XLA's fast matrix product on CPU wants the dim that is summed last in its left factor. A product that sums the first
dims of both, as the gradient of every weight does (over tokens), falls back to a slower one. Here the smaller factor is
turned round first: a copy of it costs less than what the slower product loses. Other platforms choose by themselves.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array

from meshwright.nn.attention.platform import default_platform


class _Letters(NamedTuple):
    """Letters of a product: those of both factors and the result, those that are summed, and each factor's own."""

    batch: str
    summed: str
    left: str
    right: str


def contract(equation: str, lhs: Array, rhs: Array, *, dtype: DTypeLike | None = None) -> Array:
    """`jnp.einsum` of two arrays; ``dtype`` is that of the result and of its sums, by default the operands'."""
    letters = _sums_first_dims(equation)
    wide = lhs.dtype == rhs.dtype == jnp.float32 and dtype in (None, jnp.float32)
    if letters is not None and wide and default_platform() == "cpu":
        return _turned_round(letters, equation.split("->")[1], lhs, rhs)
    return jnp.einsum(equation, lhs, rhs, preferred_element_type=dtype)


def _sums_first_dims(equation: str) -> _Letters | None:
    """The letters of a product of [batch, summed, left] and [batch, summed, right]; None for any other."""
    factors, out = equation.split("->")
    left, right = factors.split(",")
    shared = "".join(c for c in left if c in right)
    batch = "".join(c for c in shared if c in out)
    found = _Letters(batch, shared[len(batch) :], left[len(shared) :], right[len(shared) :])
    in_order = left == batch + found.summed + found.left and right == batch + found.summed + found.right
    whole = sorted(out) == sorted(batch + found.left + found.right)
    return found if in_order and whole and found.summed and found.left and found.right else None


def _turned_round(letters: _Letters, out: str, lhs: Array, rhs: Array) -> Array:
    """The product with the smaller factor transposed beforehand."""
    sizes = dict(zip(letters.batch + letters.summed + letters.left, lhs.shape, strict=True))
    sizes |= dict(zip(letters.batch + letters.summed + letters.right, rhs.shape, strict=True))
    tall, wide, first, second = lhs, rhs, letters.left, letters.right
    if _size(sizes, first) > _size(sizes, second):
        tall, wide, first, second = rhs, lhs, second, first
    shape = [sizes[c] for c in letters.batch] + [_size(sizes, letters.summed)]
    # The barriers keep XLA from folding a transposition back into the product, which would undo all this.
    turned = lax.optimization_barrier(jnp.swapaxes(tall.reshape(*shape, -1), -1, -2))
    made = jnp.matmul(turned, wide.reshape(*shape, -1))
    found = letters.batch + first + second
    if found != out:
        made = lax.optimization_barrier(made)
    made = made.reshape([sizes[c] for c in found])
    return jnp.transpose(made, [found.index(c) for c in out])


def _size(sizes: dict[str, int], letters: str) -> int:
    return math.prod(sizes[c] for c in letters)
