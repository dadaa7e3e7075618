"""The arrays of this process in host memory, for what goes between islands, and back on its devices.

An array that this process has all of is whole, whatever its mesh; of others it has each different shard, in an order
that is the same in every island of one mesh.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from meshwright.parallel.held import Tree

_Index = tuple[slice, ...]


def on_host(tree: Tree) -> list[np.ndarray]:
    """Returns the arrays of a tree; on CPU they may share memory with it."""
    return [np.asarray(part) for leaf in jax.tree.leaves(tree) for part in _parts(leaf)]


def empty(shapes: Tree, shardings: Tree) -> list[np.ndarray]:
    """Returns arrays without values in the sizes of `on_host`."""
    leaves = zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)
    return [
        np.empty([len(range(*part.indices(n))) for part, n in zip(index, shape.shape, strict=True)], shape.dtype)
        for shape, sharding in leaves
        for index in _indices(shape, sharding)
    ]


def on_devices(arrays: Sequence[np.ndarray], shapes: Tree, shardings: Tree) -> Any:
    """Returns the tree of `shapes` whose shards `on_host` returned, in the dtypes of the shapes."""
    left = iter(arrays)
    return jax.tree.map(lambda shape, sharding: _placed(left, shape, sharding), shapes, shardings)


def _placed(arrays: Iterator[np.ndarray], shape: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.Array:
    if sharding.is_fully_addressable:
        return jax.device_put(next(arrays).astype(shape.dtype), sharding)
    value_at = {_key(index): next(arrays) for index in _indices(shape, sharding)}
    index_of = sharding.addressable_devices_indices_map(shape.shape)
    kind = sharding.memory_kind
    shards = [
        jax.device_put(
            value_at[_key(index)].astype(shape.dtype), jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
        )
        for device, index in index_of.items()
        if index is not None
    ]
    return jax.make_array_from_single_device_arrays(shape.shape, sharding, shards)


def _indices(shape: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> list[_Index]:
    if sharding.is_fully_addressable:
        return [(slice(None),) * len(shape.shape)]
    index_by_key = {_key(i): i for i in sharding.addressable_devices_indices_map(shape.shape).values() if i is not None}
    return [index for _, index in sorted(index_by_key.items())]


def _parts(array: jax.Array) -> Sequence[jax.Array]:
    if array.is_fully_addressable:
        return [array]
    return [data for _, data in sorted({_key(shard.index): shard.data for shard in array.addressable_shards}.items())]


def _key(index: _Index) -> tuple[int, ...]:
    return tuple(part.start or 0 for part in index)
