"""Rounding to two bytes: to the nearest value, or to one of the two neighbours with the right odds."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_DROPPED = 16
"""Bits of a float32 that bfloat16 does not keep."""


def round_to(values: jax.Array, dtype: Any, *, key: jax.Array | None = None) -> jax.Array:
    """``values`` in another dtype: rounded to nearest, or at random where ``key`` is given and the dtype is bfloat16.

    The random result is the neighbour above with the probability that makes its mean the value itself, so that
    updates far below half a step of bfloat16 (2^-9 of the weight) are kept on average; to nearest they are lost.
    The bits depend on the key and on the place in the whole array, not on how it is split over devices.
    """
    if key is None or dtype != jnp.bfloat16 or values.dtype != jnp.float32:
        return values.astype(dtype)
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    # Adding uniform low bits carries into the kept ones with exactly the odds of the share that is cut off.
    carried = bits + jax.random.bits(key, values.shape, jnp.uint16).astype(jnp.uint32)
    kept = lax.bitcast_convert_type((carried >> _DROPPED).astype(jnp.uint16), jnp.bfloat16)
    # The carry would turn some NaNs into numbers.
    return jnp.where(jnp.isfinite(values), kept, values.astype(jnp.bfloat16))


def round_tree(tree: Any, like: Any, *, key: jax.Array | None = None) -> Any:
    """Every array of ``tree`` in the dtype of its partner in ``like``; each has its own random bits."""
    values, structure = jax.tree.flatten(tree)
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(like)]
    keys = [None if key is None else jax.random.fold_in(key, index) for index in range(len(values))]
    rounded = [round_to(v, d, key=k) for v, d, k in zip(values, dtypes, keys, strict=True)]
    return jax.tree.unflatten(structure, rounded)
