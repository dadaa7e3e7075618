"""The loss on held-out text, on the run's own mesh and shardings."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from meshwright.nn.interpreter import Interpreter
from meshwright.nn.weights import Params
from meshwright.parallel.train_step import Batch, TrainStep, local_loss
from meshwright.train.data import Batches, TokenStore

MAX_BATCHES = 16
"""Enough for a steady mean, few enough that a long text does not hold up the end of a run."""


def loss_function(step: TrainStep) -> Callable[[Params, Batch], jax.Array]:
    """Jitted (params, batch) -> summed loss of a global batch, by the forward steps of the strategy."""
    interpreter = Interpreter(step.model, step.declared)
    axes = step.strategy.active_axes

    def body(params: Params, batch: Batch) -> jax.Array:
        loss = local_loss(step.model, step.declared, params, batch, interpreter=interpreter)
        return lax.psum(loss, axes) if axes else loss

    return jax.jit(
        jax.shard_map(
            body,
            mesh=step.mesh,
            in_specs=(step.param_specs, step.batch_specs),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )


def held_out_loss(step: TrainStep, params: Params, store: TokenStore, *, batch_seqs: int, seq_len: int) -> float | None:
    """Mean loss per token over windows of ``store``, each once; None when it has too few for the mesh.

    The batch is the job's, or the largest that the windows fill and the mesh divides.
    """
    rows_at_once = _row_split(step)
    windows = max(0, len(store) - 1) // seq_len
    size = min(batch_seqs, windows) // rows_at_once * rows_at_once
    if size == 0:
        return None
    batches = Batches(store, batch_seqs=size, seq_len=seq_len, seed=0)
    count = min(MAX_BATCHES, windows // size)
    loss = loss_function(step)
    sums = [float(loss(params, batches.global_batch(i, step.batch_shardings))) for i in range(count)]
    return math.fsum(sums) / (count * size * seq_len)


def _row_split(step: TrainStep) -> int:
    """Parts into which the mesh splits the sequences of a batch."""
    split: Any = step.declared.declared["tokens"].axes_of("B")
    return math.prod(step.strategy.mesh[axis] for axis in split)
