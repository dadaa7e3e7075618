"""Prepares a run: data, batches, the step, the evaluation, and the first state."""

import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jaxtyping import Array

from meshwright.algebra.transformer import rows
from meshwright.core.errors import InputError
from meshwright.core.files import cache_folder
from meshwright.masks.names import mask_named
from meshwright.nn.hf.tokenizer import TOKENIZER
from meshwright.nn.hf.weights import load_params
from meshwright.nn.ops.quantised_embed import DTYPES
from meshwright.nn.weights import Params
from meshwright.parallel.train_step import State, TrainStep
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.strategy import Strategy
from meshwright.spec.weights import frozen_base, without_mtp_words
from meshwright.train.checkpoint import Checkpoints, Position
from meshwright.train.data.batches import Batches, Data, open_data
from meshwright.train.data.pairs import PairForm
from meshwright.train.data.sources import Source
from meshwright.train.data.tokenizer import load_tokenizer
from meshwright.train.settings import ADAPTER_RATE, TrainSettings, fine_tuning_rate, program_options
from meshwright.train.step import batch_parts, make_step, require_divides


class HeldOut:
    """Fixed batches of held-out text, and the loss compiled for them."""

    def __init__(self, step: TrainStep, batches: Batches, num_batches: int) -> None:
        self._step, self._batches, self._num_batches = step, batches, num_batches
        self._loss_sum: Any = None

    def compile(self, params: Params) -> None:
        """Compiles the loss now, so that no evaluation has to."""
        if self._loss_sum is None:
            loss_sum: Any = self._step.loss_sum
            self._loss_sum = loss_sum.lower(params, self._batch(0)).compile()

    def loss(self, params: Params) -> float:
        """Returns the mean loss per counted label over all batches; 0 without any label."""
        self.compile(params)
        loss_sums, label_counts = [], []
        for batch_index in range(self._num_batches):
            batch = self._batch(batch_index)
            loss_sums.append(self._loss_sum(params, batch))
            label_counts.append(batch["num_labels"])
            # One batch in flight: more would need the memory of all of them.
            jax.block_until_ready(loss_sums[-1])
        return math.fsum(map(float, loss_sums)) / max(1.0, math.fsum(map(float, label_counts)))

    def _batch(self, batch_index: int) -> dict[str, Array]:
        return self._batches.global_batch(batch_index * self._batches.batch_seqs, self._step.batch_shardings)


