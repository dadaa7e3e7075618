"""One executor for every pipeline schedule: a scan over the ticks of its table, inside `shard_map`.

In a tick each device runs a forward (F), a backward (B) and a weight-gradient pass (W) if its row of the table names
them, then sends. Sends are outside of every branch: all devices take part in each send, and a message that no device
needs is dropped. Code that writes to a large buffer in only some ticks is in a loop of zero or one iteration
(`at_most_once`): XLA updates buffers of loops in place, but on GPUs copies buffers of branches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from meshwright.algebra.schedules import ticks
from meshwright.parallel.gradients import at_most_once, barrier
from meshwright.parallel.held import Tree

AXIS = "pipeline"
Stream = Tree
"""The activations that one virtual stage sends to the next, [B, T, D] per device and stack; or their cotangents."""


def as_it_is(value: Tree) -> Tree:
    """Returns its argument: the default of `StageFunctions` hooks."""
    return value


@dataclass(frozen=True, kw_only=True)
class StageFunctions:
    """The passes of a virtual stage as pure functions that run inside `shard_map`; static shapes, no permutes.

    ``layers`` are the weights of one virtual stage, ``ends`` the weights outside the layers, ``inputs`` belong to one
    microbatch. Gradients of ``ends`` are dicts by name of the weights that a function uses:

        embed(ends, inputs) -> stream                    embed_backward(ends, inputs, dx) -> gradients
        forward(layers, inputs, stream) -> stream, saved  backward(layers, inputs, saved, dy) -> dx, gradients
        head_forward(ends, inputs, stream) -> sums, saved head_backward(ends, inputs, saved) -> dy, gradients

    A B without a separate W runs ``backward``. A split B runs ``input_backward`` -> dx, handed, and its W runs
    ``weight_backward(layers, inputs, handed)`` -> gradients. The sums over the microbatch are a pytree with the loss.
    ``to_head`` extracts from the last stage's stream what the head reads. If devices of a group have equal streams,
    ``send`` takes a part and ``receive`` gathers it; ``send_back`` and ``receive_back`` do so for cotangents.
    """

    embed: Callable[..., Tree]
    embed_backward: Callable[..., Tree]
    forward: Callable[..., Tree]
    backward: Callable[..., Tree]
    input_backward: Callable[..., Tree]
    weight_backward: Callable[..., Tree]
    head_forward: Callable[..., Tree]
    head_backward: Callable[..., Tree]
    to_head: Callable[[Stream], Array] = as_it_is
    send: Callable[[Stream], Stream] = as_it_is
    receive: Callable[[Stream], Stream] = as_it_is
    send_back: Callable[[Stream], Stream] = as_it_is
    receive_back: Callable[[Stream], Stream] = as_it_is


class StageWeights(NamedTuple):
    """A device's weights or gradients: ``layers``, with layers as first dim, and ``ends``, outside the layers."""

    layers: Tree
    ends: dict[str, Array]


def run_schedule(
    tables: ticks.TickTables, stages: StageFunctions, weights: StageWeights, inputs: Tree
) -> tuple[Tree, StageWeights]:
    """Runs a schedule. Returns this device's sums over microbatches (with the loss), and its gradients in float32.

    With `forward_tables` it returns no gradients, and saves nothing for a backward pass. The first dim of ``inputs`` is
    the microbatches, of ``weights.layers`` this device's layers, chunk by chunk (see `stages.layer_rows`). Sums
    and gradients of ``ends`` are this device's part, zero if it runs neither embedding nor head: sum them over the
    pipeline once per step.
    """
    has_mirror = tables.schedule.weight_copies > 1
    if has_mirror:
        # microbatches enter at both ends: the layers of the mirror device follow the device's layers
        mirrored_layers = _mirror(tables, weights.layers)
        all_layers = jax.tree.map(lambda mine, theirs: jnp.concatenate([mine, theirs]), weights.layers, mirrored_layers)
        weights = weights._replace(layers=all_layers)
    executor = TickExecutor(tables, stages, weights, inputs)
    # This device's rows, [ticks, columns].
    column_leaves, structure = jax.tree.flatten(tables.columns)
    columns = jnp.asarray(np.stack(column_leaves, axis=-1))
    tick_rows = lax.dynamic_index_in_dim(columns, lax.axis_index(AXIS), axis=1, keepdims=False)

    def tick(state: TickState, row: Array) -> tuple[TickState, None]:
        return executor.tick(state, jax.tree.unflatten(structure, [row[i] for i in range(len(column_leaves))])), None

    state, _ = lax.scan(tick, executor.start(), tick_rows)
    if not has_mirror:  # else each layer is on two devices, and its weights are stored once
        return state.sums, state.grads
    my_grads, their_grads = (jax.tree.map(lambda a, n=half: part_of(a, n, 2), state.grads.layers) for half in (0, 1))
    return state.sums, state.grads._replace(layers=add(my_grads, _mirror(tables, their_grads)))


