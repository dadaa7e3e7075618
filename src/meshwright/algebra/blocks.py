"""NumPy reference: the block of a sharded array that each device of a mesh has, and steps executed on these blocks.

Devices are numbered in row-major order over the mesh's axes, in the order given, major to minor. Faster executions of
derived steps are checked against this one.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from meshwright.algebra.notation import ShardedArray, check, product
from meshwright.algebra.steps import Step

Mesh = Mapping[str, int]
BlockSet = Sequence[np.ndarray]
"""One block per device, in the order of device numbers."""


def local_shape(array: ShardedArray, dims: Mapping[str, int], mesh: Mesh) -> tuple[int, ...]:
    """Returns the shape of the block that one device holds. Raises InputError if a split is uneven."""
    check(array, dims, mesh)
    return tuple(dims[d] // product(mesh[a] for a in axes) for d, axes in zip(array.dims, array.axes, strict=True))


def bytes_per_device(array: ShardedArray, dims: Mapping[str, int], mesh: Mesh, *, element_bytes: float) -> float:
    """Returns bytes of the block that one device holds."""
    return element_bytes * math.prod(local_shape(array, dims, mesh))


def bytes_total(array: ShardedArray, dims: Mapping[str, int], mesh: Mesh, *, element_bytes: float) -> float:
    """Returns bytes over all devices of the mesh, copies counted (How to Scale Your Model, section 3.1)."""
    return bytes_per_device(array, dims, mesh, element_bytes=element_bytes) * math.prod(mesh.values())


def num_devices(mesh: Mesh) -> int:
    """Returns the number of devices of the mesh."""
    return int(product(mesh.values()))


def coordinates(mesh: Mesh, device: int) -> dict[str, int]:
    """Returns the index of a device along each axis."""
    return dict(zip(mesh, map(int, np.unravel_index(device, tuple(mesh.values()))), strict=True))


def _position(axes: Iterable[str], mesh: Mesh, device: int) -> int:
    """Returns the number of a device along several axes, major to minor."""
    position_of, position = coordinates(mesh, device), 0
    for axis in axes:
        position = position * mesh[axis] + position_of[axis]
    return position


def block_of(array: ShardedArray, mesh: Mesh, device: int) -> tuple[int, ...]:
    """Returns the block of the array that a device holds: its index along each dim, counted in blocks."""
    return tuple(_position(axes, mesh, device) for axes in array.axes)


def holders(array: ShardedArray, mesh: Mesh) -> dict[tuple[int, ...], list[int]]:
    """Maps the index of each block to the devices that hold the block (of an unreduced array: an addend of it)."""
    devices_by_block: dict[tuple[int, ...], list[int]] = {}
    for device in range(num_devices(mesh)):
        devices_by_block.setdefault(block_of(array, mesh, device), []).append(device)
    return dict(sorted(devices_by_block.items()))


def groups(mesh: Mesh, axes: tuple[str, ...]) -> list[list[int]]:
    """Returns groups of devices that differ only along ``axes``, each in the order of ``axes`` major to minor."""
    axis_order = [*(axis for axis in mesh if axis not in axes), *axes]
    devices = np.arange(num_devices(mesh)).reshape(tuple(mesh.values()))
    devices_by_group = devices.transpose([list(mesh).index(axis) for axis in axis_order])
    return [list(map(int, group)) for group in devices_by_group.reshape(-1, product(mesh[axis] for axis in axes))]


def _region(index: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(position * size, (position + 1) * size) for position, size in zip(index, shape, strict=True))


def split(value: np.ndarray, array: ShardedArray, mesh: Mesh) -> list[np.ndarray]:
    """Returns the block of each device. Raises InputError when a dim does not divide.

    Addends of an unreduced array are its block times integers that differ from device to device and sum to 1, so that a
    missing or repeated reduction shows, and integers stay exact.
    """
    block_shape = local_shape(array, dict(zip(array.dims, value.shape, strict=True)), mesh)
    other_factors = range(2, product(mesh[a] for a in array.unreduced) + 1)
    factors = [1 - sum(other_factors), *other_factors]
    blocks = []
    for device in range(num_devices(mesh)):
        block = value[_region(block_of(array, mesh, device), block_shape)]
        blocks.append(block * factors[_position(array.unreduced, mesh, device)] if array.unreduced else block)
    return blocks


def join(blocks: BlockSet, array: ShardedArray, mesh: Mesh, *, rel_tol: float = 0.0) -> np.ndarray:
    """Returns the whole array, with the addends of an unreduced one summed.

    Raises AssertionError when two devices that should hold the same block differ by more than ``rel_tol``
    of its largest element: the steps or their execution are wrong then, not the user's input.
    """
    shards_by_dim = [product(mesh[a] for a in axes) for axes in array.axes]
    whole_shape = tuple(size * shards for size, shards in zip(blocks[0].shape, shards_by_dim, strict=True))
    addends = np.zeros((product(mesh[a] for a in array.unreduced), *whole_shape), blocks[0].dtype)
    first_holder_of: dict[tuple[int, tuple[int, ...]], int] = {}
    for device in range(num_devices(mesh)):
        addend_and_block = (_position(array.unreduced, mesh, device), block_of(array, mesh, device))
        holder = first_holder_of.setdefault(addend_and_block, device)
        if holder == device:
            addends[_region((addend_and_block[0], *addend_and_block[1]), (1, *blocks[device].shape))] = blocks[device]
        elif np.any(np.abs(blocks[holder] - blocks[device]) > rel_tol * np.abs(blocks[holder]).max(initial=0)):
            raise AssertionError(f"devices {holder} and {device} differ in block {addend_and_block[1]} of {array}")
    return np.sum(addends, axis=0, dtype=addends.dtype)


def execute(
    steps: Iterable[Step], values: Mapping[ShardedArray, BlockSet], mesh: Mesh
) -> dict[ShardedArray, Sequence[np.ndarray]]:
    """Returns the blocks of every array after the steps, starting from ``values``.

    Runs collectives, slices, and the local ops "einsum", "add" and "copy"; an AssertionError names any other op.
    """
    blocks_of = dict(values)
    for step in steps:
        missing_names = [str(a) for a in step.inputs if a not in blocks_of]
        if missing_names:
            raise AssertionError(f"{step}: nothing has made {', '.join(missing_names)}")
        inputs = [blocks_of[a] for a in step.inputs]
        if step.only_moves:
            blocks = _exchange(step, inputs[0], mesh)
        elif step.op in _LOCAL:
            blocks = [_LOCAL[step.op](step, [parts[device] for parts in inputs]) for device in range(num_devices(mesh))]
        else:
            raise AssertionError(f"{step.op} is not executed on NumPy blocks")
        if step.accumulates:
            blocks = [old_block + block for old_block, block in zip(blocks_of[step.result], blocks, strict=True)]
        blocks_of[step.result] = blocks
    return blocks_of


def _einsum(step: Step, blocks: list[np.ndarray]) -> np.ndarray:
    label_of = {d: n for n, d in enumerate(dict.fromkeys(d for a in step.inputs for d in a.dims))}
    labels: list[Any] = [[label_of[d] for d in array.dims] for array in (*step.inputs, step.result)]
    operands = [part for pair in zip(blocks, labels[:-1], strict=True) for part in pair]
    # The search for a contraction order brings in BLAS, and costs more than a small product.
    return np.asarray(np.einsum(*operands, labels[-1], optimize=max(b.size for b in blocks) > 4096))


_LOCAL: dict[str, Callable[[Step, list[np.ndarray]], np.ndarray]] = {
    "einsum": _einsum,
    "add": lambda step, blocks: sum(blocks[1:], start=blocks[0]),
    "copy": lambda step, blocks: blocks[0],
}


def _exchange(step: Step, blocks: BlockSet, mesh: Mesh) -> list[np.ndarray]:
    """Runs a collective or slice in each group of devices; returns results in the order of device numbers."""
    results: list[np.ndarray] = list(blocks)
    for group in groups(mesh, step.axes):
        for device, result in zip(group, _exchange_in_group(step, [blocks[d] for d in group]), strict=True):
            results[device] = result
    return results


def _exchange_in_group(step: Step, blocks: list[np.ndarray]) -> list[np.ndarray]:
    group_size, dims = len(blocks), step.result.dims
    dim_id = dims.index(step.dim) if step.dim else 0
    if step.op == "all_gather":
        return [np.concatenate(blocks, dim_id)] * group_size
    if step.op == "slice":
        return [np.split(block, group_size, dim_id)[n] for n, block in enumerate(blocks)]
    if step.op == "all_to_all":
        pieces_by_device = [np.split(block, group_size, dims.index(step.to_dim)) for block in blocks]
        return [np.concatenate([pieces[n] for pieces in pieces_by_device], dim_id) for n in range(group_size)]
    is_max = step.reduction == "max"
    reduced_block = np.stack(blocks).max(axis=0) if is_max else sum(blocks[1:], start=blocks[0])
    return np.split(reduced_block, group_size, dim_id) if step.op == "reduce_scatter" else [reduced_block] * group_size
