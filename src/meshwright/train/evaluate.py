"""The loss on held-out text, on the run's own mesh and shardings."""

import math
from typing import Any

import jax

from meshwright.nn.weights import Params
from meshwright.parallel.train_step import TrainStep
from meshwright.train.data.batches import Batches, Source


class HeldOut:
    """Held-out text in batches, always the same ones, and the loss compiled for them."""

    def __init__(self, step: TrainStep, batches: Batches, num_batches: int) -> None:
        self._step, self._batches, self._num_batches = step, batches, num_batches
        self._loss_sum: Any = None

    def compile(self, params: Params) -> None:
        """Compile now, so that no evaluation does."""
        if self._loss_sum is None:
            loss_sum: Any = self._step.loss_sum
            self._loss_sum = loss_sum.lower(params, self._batch(0)).compile()

    def loss(self, params: Params) -> float:
        """Mean loss per counted label over all batches; 0 where none counts."""
        self.compile(params)
        sums, counts = [], []
        for index in range(self._num_batches):
            batch = self._batch(index)
            sums.append(self._loss_sum(params, batch))
            counts.append(batch["num_labels"])
            # One batch in flight: more would hold the memory of all of them.
            jax.block_until_ready(sums[-1])
        return math.fsum(map(float, sums)) / max(1.0, math.fsum(map(float, counts)))

    def _batch(self, index: int) -> dict[str, jax.Array]:
        return self._batches.global_batch(index * self._batches.batch_seqs, self._step.batch_shardings)


def held_out(
    step: TrainStep, source: Source | None, *, batch_seqs: int, seq_len: int, max_batches: int
) -> HeldOut | None:
    """At most ``max_batches`` batches of ``source``, no row twice; None when it has too few rows for the mesh.

    The batch is the job's, or the largest that the rows fill and the mesh divides.
    """
    found = source.num_samples(seq_len) if source else 0
    parts = rows_at_once(step)
    size = min(batch_seqs, found) // parts * parts
    if source is None or size == 0:
        return None
    batches = Batches(source, batch_seqs=size, seq_len=seq_len, seed=0, order=step.token_order(seq_len))
    return HeldOut(step, batches, min(max_batches, found // size))


def rows_at_once(step: TrainStep) -> int:
    """What divides the sequences of a batch: the parts of the mesh, times the microbatches."""
    split = step.declared.declared["tokens"].axes_of("B")
    return math.prod(step.strategy.mesh[axis] for axis in split) * step.strategy.num_microbatches
