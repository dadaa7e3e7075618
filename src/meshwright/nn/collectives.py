"""The derived collectives as JAX calls inside `shard_map`, and which entries of a dim a device has."""

from dataclasses import dataclass

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
        size = value.shape[dim] // lax.axis_size(axes)
        return lax.dynamic_slice_in_dim(value, lax.axis_index(axes) * size, size, axis=dim)
    raise AssertionError(f"{step.op} is not a collective")


def own_entries(
    numbers: jax.Array, first: jax.Array | int, size: int, *, elsewhere: int = 0
) -> tuple[jax.Array, jax.Array]:
    """Numbers of entries of a dim counted from the first that a device has, ``elsewhere`` for those that it has not;
    and which it has."""
    local = numbers - first
    inside = (local >= 0) & (local < size)
    return jnp.where(inside, local, elsewhere), inside


def first_index(axes: tuple[str, ...], block_size: int) -> jax.Array | int:
    """Index in the whole dim of this device's first entry, for a dim split over ``axes``."""
    return lax.axis_index(axes) * block_size if axes else 0


@dataclass(frozen=True, kw_only=True)
class Ring:
    """The devices of mesh ``axes``, major to minor, as a ring round which blocks go.

    ``divergent`` says that other devices may not get here at the same time, as in a branch or a pipeline's tick. On
    CPU devices emulated in one process a permute then waits for, and is paired with, whichever permute comes by, and
    gives wrong numbers without a word; there an all-to-all, which names its group, carries the block.
    """

    axes: tuple[str, ...]
    divergent: bool = False

    @property
    def size(self) -> int:
        """Devices in it."""
        return int(lax.axis_size(self.axes))

    @property
    def rank(self) -> jax.Array:
        """This device's place."""
        return lax.axis_index(self.axes)

    def shift(self, value: jax.Array, by: int) -> jax.Array:
        """The block of the device ``by`` places before this one."""
        size = self.size
        if by % size == 0:
            return value
        if self.divergent and default_platform() == "cpu" and jax.local_device_count() > 1:
            return self._exchanged(value, by)
        return lax.ppermute(value, self.axes, [(source, (source + by) % size) for source in range(size)])

    def _exchanged(self, value: jax.Array, by: int) -> jax.Array:
        outgoing = jnp.zeros((self.size, *value.shape), value.dtype)
        outgoing = lax.dynamic_update_index_in_dim(outgoing, value, (self.rank + by) % self.size, 0)
        incoming = lax.all_to_all(outgoing, self.axes, split_axis=0, concat_axis=0, tiled=True)
        return lax.dynamic_index_in_dim(incoming, (self.rank - by) % self.size, 0, keepdims=False)
