"""One executor for every pipeline schedule: a scan over the ticks of its table, inside `shard_map`.

In a tick each device runs the passes that its row names, then messages move. Sends stand outside every branch: all
devices take part in each of them, and what no one waits for is not written down.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwright.algebra.schedules.ticks import Columns, TickTables
from meshwright.parallel.pipeline.buffers import add, part_of
from meshwright.parallel.pipeline.functions import StageFunctions, Tree, Weights
from meshwright.parallel.pipeline.ticks import State, TickExecutor


def run_schedule(
    tables: TickTables, stages: StageFunctions, weights: Weights, inputs: Tree, *, axis: str = "pipeline"
) -> tuple[Tree, Weights]:
    """Sums over this device's microbatches (the loss among them), and gradients of its weights, summed in float32.

    ``inputs`` have the microbatches in front, ``weights.layers`` the layers of this device, chunk by chunk (see
    `layer_order`). Sums and the gradients of the ends are this device's part only, zero where it runs neither
    embedding nor head: sum them over ``axis`` once per step.
    """
    local = _with_mirror(tables, weights, axis)
    run = TickExecutor(tables, stages, local, inputs, axis)
    rows, unpack = _own_rows(tables, axis)

    def tick(state: State, row: jax.Array) -> tuple[State, None]:
        return run.tick(state, unpack(row)), None

    state, _ = lax.scan(tick, run.start(), rows)
    return state.sums, _without_mirror(tables, state.grads, axis)


def run_forward(
    tables: TickTables, stages: StageFunctions, weights: Weights, inputs: Tree, *, axis: str = "pipeline"
) -> Tree:
    """The sums alone, from `forward_tables`: nothing is kept for a backward pass."""
    sums, _ = run_schedule(tables, stages, weights, inputs, axis=axis)
    return sums


def _own_rows(tables: TickTables, axis: str) -> tuple[jax.Array, Callable[[jax.Array], Columns]]:
    """This device's rows, [ticks, columns], and how to name the columns of one row."""
    leaves, structure = jax.tree.flatten(tables.columns)
    stacked = jnp.asarray(np.stack(leaves, axis=-1))
    own = lax.dynamic_index_in_dim(stacked, lax.axis_index(axis), axis=1, keepdims=False)
    return own, lambda row: jax.tree.unflatten(structure, [row[i] for i in range(len(leaves))])


# -- two copies of the weights -------------------------------------------------------------------------


def _mirror(tables: TickTables, value: Tree, axis: str) -> Tree:
    last = tables.schedule.num_devices - 1
    return lax.ppermute(value, axis, [(device, last - device) for device in range(last + 1)])


def _with_mirror(tables: TickTables, weights: Weights, axis: str) -> Weights:
    """Layers of the device at the other end behind its own, where microbatches enter at both ends."""
    if tables.schedule.weight_copies == 1:
        return weights
    other = _mirror(tables, weights.layers, axis)
    layers = jax.tree.map(lambda mine, theirs: jnp.concatenate([mine, theirs]), weights.layers, other)
    return weights._replace(layers=layers)


def _without_mirror(tables: TickTables, grads: Weights, axis: str) -> Weights:
    """Gradients of both copies summed where the weights are at home."""
    if tables.schedule.weight_copies == 1:
        return grads
    own, other = (jax.tree.map(lambda a, n=number: part_of(a, n, 2), grads.layers) for number in (0, 1))
    return grads._replace(layers=add(own, _mirror(tables, other, axis)))
