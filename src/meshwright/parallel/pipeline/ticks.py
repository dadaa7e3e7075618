"""One tick of a pipeline on one device: F, B and W where its row names them, then the messages of all devices.

What writes to a large buffer only in some ticks stands in a loop of no turn or one (`at_most_once`): XLA keeps the
buffers of loops in place, and on GPUs copies those that go through a branch.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.algebra.schedules.ticks import (
    BackwardColumns,
    Channel,
    Columns,
    ForwardColumns,
    TickTables,
    WeightColumns,
)
from meshwright.core.labels import AT_MOST_ONCE
from meshwright.parallel.gradients import apart
from meshwright.parallel.pipeline.buffers import add, add_named, buffer, part_of, read, write, write_if_named, zeros
from meshwright.parallel.pipeline.functions import StageFunctions, Stream, Tree, Weights, as_it_is


class State(NamedTuple):
    """What goes from tick to tick. Buffers have their slots in front."""

    x: Tree
    dx: Tree
    head: Tree
    stash: Tree
    handed: Tree
    grads: Weights
    sums: Tree


class TickExecutor:
    """The slots of one tick on one device, and the shapes of what they pass on."""

    def __init__(self, tables: TickTables, stages: StageFunctions, weights: Weights, inputs: Tree, axis: str) -> None:
        self.tables, self.stages, self.weights, self.inputs, self.axis = tables, stages, weights, inputs, axis
        self.num_chunks = tables.schedule.num_chunks
        one, piece = jax.eval_shape(self._of_microbatch, 0), jax.eval_shape(self._piece, 0)
        self.stream = jax.eval_shape(stages.embed, weights.ends, one)
        y, self.held = jax.eval_shape(stages.forward, piece, one, self.stream)
        assert (y.shape, y.dtype) == (self.stream.shape, self.stream.dtype), f"a stage turns {self.stream} into {y}"
        self.sums, head_held = jax.eval_shape(stages.head_forward, weights.ends, one, y)
        self.sent = jax.eval_shape(stages.send, y)
        self.sent_back = jax.eval_shape(stages.send_back, y)
        self.handed: Tree = None
        self.grads = Weights({}, {})
        if tables.has_backward:
            self._find_gradients(piece, one, head_held)

    def _find_gradients(self, piece: Tree, one: Tree, head_held: Tree) -> None:
        stages, ends = self.stages, self.weights.ends
        if self.tables.has_split:
            assert stages.input_backward is not None, "a row W needs a backward pass in two parts"
            assert stages.weight_backward is not None
            _, self.handed = jax.eval_shape(stages.input_backward, piece, one, self.held, self.stream)
            layers = jax.eval_shape(stages.weight_backward, piece, one, self.handed)
        else:
            _, layers = jax.eval_shape(stages.backward, piece, one, self.held, self.stream)
        _, head = jax.eval_shape(stages.head_backward, ends, one, head_held)
        self.grads = Weights(layers, head | jax.eval_shape(stages.embed_backward, ends, one, self.stream))

    def start(self) -> State:
        """Empty buffers and zero sums."""
        slots = self.tables.slots
        layers = jax.tree.map(
            lambda a: jnp.zeros((self.num_chunks * a.shape[0], *a.shape[1:]), jnp.float32), self.grads.layers
        )
        ends = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), self.grads.ends)
        return State(
            x=buffer(max(slots.x, 1), self.sent),
            dx=buffer(max(slots.dx, 1), self.sent_back),
            head=buffer(slots.head, self.stream),
            stash=buffer(slots.stash, self.held),
            handed=buffer(slots.handed, self.handed),
            grads=Weights(layers, ends),
            sums=zeros(self.sums),
        )

    def tick(self, state: State, row: Columns) -> State:
        """F, B and W, each where the row names a microbatch, then the messages of all devices."""
        state, y = self._forward(state, row.forward)
        arriving = self._exchange(y, self.tables.x_channels)
        if self.tables.has_backward:
            state, dx = self._backward(state, row.backward)
            state = self._weight(state, row.weight)
            returning = self._exchange(dx, self.tables.dx_channels)
            for slot, value in zip(row.dx_arrivals, returning, strict=True):
                state = state._replace(dx=write_if_named(state.dx, slot, value))
        for slot, value in zip(row.x_arrivals, arriving, strict=True):
            state = state._replace(x=write_if_named(state.x, slot, value))
        return state

    def _exchange(self, value: Stream, channels: Sequence[Channel]) -> list[Stream]:
        return [lax.ppermute(value, self.axis, channel.pairs) if channel.offset else value for channel in channels]

    def _of_microbatch(self, number: Any) -> Tree:
        return read(self.inputs, number)

    def _piece(self, chunk: Any) -> Tree:
        """Weights of one virtual stage of this device."""
        if self.num_chunks == 1:
            return self.weights.layers
        return jax.tree.map(lambda a: part_of(a, chunk, self.num_chunks), self.weights.layers)

    def _forward(self, state: State, row: ForwardColumns) -> tuple[State, Stream]:
        stages, ends, inputs = self.stages, self.weights.ends, self._of_microbatch(row.microbatch)
        x = lax.switch(
            _which(row.microbatch >= 0, row.x_slot < 0),
            (
                lambda: zeros(self.stream),
                lambda: stages.receive(read(state.x, row.x_slot)),
                lambda: stages.embed(ends, inputs),
            ),
        )

        def run(_: Stream, stash: Tree, head: Tree) -> tuple[Stream, Tree, Tree]:
            y, held = stages.forward(self._piece(row.chunk), inputs, x)
            if not self.tables.has_backward:
                return y, stash, head
            return y, write(stash, row.stash_slot, held), write_if_named(head, row.head_slot, y)

        y, stash, head = at_most_once(row.microbatch >= 0, run, zeros(self.stream), state.stash, state.head)
        state = state._replace(stash=stash, head=head)
        return state if self.tables.has_backward else self._sums_only(state, row, inputs, y), stages.send(y)

    def _sums_only(self, state: State, row: ForwardColumns, inputs: Tree, y: Stream) -> State:
        """Where no backward pass follows, the loss head runs in F of the last virtual stage."""
        head, ends = self.stages.head_forward, self.weights.ends
        sums = lax.cond(row.is_last > 0, lambda total: add(total, head(ends, inputs, y)[0]), as_it_is, state.sums)
        return state._replace(sums=sums)

    def _backward(self, state: State, row: BackwardColumns) -> tuple[State, Stream]:
        stages, ends, inputs = self.stages, self.weights.ends, self._of_microbatch(row.microbatch)
        state, dy = self._cotangent(state, row, inputs)

        def given() -> tuple[Tree, Tree, Tree, Stream]:
            return self._piece(row.chunk), inputs, read(state.stash, row.stash_slot), dy

        def whole(dx: Stream, grads: Tree) -> tuple[Stream, Tree]:
            dx, part = stages.backward(*given())
            return dx, self._added(grads, row.chunk, part)

        def split(dx: Stream, handed: Tree) -> tuple[Stream, Tree]:
            assert stages.input_backward
            dx, part = stages.input_backward(*given())
            return dx, write(handed, row.handed_slot, part)

        dx, layers, handed = zeros(self.stream), state.grads.layers, state.handed
        is_split = row.handed_slot >= 0
        if self.tables.has_whole:
            dx, layers = at_most_once((row.microbatch >= 0) & ~is_split, whole, dx, layers)
        if self.tables.has_split:
            dx, handed = at_most_once(is_split, split, dx, handed)
        (of_ends,) = at_most_once(
            row.is_first > 0,
            lambda total: (add_named(total, apart(stages.embed_backward(ends, inputs, dx))),),
            state.grads.ends,
        )
        return state._replace(grads=Weights(layers, of_ends), handed=handed), stages.send_back(dx)

    def _cotangent(self, state: State, row: BackwardColumns, inputs: Tree) -> tuple[State, Stream]:
        """That of a stage's result: as it arrived, or from the loss head, which runs both ways here."""
        stages, ends = self.stages, self.weights.ends

        def from_head(_: Stream, grads: dict[str, jax.Array], sums: Tree) -> tuple[Stream, dict[str, jax.Array], Tree]:
            part, held = stages.head_forward(ends, inputs, read(state.head, row.head_slot))
            dy, of_head = stages.head_backward(ends, inputs, held)
            return dy, add_named(grads, apart(of_head)), add(sums, part)

        runs, arrived = row.microbatch >= 0, row.dx_slot >= 0
        dy = lax.cond(
            runs & arrived,
            lambda: stages.receive_back(read(state.dx, row.dx_slot)),
            lambda: zeros(self.stream),
        )
        dy, of_ends, sums = at_most_once(runs & ~arrived, from_head, dy, state.grads.ends, state.sums)
        return state._replace(grads=state.grads._replace(ends=of_ends), sums=sums), dy

    def _weight(self, state: State, row: WeightColumns) -> State:
        weight = self.stages.weight_backward
        if not self.tables.has_split:
            return state
        assert weight

        def run(grads: Tree) -> tuple[Tree]:
            piece, inputs = self._piece(row.chunk), self._of_microbatch(row.microbatch)
            handed = read(state.handed, row.handed_slot)
            return (self._added(grads, row.chunk, weight(piece, inputs, handed)),)

        (layers,) = at_most_once(row.microbatch >= 0, run, state.grads.layers)
        return state._replace(grads=state.grads._replace(layers=layers))

    def _added(self, grads: Tree, chunk: jax.Array, part: Tree) -> Tree:
        part = apart(part)
        if self.num_chunks == 1:
            return add(grads, part)

        def into(total: jax.Array, new: jax.Array) -> jax.Array:
            summed = part_of(total, chunk, self.num_chunks) + new.astype(total.dtype)
            return lax.dynamic_update_slice_in_dim(total, summed, chunk * new.shape[0], axis=0)

        return jax.tree.map(into, grads, part)


def at_most_once(runs: jax.Array, body: Callable[..., tuple[Any, ...]], *values: Any) -> tuple[Any, ...]:
    """``body`` of the values where it ``runs``, else the values themselves: a loop of one turn or none."""
    with jax.named_scope(AT_MOST_ONCE):
        return lax.fori_loop(0, runs.astype(jnp.int32), lambda _, given: body(*given), values)


def _which(runs: jax.Array, second: jax.Array) -> jax.Array:
    """Of three branches: idle, the first way, the second way."""
    return jnp.where(runs, 1 + second, 0)
