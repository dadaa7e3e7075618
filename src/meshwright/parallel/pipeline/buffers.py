"""Buffers of numbered slots: pytrees of arrays with the slots in front."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.parallel.pipeline.functions import Tree


def read(buffer: Tree, slot: jax.Array) -> Tree:
    """What is in a slot."""
    return jax.tree.map(lambda b: lax.dynamic_index_in_dim(b, slot, keepdims=False), buffer)


def write(buffer: Tree, slot: jax.Array, value: Tree) -> Tree:
    """The buffer with a value in a slot."""
    return jax.tree.map(lambda b, v: lax.dynamic_update_index_in_dim(b, v, slot, 0), buffer, value)


def write_if_named(buffer: Tree, slot: jax.Array, value: Tree) -> Tree:
    """The same where the slot may be idle: then slot 0 is written back as it is."""
    place = jnp.maximum(slot, 0)
    kept = read(buffer, place)
    return write(buffer, place, jax.tree.map(lambda new, old: jnp.where(slot >= 0, new, old), value, kept))


def buffer(slots: int, like: Tree) -> Tree:
    """Empty slots for values of some shape."""
    return jax.tree.map(lambda a: jnp.zeros((slots, *a.shape), a.dtype), like)


def zeros(like: Tree) -> Tree:
    """Zeros of some shape: what an idle pass leaves."""
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)


def add(total: Tree, part: Tree) -> Tree:
    """The sum, in the dtype of the total."""
    return jax.tree.map(lambda t, p: t + p.astype(t.dtype), total, part)


def add_named(total: dict[str, jax.Array], part: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The same for the names that a part has."""
    return {name: t + part[name].astype(t.dtype) if name in part else t for name, t in total.items()}


def part_of(array: jax.Array, number: Any, count: int) -> jax.Array:
    """One of ``count`` equal parts along the first dim."""
    size = array.shape[0] // count
    return lax.dynamic_slice_in_dim(array, number * size, size)
