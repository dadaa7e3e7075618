"""Steps that run under the profiler, training and prefill, and their interface `Subject`."""

from typing import Any, Protocol

import jax
import numpy as np

from meshwright.algebra.layers import FEATURES
from meshwright.nn.weights import init_params
from meshwright.parallel.generation.held_arrays import HeldArrays
from meshwright.parallel.generation.packed_step import PackedRows, PackedStep, slots_of
from meshwright.parallel.train_step import TrainStep
from meshwright.profile.memory import Owner, state_owners
from meshwright.spec.job import Job


def random_rows(step: TrainStep, job: Job, *, seed: int) -> dict[str, np.ndarray]:
    """Returns a batch of random tokens with next tokens as labels, and an encoder's random tokens or features."""
    vocab_size, encoder = step.model.vocab_size, step.model.encoder
    token_rows = _random_tokens(vocab_size, (job.batch_seqs, job.seq_len + 1), seed)
    array_by_name = {"tokens": token_rows[:, :-1], "labels": token_rows[:, 1:]}
    if encoder and encoder.features:
        shape = (job.batch_seqs, encoder.features, 2 * encoder.length)
        array_by_name[FEATURES] = np.random.default_rng(seed + 1).normal(size=shape).astype(np.float32)
    elif encoder:
        array_by_name["encoder_tokens"] = _random_tokens(vocab_size, (job.batch_seqs, encoder.length), seed + 1)
    return array_by_name


def _random_tokens(vocab_size: int, shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab_size, shape, dtype=np.int32)


class Training:
    """A training step for the profiler, always on the same random batch."""

    def __init__(self, step: TrainStep, job: Job) -> None:
        self.step, self.job = step, job
        self._given: tuple[Any, ...] = ()

    def begin(self, seed: int) -> None:
        """Makes the training state and a batch of random tokens on the devices."""
        self._given = self.step.init(seed), self.step.place(random_rows(self.step, self.job, seed=seed))
        jax.block_until_ready(self._given)

    def compile(self) -> jax.stages.Compiled:
        """Compiles the step."""
        return self.step.compile.lower(*self._given).compile()

    def advance(self, compiled: jax.stages.Compiled) -> None:
        """Runs one step until its results are ready."""
        state, metrics = compiled(*self._given)
        self._given = state, self._given[1]
        jax.block_until_ready((state, metrics))

    def owners(self) -> list[Owner]:
        """Returns the step's arguments with their bytes on one device."""
        step, shapes, shardings = self.step, self.step.param_shapes, self.step.state_shardings
        return [
            *state_owners(shapes, shardings.params, "weights"),
            *state_owners(step.state_shapes.opt_state, shardings.opt_state, "optimizer"),
            *state_owners(step.batch_shapes(self.job.batch_seqs, self.job.seq_len), step.batch_shardings, "batch"),
        ]


class Prefill:
    """A server's step for the profiler that prefills random prompts of the job's length."""

    def __init__(self, step: PackedStep, job: Job) -> None:
        self.step, self.job = step, job
        self._given: tuple[Any, ...] = ()

    def begin(self, seed: int) -> None:
        step, (num_seqs, seq_len) = self.step, (self.job.batch_seqs, self.job.seq_len)
        rows, pages_per_seq, page_len = np.arange(num_seqs * seq_len), step.cache_sizes["Bp"], step.storage.page_len
        row_seqs, positions, sizes = rows // seq_len, rows % seq_len, np.full(num_seqs, seq_len)
        pages = np.arange(num_seqs * pages_per_seq).reshape(num_seqs, pages_per_seq)
        tokens = _random_tokens(step.model.vocab_size, (len(rows),), seed)
        slots = slots_of(positions, pages, row_seqs, page_len)
        starts = np.arange(num_seqs) * seq_len
        batch = PackedRows(tokens, 0 * rows - 1, positions, slots, starts, sizes, sizes, pages, starts + seq_len - 1)
        if step.has_windows:
            num_window_pages = step.storage.window_pages // num_seqs
            table = np.arange(num_seqs)[:, None] * num_window_pages + np.arange(pages_per_seq)[None] % num_window_pages
            batch = batch._replace(window_pages=table, window_slots=slots_of(positions, table, row_seqs, page_len))
        latest_tokens = np.zeros(step.max_seqs, np.int32)
        params = step.place(init_params(step.model, seed))
        self._given = params, step.init_cache(), latest_tokens, step.flat(batch)
        jax.block_until_ready(self._given)

    def compile(self) -> jax.stages.Compiled:
        return self.step.compiled(self.step.shape_of(self.job))

    def advance(self, compiled: jax.stages.Compiled) -> None:
        params, cache, *inputs = self._given
        logits, cache = compiled(params, cache, *inputs)
        self._given = params, cache, *inputs
        jax.block_until_ready((logits, cache))

    def owners(self) -> list[Owner]:
        return held_owners(self.step)


def held_owners(step: HeldArrays) -> list[Owner]:
    """Returns weights and caches with their bytes on one device."""
    return [
        *state_owners(step.param_shapes, step.param_shardings, "weights"),
        *state_owners(step.cache_shapes, step.cache_shardings, "cache"),
    ]


class Subject(Protocol):
    """A step that runs under the profiler, with its state and inputs."""

    def begin(self, seed: int) -> None: ...
    def compile(self) -> jax.stages.Compiled: ...
    def advance(self, compiled: jax.stages.Compiled) -> None: ...
    def owners(self) -> list[Owner]: ...
