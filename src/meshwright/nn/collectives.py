"""The derived collectives as JAX calls inside `shard_map`."""

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.algebra.steps import Step
from meshwright.nn.attention.platform import default_platform


def communicate(step: Step, value: jax.Array, *, leading: int = 0) -> jax.Array:
    """The result of a collective or slice step on this device's block; ``leading`` dims in front are carried along."""
    with jax.named_scope(str(step.label)):
        return _communicate(step, value, leading)


def _communicate(step: Step, value: jax.Array, leading: int) -> jax.Array:
    axes = step.axes
    dim = leading + (step.inputs[0].dims.index(step.dim) if step.dim else 0)
    if step.op == "all_gather":
        return lax.all_gather(value, axes, axis=dim, tiled=True)
    if step.op == "reduce_scatter":
        return lax.psum_scatter(value, axes, scatter_dimension=dim, tiled=True)
    if step.op == "all_reduce":
        if step.reduction == "max":
            return lax.pmax(lax.stop_gradient(value), axes)
        return lax.psum(value, axes)
    if step.op == "all_to_all":
        to_dim = leading + step.inputs[0].dims.index(step.to_dim)
        return lax.all_to_all(value, axes, split_axis=to_dim, concat_axis=dim, tiled=True)
    if step.op == "slice":
        size = value.shape[dim] // _axes_size(axes)
        return lax.dynamic_slice_in_dim(value, lax.axis_index(axes) * size, size, axis=dim)
    raise AssertionError(f"{step.op} is not a collective")


def _axes_size(axes: tuple[str, ...]) -> int:
    size = 1
    for axis in axes:
        size *= lax.axis_size(axis)
    return size


def first_index(axes: tuple[str, ...], block_size: int) -> jax.Array | int:
    """Index in the whole dim of this device's first entry, for a dim split over ``axes``."""
    return lax.axis_index(axes) * block_size if axes else 0


def shift(value: jax.Array, axes: tuple[str, ...], by: int, *, divergent: bool = False) -> jax.Array:
    """The block of the device ``by`` places before this one on the ring of the axes, major to minor.

    ``divergent`` says that other devices may not get here at the same time, as in a branch or a pipeline's tick. On
    CPU devices emulated in one process a permute then waits for, and is paired with, whichever permute comes by, and
    gives wrong numbers without a word; there an all-to-all, which names its group, carries the block.
    """
    size = _axes_size(axes)
    if by % size == 0:
        return value
    if divergent and _devices_are_emulated():
        return _shift_by_exchange(value, axes, by, size)
    return lax.ppermute(value, axes, [(source, (source + by) % size) for source in range(size)])


def _devices_are_emulated() -> bool:
    return default_platform() == "cpu" and jax.local_device_count() > 1


def _shift_by_exchange(value: jax.Array, axes: tuple[str, ...], by: int, size: int) -> jax.Array:
    rank = lax.axis_index(axes)
    outgoing = jnp.zeros((size, *value.shape), value.dtype)
    outgoing = lax.dynamic_update_index_in_dim(outgoing, value, (rank + by) % size, 0)
    incoming = lax.all_to_all(outgoing, axes, split_axis=0, concat_axis=0, tiled=True)
    return lax.dynamic_index_in_dim(incoming, (rank - by) % size, 0, keepdims=False)
