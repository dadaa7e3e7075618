"""Makes the training step of a run's settings; imports no readers of data or checkpoints, so `verify` starts fast."""

import math

from jax.sharding import AbstractMesh, Mesh

from meshwright.algebra.layers import ProgramOptions
from meshwright.core.errors import InputError
from meshwright.parallel.train_step import TrainStep
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.strategy import Form, Strategy
from meshwright.train.optimizers.table import make_optimizer
from meshwright.train.settings import TrainSettings


def batch_parts(step: TrainStep, letter: str) -> tuple[tuple[str, ...], int]:
    """Returns the mesh axes that shard a dim of a batch, and its number of parts: devices, for B times microbatches."""
    axes = step.declared.declared["tokens"].axes_of(letter)
    num_parts = math.prod(step.strategy.mesh[axis] for axis in axes)
    return axes, num_parts * (step.strategy.num_microbatches if letter == "B" else 1)


def make_step(
    model: Model,
    strategy: Strategy,
    settings: TrainSettings,
    *,
    options: ProgramOptions,
    mesh: Mesh | AbstractMesh | None = None,
    form: Form = "shard_map",
) -> TrainStep:
    """Returns the training step for these settings and their `program_options`; the devices of ``mesh`` need not
    exist."""
    return TrainStep(
        model,
        strategy,
        optimizer=make_optimizer(model, settings, strategy.state),
        max_grad_norm=settings.max_grad_norm,
        options=options,
        form=form,
        mesh=mesh,
    )


def require_divides(step: TrainStep, job: Job) -> None:
    """Raises InputError unless every device gets an equal part of the batch; `plan.legal` checks the weights."""
    for name, dim, size in (("batch_seqs", "B", job.batch_seqs), ("seq_len", "T", job.seq_len)):
        axes, num_parts = batch_parts(step, dim)
        if size % num_parts:
            raise InputError(
                f"{name}={size} does not divide into {num_parts} parts "
                f"({' x '.join(axes)}{' x microbatches' if dim == 'B' else ''}). Use a multiple of {num_parts}."
            )
