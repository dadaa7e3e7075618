"""Exchanges packed rows between the devices of experts: ragged all-to-alls, in as many rounds as the fullest device
needs.

A device's own rows are sorted by expert, and the experts of one device are consecutive. A device receives rows sorted
by its own experts, into room for `ROOM` times the mean number of rows per device. Rows beyond the room are sent in
further rounds with room for `FURTHER_ROOM` times the mean. The rows to a device are ordered by sending device and then
by their position there, and each round takes the next ones. No row is dropped, and all devices compute the rounds from
the same counts."""

from dataclasses import replace

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from meshwright.algebra.steps import Step
from meshwright.nn.attention.platform import default_platform
from meshwright.nn.collectives import scatter_sum
from meshwright.nn.experts.slots import Delivery, Ragged, SlotRows
from meshwright.nn.order import zeros_after


def routed(slots: Ragged, axes: tuple[str, ...], *, together: tuple[str, ...]) -> Ragged:
    """Returns a device's own rows with the first round of their exchange over the mesh ``axes``; all devices along the
    axes ``together`` run equally many rounds."""
    counts = lax.all_gather(slots.sizes[0], axes)
    most_rows = lax.pmax(jnp.max(jnp.sum(counts.reshape(len(counts), len(counts), -1), axis=(0, 2))), together)
    zero = jnp.zeros((), jnp.int32)
    return replace(slots, route=Delivery(counts, zero, most_rows.astype(jnp.int32), slots.rows.shape[0]))


def in_further_round(value: Array | Ragged, taken: Array) -> Array | Ragged:
    """Returns the value; for packed rows with a route, sets the round after ``taken`` rows received per device."""
    if not isinstance(value, Ragged) or not value.route:
        return value
    return replace(value, route=replace(value.route, taken=taken, further=True))


def move_packed(step: Step, slots: Ragged) -> Ragged:
    """Runs one of the collectives that `algebra.ops.dispatch.moves_of_slots` returns, on packed tokens."""
    if step.op == "all_to_all":
        return to_experts(slots, step.axes) if step.to_dim == "E" else to_owners(slots, step.axes)
    if step.op == "all_reduce":
        return slots.with_rows(lax.psum(slots.rows, step.axes))
    if step.op == "all_gather":
        rows, rows_per_expert = (lax.all_gather(array, step.axes, tiled=True) for array in (slots.rows, slots.sizes))
        return replace(slots, rows=rows, sizes=rows_per_expert)
    num_pieces = slots.sizes.shape[0] // lax.axis_size(step.axes)
    rows_per_expert = lax.dynamic_slice_in_dim(slots.sizes, lax.axis_index(step.axes) * num_pieces, num_pieces)
    return replace(slots, rows=scatter_sum(step, slots.rows, dim=0), sizes=rows_per_expert)


def to_experts(slots: Ragged, axes: tuple[str, ...]) -> Ragged:
    """Sends a device's own rows to their experts' devices along ``axes``, and returns the received rows."""
    route, me = slots.route, lax.axis_index(axes)
    assert route is not None
    own_first, expert_first, num_rows = route.places()
    own_counts = _of_device(num_rows, me)
    rows = _sent(slots.rows, (own_first[me], num_rows[me], expert_first[me], own_counts.reshape(-1)), route.room, axes)
    return Ragged(rows, jnp.sum(own_counts, axis=0, dtype=jnp.int32)[None], route)


def to_owners(slots: Ragged, axes: tuple[str, ...]) -> Ragged:
    """Sends the rows of a device's experts back along ``axes``; returns its own rows, zero if of another round."""
    route, me = slots.route, lax.axis_index(axes)
    assert route is not None
    own_first, expert_first, num_rows = route.places()
    owner_offsets, offsets, sizes = (_of_device(array, me).reshape(-1) for array in (own_first, expert_first, num_rows))
    rows = _sent(slots.rows, (offsets, sizes, owner_offsets, num_rows[me]), route.num_own, axes)
    return Ragged(rows, lax.dynamic_slice_in_dim(route.counts, me, 1), route)


def _of_device(array: Int[Array, "n E"], device: Array) -> Int[Array, "n e"]:
    """Returns the columns of the experts on a device."""
    num_own_experts = array.shape[1] // array.shape[0]
    return lax.dynamic_slice_in_dim(array, device * num_own_experts, num_own_experts, axis=1)


def _sent(rows: SlotRows, slices: tuple[Array, ...], num_received: int, axes: tuple[str, ...]) -> SlotRows:
    """Runs `jax.lax.ragged_all_to_all`; ``slices`` are its send offsets, send sizes, receive offsets and receive sizes.
    Returns the received rows. CPUs lack it: there every device gathers all rows and selects its own."""
    out_rows = zeros_after((num_received, *rows.shape[1:]), rows.dtype, rows)
    send_offsets, sizes, recv_offsets, recv_sizes = (array.astype(jnp.int32) for array in slices)
    if default_platform() != "cpu":
        return lax.ragged_all_to_all(rows, out_rows, send_offsets, sizes, recv_offsets, recv_sizes, axis_name=axes)
    all_rows = lax.all_gather(rows, axes, tiled=True)
    num_devices, rank = lax.axis_size(axes), lax.axis_index(axes)

    def sent_here(array: Array) -> Array:
        by_device = lax.all_gather(array, axes).reshape(num_devices, num_devices, -1)
        return lax.dynamic_index_in_dim(by_device, rank, 1, keepdims=False)

    first = jnp.arange(num_devices, dtype=jnp.int32)[:, None] * rows.shape[0] + sent_here(send_offsets)
    first, recv_start, num_rows = (array.reshape(-1) for array in (first, sent_here(recv_offsets), sent_here(sizes)))
    row_offset = jnp.arange(out_rows.shape[0], dtype=jnp.int32)[:, None] - recv_start[None]
    is_inside = (row_offset >= 0) & (row_offset < num_rows[None])
    source_rows = jnp.sum(jnp.where(is_inside, first[None] + row_offset, 0), axis=1)
    is_received = jnp.any(is_inside, axis=1).reshape(-1, *(1 for _ in rows.shape[1:]))
    return jnp.where(is_received, all_rows[source_rows], out_rows)