def _mirror(tables: ticks.TickTables, tree: Tree) -> Tree:
    last_device = tables.schedule.num_devices - 1
    return lax.ppermute(tree, AXIS, [(device, last_device - device) for device in range(last_device + 1)])


# -- one tick on one device -----------------------------------------------------------------------------


class TickState(NamedTuple):
    """The carry of the scan over ticks; the first dim of a buffer (``x`` to ``handed``) is its slots."""

    x: Tree
    dx: Tree
    head: Tree
    stash: Tree
    handed: Tree
    grads: StageWeights
    sums: Tree


class TickExecutor:
    """Runs the ticks of a schedule on one device."""

    def __init__(self, tables: ticks.TickTables, stages: StageFunctions, weights: StageWeights, inputs: Tree) -> None:
        self.tables, self.stages, self.weights, self.inputs = tables, stages, weights, inputs
        self.num_chunks = tables.schedule.num_chunks
        batch, stage_layers = jax.eval_shape(read, self.inputs, 0), jax.eval_shape(self._piece, weights.layers, 0)
        self.stream = jax.eval_shape(stages.embed, weights.ends, batch)
        y, self.saved = jax.eval_shape(stages.forward, stage_layers, batch, self.stream)
        assert str(y) == str(self.stream), f"a stage turns {self.stream} into {y}"
        self.head_stream = jax.eval_shape(stages.to_head, y)
        self.sums, head_saved = jax.eval_shape(stages.head_forward, weights.ends, batch, self.head_stream)
        self.sent = jax.eval_shape(stages.send, y)
        self.sent_back = jax.eval_shape(stages.send_back, y)
        self.handed: Tree = None
        self.grads = StageWeights({}, {})
        if not tables.has_backward:
            return
        if tables.has_split:
            _, self.handed = jax.eval_shape(stages.input_backward, stage_layers, batch, self.saved, self.stream)
            layer_grads = jax.eval_shape(stages.weight_backward, stage_layers, batch, self.handed)
        else:
            _, layer_grads = jax.eval_shape(stages.backward, stage_layers, batch, self.saved, self.stream)
        _, head_grads = jax.eval_shape(stages.head_backward, weights.ends, batch, head_saved)
        self.grads = StageWeights(
            layer_grads, head_grads | jax.eval_shape(stages.embed_backward, weights.ends, batch, self.stream)
        )

    def start(self) -> TickState:
        """Returns empty buffers and zero sums."""
        slots = self.tables.slots
        layer_grads = jax.tree.map(
            lambda a: jnp.zeros((self.num_chunks * a.shape[0], *a.shape[1:]), jnp.float32), self.grads.layers
        )
        return TickState(
            x=zeros(self.sent, max(slots.x, 1)),  # every tick rewrites a slot, if only with its old value
            dx=zeros(self.sent_back, max(slots.dx, 1)),
            head=zeros(self.head_stream, slots.head),
            stash=zeros(self.saved, slots.stash),
            handed=zeros(self.handed, slots.handed),
            grads=StageWeights(layer_grads, zeros(self.grads.ends, dtype=jnp.float32)),
            sums=zeros(self.sums),
        )

    def tick(self, state: TickState, row: ticks.Columns) -> TickState:
        """Runs F, B and W, each where the row names a microbatch, and exchanges the streams of all devices."""
        state, y = self._forward(state, row.forward)
        arriving_streams = self._exchange(y, self.tables.x_channels)
        if self.tables.has_backward:
            state, dx = self._backward(state, row.backward)
            state = self._weight(state, row.weight)
            returning_streams = self._exchange(dx, self.tables.dx_channels)
            for slot, stream in zip(row.dx_arrivals, returning_streams, strict=True):
                state = state._replace(dx=write_if_named(state.dx, slot, stream))
        for slot, stream in zip(row.x_arrivals, arriving_streams, strict=True):
            state = state._replace(x=write_if_named(state.x, slot, stream))
        return state

    def _exchange(self, stream: Stream, channels: Sequence[ticks.MessageChannel]) -> list[Stream]:
        return [lax.ppermute(stream, AXIS, channel.pairs) if channel.offset else stream for channel in channels]

    def _piece(self, weights: Tree, chunk: Array) -> Tree:
        """Returns the weights of this device's virtual stage number ``chunk``."""
        if self.num_chunks == 1:
            return weights
        return jax.tree.map(lambda a: part_of(a, chunk, self.num_chunks), weights)

    def _ends_and_inputs(self, microbatch: Array) -> tuple[dict[str, Array], Tree]:
        """Returns the weights outside the layers and a microbatch, tied by an optimization barrier.

        Otherwise XLA moves gathers of the weights out of the loop over ticks, and keeps whole weights for the step.
        """
        return lax.optimization_barrier((self.weights.ends, read(self.inputs, microbatch)))

    def _forward(self, state: TickState, row: ticks.ForwardColumns) -> tuple[TickState, Stream]:
        stages, (ends, inputs) = self.stages, self._ends_and_inputs(row.microbatch)
        x = lax.switch(
            # idle, from another stage, or from the embedding
            jnp.where(row.microbatch >= 0, 1 + (row.x_slot < 0), 0),
            (
                lambda: zeros(self.stream),
                lambda: stages.receive(read(state.x, row.x_slot)),
                lambda: stages.embed(ends, inputs),
            ),
        )

        def run(invariants: Tree, _: Stream, stash_buffer: Tree, head_buffer: Tree) -> tuple[Stream, Tree, Tree]:
            weights, inputs, x = invariants
            y, saved_arrays = stages.forward(self._piece(weights, row.chunk), inputs, x)
            if not self.tables.has_backward:
                return y, stash_buffer, head_buffer
            head_stream = write_if_named(head_buffer, row.head_slot, stages.to_head(y))
            return y, write(stash_buffer, row.stash_slot, saved_arrays), head_stream

        y, stash_buffer, head_buffer = at_most_once(
            row.microbatch >= 0, run, (self.weights.layers, inputs, x), zeros(self.stream), state.stash, state.head
        )
        sums = state.sums
        if not self.tables.has_backward:
            # Without a backward pass, the loss head runs in F of the last virtual stage.
            sums = lax.cond(
                row.is_last > 0,
                lambda total: add(total, stages.head_forward(ends, inputs, stages.to_head(y))[0]),
                as_it_is,
                sums,
            )
        return state._replace(stash=stash_buffer, head=head_buffer, sums=sums), stages.send(y)

    def _backward(self, state: TickState, row: ticks.BackwardColumns) -> tuple[TickState, Stream]:
        stages, (ends, inputs) = self.stages, self._ends_and_inputs(row.microbatch)
        state, dy = self._cotangent(state, row, ends, inputs)

        def operands(args: Tree) -> tuple[Tree, Tree, Tree, Stream]:
            weights, inputs, dy, stash_slot = args
            return self._piece(weights, row.chunk), inputs, read(state.stash, stash_slot), dy

        def whole(args: Tree, dx: Stream, grads: Tree) -> tuple[Stream, Tree]:
            dx, new_grads = stages.backward(*operands(args))
            return dx, self._added(grads, row.chunk, new_grads)

        def split(args: Tree, dx: Stream, handed_buffer: Tree) -> tuple[Stream, Tree]:
            dx, new_handed = stages.input_backward(*operands(args))
            return dx, write(handed_buffer, row.handed_slot, new_handed)

        def embed(args: Tree, grads: dict[str, Array]) -> tuple[dict[str, Array]]:
            return (add_named(grads, barrier(stages.embed_backward(*args))),)  # else libtpu hoists the sum and fails

        dx, layer_grads, handed_buffer = zeros(self.stream), state.grads.layers, state.handed
        is_split, invariants = row.handed_slot >= 0, (self.weights.layers, inputs, dy, row.stash_slot)
        if self.tables.has_whole:
            dx, layer_grads = at_most_once((row.microbatch >= 0) & ~is_split, whole, invariants, dx, layer_grads)
        if self.tables.has_split:
            dx, handed_buffer = at_most_once(is_split, split, invariants, dx, handed_buffer)
        (end_grads,) = at_most_once(row.is_first > 0, embed, (ends, inputs, dx), state.grads.ends)
        return state._replace(grads=StageWeights(layer_grads, end_grads), handed=handed_buffer), stages.send_back(dx)

    def _cotangent(
        self, state: TickState, row: ticks.BackwardColumns, ends: dict[str, Array], inputs: Tree
    ) -> tuple[TickState, Stream]:
        """Returns the cotangent of a stage's result: received, or from the loss head, run forward and backward here."""
        stages = self.stages

        def from_head(
            args: Tree, _: Stream, grads: dict[str, Array], sums: Tree
        ) -> tuple[Stream, dict[str, Array], Tree]:
            ends, inputs, slot = args
            new_sums, saved_arrays = stages.head_forward(ends, inputs, read(state.head, slot))
            dy, head_grads = stages.head_backward(ends, inputs, saved_arrays)
            return dy, add_named(grads, barrier(head_grads)), add(sums, new_sums)

        is_busy, has_dy = row.microbatch >= 0, row.dx_slot >= 0
        dy = lax.cond(  # a branch is fine: it writes to no large buffer
            is_busy & has_dy, lambda: stages.receive_back(read(state.dx, row.dx_slot)), lambda: zeros(self.stream)
        )
        invariants = (ends, inputs, row.head_slot)
        dy, end_grads, sums = at_most_once(is_busy & ~has_dy, from_head, invariants, dy, state.grads.ends, state.sums)
        return state._replace(grads=state.grads._replace(ends=end_grads), sums=sums), dy

    def _weight(self, state: TickState, row: ticks.WeightColumns) -> TickState:
        if not self.tables.has_split:
            return state

        def run(invariant_arrays: Tree, grads: Tree) -> tuple[Tree]:
            weights, microbatch, handed_slot = invariant_arrays
            operands = self._piece(weights, row.chunk), read(self.inputs, microbatch), read(state.handed, handed_slot)
            return (self._added(grads, row.chunk, self.stages.weight_backward(*operands)),)

        invariants = (self.weights.layers, row.microbatch, row.handed_slot)
        (layer_grads,) = at_most_once(row.microbatch >= 0, run, invariants, state.grads.layers)
        return state._replace(grads=state.grads._replace(layers=layer_grads))

    def _added(self, grads: Tree, chunk: Array, new_grads: Tree) -> Tree:
        new_grads = barrier(new_grads)  # else libtpu hoists the next sum out of the loop and fails
        if self.num_chunks == 1:
            return add(grads, new_grads)

        def into(grad_sum: Array, new_grad: Array) -> Array:
            chunk_sum = part_of(grad_sum, chunk, self.num_chunks) + new_grad.astype(grad_sum.dtype)
            return lax.dynamic_update_slice_in_dim(grad_sum, chunk_sum, chunk * new_grad.shape[0], axis=0)

        return jax.tree.map(into, grads, new_grads)


