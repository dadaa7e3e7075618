"""Rounding to two bytes: to the nearest value, or stochastically to one of the two neighbours."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

_DROPPED = 16
"""Bits of a float32 that bfloat16 does not keep."""

_SIGN, _INFINITY, _QUIET = 0x80000000, 0x7F800000, 0x00400000
"""Bits of a float32: its sign, an infinity, and the bit of a quiet NaN."""


def round_to(values: Array, dtype: Any, *, words: Array | None = None) -> Array:
    """Casts ``values``: rounds to nearest, or stochastically where ``words`` are given and the dtype is bfloat16.

    The probability of the upper neighbour makes the mean equal to the value, so that updates far below half a step of
    bfloat16 (2^-9 of the weight) survive on average; rounded to nearest they are lost. ``words`` are two random
    numbers (uint32): the bits depend on them and on the index in the global array, not on its sharding.
    """
    if words is None or dtype != jnp.bfloat16 or values.dtype != jnp.float32:
        return values.astype(dtype)
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    magnitude = bits & jnp.uint32(_SIGN - 1)
    # Adding uniform low bits carries into the kept bits with the probability of the dropped share. NaNs and infinities
    # must not carry, and a NaN with low bits only would become an infinity. All of this is on integers: with `isfinite`
    # of the values, XLA's CPU compiler takes minutes for the update that computes them.
    uncarried_bits = bits | jnp.where(magnitude > _INFINITY, jnp.uint32(_QUIET), jnp.uint32(0))
    carried_bits = jnp.where(magnitude < _INFINITY, bits + random_bits(values.shape, words), uncarried_bits)
    return lax.bitcast_convert_type((carried_bits >> _DROPPED).astype(jnp.uint16), jnp.bfloat16)


def round_tree(tree: Any, like: Any, *, key: Array | None = None) -> Any:
    """Casts arrays of ``tree`` to the dtypes in ``like``; with ``key`` stochastically, each by different bits."""
    values, structure = jax.tree.flatten(tree)
    word_pairs = [None] * len(values) if key is None else list(jax.random.bits(key, (len(values), 2), jnp.uint32))
    partners = zip(values, jax.tree.leaves(like), word_pairs, strict=True)
    return jax.tree.unflatten(structure, [round_to(value, leaf.dtype, words=word) for value, leaf, word in partners])


def random_bits(shape: tuple[int, ...], words: Array) -> Array:
    """Returns `_DROPPED` random bits (uint32) for each element of an array: a hash of its index and the two words.

    JAX's own generator takes several times as long on a CPU; rounding only needs fair and uncorrelated bits.
    Elements whose indices are 2^32 apart have the same bits.
    """
    flat_index, stride = jnp.zeros(shape, jnp.uint32), 1
    for dim in reversed(range(len(shape))):
        flat_index += lax.broadcasted_iota(jnp.uint32, shape, dim) * jnp.uint32(stride)
        stride = stride * shape[dim] % 2**32
    return _mixed(_mixed(flat_index + words[0]) ^ words[1]) >> (32 - _DROPPED)


def _mixed(h: Array) -> Array:
    """Mixes every input bit into all output bits. Source: Wellons, Prospecting for Hash Functions (2018)."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x7FEB352D)
    h = (h ^ (h >> 15)) * jnp.uint32(0x846CA68B)
    return h ^ (h >> 16)
