"""The product of two arrays by the letters of their dims, in the order of work that the platform is fast at.

XLA's fast matrix product on CPU wants the dim that is summed last in its left factor. A product that sums the first
dims of both, as the gradient of every weight does (over tokens), falls back to a slower one. Here the smaller factor is
turned round first: a copy of it costs less than what the slower product loses. Other platforms choose by themselves.
"""

import math

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array

from meshwright.nn.attention.platform import default_platform


def contract(equation: str, lhs: Array, rhs: Array, *, dtype: DTypeLike | None = None) -> Array:
    """`jnp.einsum` of two arrays; ``dtype`` is that of the result and of its sums, by default the operands'."""
    factors, out = equation.split("->")
    left, right = factors.split(",")
    shared = "".join(c for c in left if c in right)
    batch = "".join(c for c in shared if c in out)
    ahead = batch + shared[len(batch) :]
    first, second = left[len(ahead) :], right[len(ahead) :]
    sums_first_dims = left.startswith(ahead) and right.startswith(ahead) and batch != ahead and first and second
    wide = lhs.dtype == rhs.dtype == jnp.float32 and dtype in (None, jnp.float32)
    if sums_first_dims and sorted(out) == sorted(batch + first + second) and wide and default_platform() == "cpu":
        return _turned_round((batch, ahead[len(batch) :], first, second), out, lhs, rhs)
    return jnp.einsum(equation, lhs, rhs, preferred_element_type=dtype)


def _turned_round(letters: tuple[str, str, str, str], out: str, lhs: Array, rhs: Array) -> Array:
    """The product of [batch, summed, first] and [batch, summed, second], the smaller factor transposed beforehand."""
    batch, summed, first, second = letters
    sizes = dict(zip(batch + summed + first, lhs.shape, strict=True))
    sizes |= zip(batch + summed + second, rhs.shape, strict=True)

    def size(letters: str) -> int:
        return math.prod(sizes[c] for c in letters)

    if size(first) > size(second):
        lhs, rhs, first, second = rhs, lhs, second, first
    shape = [*(sizes[c] for c in batch), size(summed), -1]
    # The barriers keep XLA from folding a transposition back into the product, which would undo all this.
    turned = lax.optimization_barrier(jnp.swapaxes(lhs.reshape(shape), -1, -2))
    made = jnp.matmul(turned, rhs.reshape(shape))
    found = batch + first + second
    if found != out:
        made = lax.optimization_barrier(made)
    made = made.reshape([sizes[c] for c in found])
    return jnp.transpose(made, [found.index(c) for c in out])


def spread(x: Array, dims: tuple[str, ...], over: tuple[str, ...]) -> Array:
    """An array over ``dims`` with the rank of one over the dims ``over``, 1 where it has none of them."""
    order = [dims.index(dim) for dim in over if dim in dims]
    return jnp.expand_dims(x.transpose(order), tuple(i for i, dim in enumerate(over) if dim not in dims))
