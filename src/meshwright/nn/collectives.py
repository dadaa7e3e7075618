"""The derived collectives as JAX calls inside `shard_map`."""

import jax
from jax import lax

from meshwright.algebra.steps import Step


def communicate(step: Step, value: jax.Array, *, leading: int = 0) -> jax.Array:
    """The result of a collective or slice step on this device's block; ``leading`` dims in front are carried along."""
    axes = step.axes
    dim = leading + (step.inputs[0].dims.index(step.dim) if step.dim else 0)
    if step.op == "all_gather":
        return lax.all_gather(value, axes, axis=dim, tiled=True)
    if step.op == "reduce_scatter":
        return lax.psum_scatter(value, axes, scatter_dimension=dim, tiled=True)
    if step.op == "all_reduce":
        if dict(step.attributes).get("reduce") == "max":
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