def held_out(step: TrainStep, sources: Sequence[Source], job: Job, *, max_batches: int) -> HeldOut | None:
    """Returns at most ``max_batches`` batches of all sources, no row twice; None if the rows are too few for the mesh.

    The batch size is the job's or, if the rows do not fill that, the largest that they fill and the mesh divides.
    """
    source_row_counts = ((source, len(source.rows(job.seq_len))) for source in sources)
    filled_sources = [source._replace(share=num_rows) for source, num_rows in source_row_counts if num_rows]
    num_rows = int(sum(source.share for source in filled_sources))
    _, num_parts = batch_parts(step, "B")
    batch_seqs = min(job.batch_seqs, num_rows) // num_parts * num_parts
    if batch_seqs == 0:
        return None
    token_order = step.token_order(job.seq_len)
    batches = Batches(filled_sources, batch_seqs=batch_seqs, seq_len=job.seq_len, seed=0, order=token_order)
    return HeldOut(step, batches, min(max_batches, num_rows // batch_seqs))


class Setup(NamedTuple):
    """The parts of a run before its first step; ``held_out`` is None without rows for evaluation."""

    job: Job
    settings: TrainSettings
    step: TrainStep
    data: Data
    batches: Batches
    held_out: HeldOut | None


def pair_form(model: Model, strategy: Strategy, job: Job, settings: TrainSettings) -> PairForm | None:
    """Returns the rules by which documents become pairs for an encoder and its decoder; None without an encoder."""
    if model.encoder is None:
        return None
    return PairForm(
        source_len=model.encoder.length,
        target_len=job.seq_len,
        start_token=model.encoder.start_token,
        noise_density=settings.noise_density,
        mean_span=settings.mean_span,
        features=model.encoder.features,
        dtype=jnp.dtype(DTYPES[strategy.state_dtype]).name,
    )


def prepare(model: Model, strategy: Strategy, job: Job, settings: TrainSettings) -> Setup:
    """Prepares a run. Raises InputError for inputs that do not fit together."""
    mask_rule = mask_named(model.attention_mask) if model.attention_mask else None
    form = pair_form(model, strategy, job, settings)
    if form and mask_rule and mask_rule.data:
        raise InputError(
            f"attention_mask={model.attention_mask!r} reads {mask_rule.data[0]} of each record, which no row of an "
            "encoder and a decoder has. Use a mask without data."
        )
    folder = cache_folder() / "tokens"
    data = open_data(settings, vocab_size=model.vocab_size, folder=folder, mask=mask_rule, form=form)
    rows = {"several_documents": data.several_documents, "is_padded": data.is_padded}
    step = make_step(model, strategy, settings, options=program_options(settings, strategy, **rows))
    require_divides(step, job)
    token_order = step.token_order(job.seq_len)
    batches = Batches(data.train, batch_seqs=job.batch_seqs, seq_len=job.seq_len, seed=settings.seed, order=token_order)
    held_out_batches = held_out(step, data.held_out, job, max_batches=settings.evaluate_batches)
    return Setup(job, settings, step, data, batches, held_out_batches)


def start_state(setup: Setup, checkpoints: Checkpoints) -> tuple[Position, State]:
    """Returns position and state of the newest checkpoint, sharded over this run's mesh; without a checkpoint, step 0
    with weights of the settings.

    Frozen weights are in no checkpoint: they are read or drawn again. Raises InputError if they are not the run's."""
    step, position = setup.step, checkpoints.position()
    tables = {"model": msgspec.to_builtins(step.model), "settings": msgspec.to_builtins(setup.settings)}
    base_names = step.param_shapes.keys() - step.saved(step.param_shapes).keys()
    new_state = loaded_params = None
    if position is None or base_names:
        if folder := setup.settings.weights:
            model, shardings = frozen_base(step.model), step.canonical[1].params
            loaded_params = load_params(model, folder, {name: shardings[name] for name in rows(model)}, step.dtype)
        new_state = step.init(setup.settings.seed, loaded_params)
    digest = fingerprint(step.to_canonical({n: new_state.params[n] for n in sorted(base_names)})) if new_state else ""
    if position is None:
        assert new_state is not None
        start_position = Position(step=0, samples=0, tokens=0, phase=setup.batches.phase, base=digest, **tables)
        return start_position, new_state
    if base_names and digest != position.base:
        raise InputError(
            f"{checkpoints.folder.parent} trains an adapter of other weights than {setup.settings.weights or 'these'} "
            f"({digest} is not {position.base}). Give the run's weights: --set train.weights=FOLDER."
        )
    shapes, shardings = (state._replace(params=step.saved(state.params)) for state in step.canonical)
    state = checkpoints.restore(shapes, shardings, from_canonical=step.from_canonical)
    if new_state is not None:
        state = state._replace(params=new_state.params | state.params)
    setup.batches.go_on(position.phase, position.samples)
    return msgspec.structs.replace(position, phase=setup.batches.phase, **tables), state


def start_words(settings: TrainSettings, model: Model, step: int = 0) -> str:
    """Returns a line on a new run's first weights and learning rate; after ``step`` > 0 on no steps left, or ""."""
    if step:
        return f"step {step} is done, and train.steps={settings.steps}: no step is left" * (step >= settings.steps)
    if not settings.weights:
        return "starts from random weights"
    rate, default_rate = settings.learning_rate, fine_tuning_rate(model)
    trained_text = "adapters" if default_rate == ADAPTER_RATE else "all weights"
    suffix = f", the default to fine-tune {trained_text}" if rate == default_rate else ""
    return f"starts from the weights in {settings.weights}, at learning_rate {rate:g}{suffix}{without_mtp_words(model)}"


def fingerprint(params: Params) -> str:
    """Returns the `digest` of weights in the order of their names; "" for no weights."""
    return digest([params[name] for name in sorted(params)]) if params else ""


def digest(arrays: Sequence[Array]) -> str:
    """Returns 8 hexadecimal digits, the same on every mesh, which almost surely differ for other values or shapes."""
    return f"{zlib.crc32(np.asarray(_bit_sums(arrays), np.uint32).tobytes()):08x}"


@jax.jit
def _bit_sums(arrays: Sequence[Array]) -> list[Array]:
    """Returns the sum of each array's bits, weighted by odd numbers, without moving a shard."""

    def of_array(array: Array) -> Array:
        bits = jax.lax.bitcast_convert_type(array.astype(jnp.float32), jnp.uint32)
        number, stride = jnp.zeros(bits.shape, jnp.uint32), 1
        for dim in reversed(range(bits.ndim)):
            number += jnp.uint32(stride % 2**32) * jax.lax.broadcasted_iota(jnp.uint32, bits.shape, dim)
            stride *= bits.shape[dim]
        return jnp.sum(bits * (2 * number + 1), dtype=jnp.uint32)

    return [of_array(array) for array in arrays]


def require_same_tokenizer(run: Path, data: Data) -> None:
    """Raises InputError if the data of a resumed run have another tokenizer than at its start."""
    saved_path = run / TOKENIZER
    if saved_path.is_file() and data.tokenizer and load_tokenizer(saved_path).to_str() != data.tokenizer.to_str():
        raise InputError(
            f"{run} was trained with another tokenizer than this text gives. "
            f"Give the run's: --set train.tokenizer={saved_path}, or the text that it began with."
        )