# -- buffers: pytrees of arrays with numbered slots in front ---------------------------------------------


def read(buffer: Tree, slot: Array) -> Tree:
    """Returns the value in a slot."""
    return jax.tree.map(lambda b: lax.dynamic_index_in_dim(b, slot, keepdims=False), buffer)


def write(buffer: Tree, slot: Array, value: Tree) -> Tree:
    """Returns the buffer with a value in a slot."""
    return jax.tree.map(lambda b, v: lax.dynamic_update_index_in_dim(b, v, slot, 0), buffer, value)


def write_if_named(buffer: Tree, slot: Array, value: Tree) -> Tree:
    """Writes a value unless the slot is negative; then slot 0 is rewritten with its own value."""
    safe_slot = jnp.maximum(slot, 0)
    old_value = read(buffer, safe_slot)
    return write(buffer, safe_slot, jax.tree.map(lambda new, old: jnp.where(slot >= 0, new, old), value, old_value))


def zeros(like: Tree, *slots: int, dtype: jnp.dtype | None = None) -> Tree:
    """Returns zeros of the shapes of a tree, with leading dims ``slots``, in its dtypes or ``dtype``."""
    return jax.tree.map(lambda a: jnp.zeros((*slots, *a.shape), dtype or a.dtype), like)


def add(total: Tree, part: Tree) -> Tree:
    """Adds two trees in the dtypes of the total."""
    return jax.tree.map(lambda t, p: t + p.astype(t.dtype), total, part)


def add_named(total: dict[str, Array], part: dict[str, Array]) -> dict[str, Array]:
    """Returns the total with each array of ``part`` added to the array of its name."""
    return total | add({name: total[name] for name in part}, part)


def part_of(array: Array, number: Array, count: int) -> Array:
    """Returns part ``number`` of ``count`` equal parts along the first dim."""
    part_len = array.shape[0] // count
    return lax.dynamic_slice_in_dim(array, number * part_len, part_len)
