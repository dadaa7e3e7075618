"""Fixes orders that compilers may change, since they drop barriers before they schedule: of execution and allocation,
and of the addends of a sum."""

from collections.abc import Iterable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array

_Values = TypeVar("_Values")


def never(arrays: Iterable[Array]) -> Array:
    """Returns a False that no compiler can know before the arrays have been computed."""
    # without the barrier libtpu sends a scatter of which one number is read as a whole all-reduce
    barred_arrays = lax.optimization_barrier(list(arrays))
    entry_sum = sum((array.reshape(-1)[0].astype(jnp.float32) for array in barred_arrays), start=jnp.zeros(()))
    return jnp.isnan(entry_sum) & jnp.isinf(entry_sum)


def after(values: _Values, arrays: Iterable[Array]) -> _Values:
    """Returns the values unchanged, but nothing that uses them is computed before the arrays are."""
    is_never = never(arrays)
    return jax.tree.map(lambda value: jnp.where(is_never, jnp.zeros_like(value), value), values)


def sum_of_halves(x: Array) -> Array:
    """Returns the sums over the last dim, which becomes 1: its two halves are added until one entry is left.

    The order of XLA's own reductions on CPUs depends on the other dims, so that a row's sum would depend on its batch.
    """
    while (width := x.shape[-1]) > 1:
        half_len, is_odd = divmod(width, 2)
        half_sums = x[..., :half_len] + x[..., half_len : 2 * half_len]
        x = jnp.concatenate([half_sums, x[..., 2 * half_len :]], axis=-1) if is_odd else half_sums
    return x


def zeros_after(shape: tuple[int, ...], dtype: DTypeLike, array: Array) -> Array:
    """Returns zeros allocated once the array exists: constant zeros are allocated early and kept through all layers."""
    return jnp.full(shape, never([array]), dtype)
