"""Runs derived collectives inside `shard_map`, and computes which entries of a dim a device has."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array

from meshwright.algebra.rewrites.torus import Legs, crossed_legs
from meshwright.algebra.sizes import LANES
from meshwright.algebra.steps import Step
from meshwright.nn.attention.platform import default_platform

ROWS = 8
"""Rows of a TPU tile (its second innermost dim)."""


MOST_PADDED = 7 / 6
"""Largest growth, as padded over plain elements, up to which padding to tiles keeps a shard's dims."""

PADDED_BYTES = 2**28
"""Bytes from which arrays are padded to whole tiles. libtpu 0.0.42 scatters smaller ones unpadded (115 MB), and
compiles larger unpadded ones as an all-reduce of the whole array (1.16 and 1.41 GB, 2026-11-25)."""


def communicate(step: Step, value: Array, *, leading: int = 0) -> Array:
    """Runs a collective or slice step on a device's block, which has ``leading`` extra dims before the step's."""
    axes = step.axes
    dim_index = leading + (step.inputs[0].dims.index(step.dim) if step.dim else 0)
    with jax.named_scope(str(step.label)):
        if step.op == "all_gather":
            full_bytes = value.nbytes * lax.axis_size(axes)
            if crossed_legs(step, full_bytes):
                return _gather_leg_by_leg(value, step.details.of(step.op, full_bytes), axes=axes, dim=dim_index)
            return lax.all_gather(value, axes, axis=dim_index, tiled=True)
        if step.op == "reduce_scatter":
            return scatter_sum(step, value, dim=dim_index)
        if step.op == "all_reduce":
            if step.reduction == "max":
                return lax.pmax(lax.stop_gradient(value), axes)
            return lax.psum(value, axes)
        if step.op == "all_to_all":
            to_dim_index = leading + step.inputs[0].dims.index(step.to_dim)
            return lax.all_to_all(value, axes, split_axis=to_dim_index, concat_axis=dim_index, tiled=True)
        if step.op == "slice":
            block_len = value.shape[dim_index] // lax.axis_size(axes)
            return lax.dynamic_slice_in_dim(value, lax.axis_index(axes) * block_len, block_len, axis=dim_index)
    raise AssertionError(f"{step.op} is not a collective")


def scatter_sum(step: Step, value: Array, *, dim: int) -> Array:
    """Returns this device's shard, along ``dim``, of the sum over the axes of a reduce-scatter step."""
    if step.details is not None:
        return _scatter_leg_by_leg(value, step.details.of(step.op, value.nbytes), axes=step.axes, dim=dim)
    return lax.psum_scatter(value, step.axes, scatter_dimension=dim, tiled=True)


