"""Copies a process's arrays to host memory, to send them between islands, and back to its devices.

An array that this process has all shards of is copied whole, whatever its mesh; else each distinct shard that it has is
copied, in an order that is equal in all islands of one mesh.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from meshwright.parallel.held import Tree
from meshwright.train.outer.fragments import shard_key, shards_here

_Index = tuple[slice, ...]


def on_host(tree: Tree) -> list[np.ndarray]:
    """Returns copies of a tree's arrays, or shards, in host memory; on CPU they may share memory with the tree."""
    parts: list[jax.Array] = []
    for leaf in jax.tree.leaves(tree):
        parts += [leaf] if leaf.is_fully_addressable else [shard.data for shard in shards_here(leaf)]
    return [np.asarray(part) for part in parts]


def empty(shapes: Tree, shardings: Tree) -> list[np.ndarray]:
    """Returns uninitialised arrays of the shapes that `on_host` returns."""
    leaves = zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)
    return [
        np.empty([len(range(*part.indices(n))) for part, n in zip(index, shape.shape, strict=True)], shape.dtype)
        for shape, sharding in leaves
        for index in _indices(shape, sharding)
    ]


def on_devices(arrays: Sequence[np.ndarray], shapes: Tree, shardings: Tree) -> Any:
    """Returns the tree of arrays on devices whose parts, in the order of `on_host`, are ``arrays``; casts dtypes."""
    left = iter(arrays)
    return jax.tree.map(lambda shape, sharding: _placed(left, shape, sharding), shapes, shardings)


def _placed(arrays: Iterator[np.ndarray], shape: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.Array:
    if sharding.is_fully_addressable:
        return jax.device_put(next(arrays).astype(shape.dtype), sharding)
    value_at = {shard_key(index): next(arrays) for index in _indices(shape, sharding)}
    index_of = sharding.addressable_devices_indices_map(shape.shape)
    kind = sharding.memory_kind
    shards = [
        jax.device_put(
            value_at[shard_key(index)].astype(shape.dtype), jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
        )
        for device, index in index_of.items()
        if index is not None
    ]
    return jax.make_array_from_single_device_arrays(shape.shape, sharding, shards)


def _indices(shape: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> list[_Index]:
    if sharding.is_fully_addressable:
        return [(slice(None),) * len(shape.shape)]
    indices = sharding.addressable_devices_indices_map(shape.shape).values()
    index_by_key = {shard_key(index): index for index in indices if index is not None}
    return [index for _, index in sorted(index_by_key.items())]