def _scatter_leg_by_leg(value: Array, legs: Legs, *, axes: tuple[str, ...], dim: int) -> Array:
    """Returns the shard that one tiled reduce-scatter over the whole group would give.

    The dim is split into the legs, which become the outermost dims in memory, and shards become whole tiles. In any
    other layout libtpu pads the reduce-scatter, or replaces it by an all-reduce of the whole array: where shards end
    within a tile, and where the array's producer has another outermost dim (v5e:8x8 and v5p:16x16x16, 2026-11-24;
    v4p:4x8x8 and tpu7x:4x4x8, libtpu 0.0.42, 2026-11-25).
    """
    split_shape = (*value.shape[:dim], *legs.parts, value.shape[dim] // math.prod(legs.parts), *value.shape[dim + 1 :])
    value = jnp.moveaxis(value.reshape(split_shape), [dim + index for index in legs.places], range(len(legs.parts)))
    shard_shape = value.shape[len(legs.parts) :]
    # a dim that fills the lanes, where the last one does not
    fill_ratios = [_added(size, LANES) for size in shard_shape]
    lanes_dim = -1 if fill_ratios[-1] <= MOST_PADDED else fill_ratios.index(min(fill_ratios)) - len(shard_shape)
    value = jnp.moveaxis(value, lanes_dim, -1)
    moved_shape = value.shape[len(legs.parts) :]
    value = value.reshape(*legs.sizes, *moved_shape)
    tile_shape, fill_shape, is_in_rows = _in_tiles(moved_shape, value.nbytes)
    value = value.reshape(*legs.sizes, *tile_shape)
    padding = [(0, size - dim_size) for dim_size, size in zip(tile_shape, fill_shape, strict=True)]
    value = jnp.pad(value, [(0, 0)] * len(legs.sizes) + padding)
    if is_in_rows:
        value = value.reshape(*legs.sizes, -1, LANES)
    value = with_layout_constraint(value, Layout(major_to_minor=tuple(range(value.ndim))))
    for groups in legs.groups:
        value = lax.psum_scatter(value, axes, axis_index_groups=groups)
    if fill_shape != moved_shape:
        # libtpu 0.0.42 removes the padding, and fails, if it sees that padding is added and removed at once
        value = lax.optimization_barrier(value)
    return jnp.moveaxis(value.reshape(fill_shape)[tuple(map(slice, tile_shape))].reshape(moved_shape), -1, lanes_dim)


def _in_tiles(shard: tuple[int, ...], num_bytes: int) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    """Returns how a shard of an array of ``num_bytes`` fills TPU tiles: its dims, the padded dims, and whether it is
    sent as rows of `LANES`.

    If padding its last two dims grows it by at most `MOST_PADDED`, it is padded there if the array has `PADDED_BYTES`,
    else not at all. Otherwise it is sent as rows of `LANES`, with its last dim padded, or flattened to one dim.
    """
    tile_size, num_entries = ROWS * LANES, math.prod(shard)
    tiled_shape = (*shard[:-2], *map(_tiled, shard[-2:], (ROWS, LANES)[-len(shard) :]))
    if default_platform() != "tpu":
        return shard, shard, False
    if math.prod(tiled_shape) <= MOST_PADDED * num_entries:
        return shard, tiled_shape if num_bytes >= PADDED_BYTES else shard, False
    num_columns = _tiled(shard[-1], tile_size // math.gcd(num_entries // shard[-1], tile_size))
    if num_columns <= MOST_PADDED * shard[-1]:
        return shard, (*shard[:-1], num_columns), True
    return (num_entries,), (_tiled(num_entries, tile_size),), True


def _tiled(size: int, tile: int) -> int:
    return -(-size // tile) * tile


def as_stored(value: Array) -> Array:
    """Returns a value in the layout in which arrays are stored, so that loops over stacked layers need no copy in
    another layout.

    Dims are in order, but on TPUs the two dims that need the least padding to whole tiles become the innermost.
    """
    dim_order = list(range(value.ndim))
    if default_platform() == "tpu" and value.ndim > 1:
        pairs = [(row, lane) for lane in reversed(dim_order) for row in reversed(dim_order) if row != lane]
        inner = min(pairs, key=lambda dims: _added(value.shape[dims[0]], ROWS) * _added(value.shape[dims[1]], LANES))
        dim_order = [*(dim for dim in dim_order if dim not in inner), *inner]
    return with_layout_constraint(value, Layout(major_to_minor=tuple(dim_order)))


def _added(size: int, tile: int) -> float:
    """Returns padded over plain size of a dim; tiles have fewer rows for dims of 1, 2 or 4."""
    return _tiled(size, min(tile, 1 << (size - 1).bit_length()) if tile == ROWS else tile) / size


def _gather_leg_by_leg(value: Array, legs: Legs, *, axes: tuple[str, ...], dim: int) -> Array:
    """Returns the array that one tiled all-gather over the whole group would give."""
    full_shape = (*value.shape[:dim], value.shape[dim] * math.prod(legs.parts), *value.shape[dim + 1 :])
    for groups in reversed(legs.groups):
        value = lax.all_gather(value, axes, axis_index_groups=groups)
    leg_sizes = [legs.parts[index] for index in legs.places]
    value = value.reshape(*leg_sizes, *value.shape[len(legs.order) :])
    return jnp.moveaxis(value, range(len(leg_sizes)), [dim + index for index in legs.places]).reshape(full_shape)


def own_entries(numbers: Array, first: Array | int, size: int, *, elsewhere: int = 0) -> tuple[Array, Array]:
    """Returns indices of a dim relative to the device's first entry ``first``, and which of them are on the device.

    Indices that are not on the device become ``elsewhere``.
    """
    local_index = numbers - first
    is_own = (local_index >= 0) & (local_index < size)
    return jnp.where(is_own, local_index, elsewhere), is_own


def first_index(axes: tuple[str, ...], block_size: int) -> Array | int:
    """Returns the global index of this device's first entry of a dim that is split over ``axes``."""
    return lax.axis_index(axes) * block_size if axes else 0


@dataclass(frozen=True, kw_only=True)
class Ring:
    """The devices along mesh ``axes``, major to minor, as a ring.

    ``divergent`` says that other devices may run another branch, as in a pipeline's tick. On CPU devices emulated in
    one process a permute would then be paired with any other permute, and silently give wrong numbers; there an
    all-to-all, which names its group, replaces it.
    """

    axes: tuple[str, ...]
    divergent: bool = False

    @property
    def size(self) -> int:
        """Number of devices."""
        return int(lax.axis_size(self.axes))

    @property
    def rank(self) -> Array:
        """This device's index in the ring."""
        return lax.axis_index(self.axes)

    def shift(self, value: Array, by: int) -> Array:
        """Returns the block of the device whose rank is ``by`` lower, around the ring."""
        size = self.size
        if by % size == 0:
            return value
        if not (self.divergent and default_platform() == "cpu" and jax.local_device_count() > 1):
            return lax.ppermute(value, self.axes, [(sender, (sender + by) % size) for sender in range(size)])
        outgoing = jnp.zeros((size, *value.shape), value.dtype)
        outgoing = lax.dynamic_update_index_in_dim(outgoing, value, (self.rank + by) % size, 0)
        incoming = lax.all_to_all(outgoing, self.axes, split_axis=0, concat_axis=0, tiled=True)
        return lax.dynamic_index_in_dim(incoming, (self.rank - by) % size, 0, keepdims=False)
