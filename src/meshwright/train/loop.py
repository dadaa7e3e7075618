"""The training loop: batches in, metrics out, and a run folder that can be read whenever it stops."""

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from tokenizers import Tokenizer

from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.files import cache_folder
from meshwright.core.units import format_seconds
from meshwright.parallel.train_step import Batch, State, TrainStep
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.strategy import Strategy
from meshwright.spec.toml_file import dump_toml
from meshwright.train.cache import keep_compiled_programs
from meshwright.train.data import Batches, TokenStore, open_tokens
from meshwright.train.evaluate import held_out_loss
from meshwright.train.metrics import LiveLine, Predicted, StepRecord, typical_step_s
from meshwright.train.run_folder import RESOLVED, RunFolder, create_run_folder
from meshwright.train.settings import TrainSettings, learning_rate, make_optimizer
from meshwright.train.text import read_documents
from meshwright.train.tokenizer import save_tokenizer
from meshwright.train.weights_file import TOKENIZER, save_weights

OnStep = Callable[[StepRecord], None]


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bytes on one device: shards of what the step is given, and what the compiler adds while it runs.

    ``temporaries_bytes`` are activations, gathered weights, gradients and buffers of collectives; None where
    the backend does not say.
    """

    weights_bytes: int
    optimizer_bytes: int
    batch_bytes: int
    temporaries_bytes: int | None

    @property
    def total_bytes(self) -> int:
        """All of it; what the compiler did not say counts nothing."""
        return self.weights_bytes + self.optimizer_bytes + self.batch_bytes + (self.temporaries_bytes or 0)


class TrainResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a run came to. ``step_s`` is the median after the first two steps; compiling is in ``compile_s``."""

    run: str
    steps: int
    stopped: bool
    losses: list[float]
    validation_loss: float | None
    step_s: float | None
    step_s_predicted: float | None
    tokens_per_s: float | None
    mfu: float | None
    compile_s: float
    memory: MemoryUse | None


class _Progress:
    """Everything that changes while a run goes on."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.losses: list[float] = []
        self.step_s: list[float] = []
        self.compile_s = 0.0
        self.memory: MemoryUse | None = None
        self.stop = False


def train(
    model: Model,
    strategy: Strategy,
    job: Job,
    settings: TrainSettings,
    *,
    run_root: Path,
    predicted: Predicted | None = None,
    on_step: OnStep | None = None,
    texts: Mapping[str, str] | None = None,
) -> TrainResult:
    """Train, and leave a run folder under ``run_root``. Standard output is never written to.

    ``texts`` are further files for the folder by name: the plan, the whole resolved configuration. Ctrl-C ends
    the run after the step in progress with everything written. Raises CannotRunError, with the metrics
    written, when the loss is not finite.
    """
    predicted = predicted or Predicted()
    keep_compiled_programs(cache_folder())
    setup = _prepare(model, strategy, job, settings)
    path = create_run_folder(run_root, model.name)
    resolved = {"model": model, "strategy": strategy, "job": job, "train": settings}
    texts = {RESOLVED: dump_toml(resolved), **(texts or {})}
    save_tokenizer(setup.tokenizer, path / TOKENIZER)
    live = LiveLine(steps=settings.steps, every=settings.log_every)
    progress = _Progress(setup.step.init(settings.seed))
    with RunFolder(path, texts) as folder, live, _ctrl_c(progress, live):
        _run(setup, progress, settings, predicted, folder, live, on_step)
        finite = all(map(math.isfinite, progress.losses))
        # Whoever pressed Ctrl-C is not kept waiting for the held-out text.
        validation = _validation(setup, progress, job) if finite and not progress.stop else None
        result = _result(path, settings, job, predicted, progress, validation)
        folder.summarise({**msgspec.to_builtins(result), "diverged": not finite})
        if not finite:
            raise CannotRunError(_diverged(progress, settings, path))
        save_weights(model, progress.state.params, path)
    return result


class _Setup(NamedTuple):
    """What a run needs before its folder is made."""

    step: TrainStep
    store: TokenStore
    tokenizer: Tokenizer
    batches: Batches


def _prepare(model: Model, strategy: Strategy, job: Job, settings: TrainSettings) -> _Setup:
    """Text, batches and the step, not compiled yet. Raises InputError for what does not go together."""
    documents = read_documents(settings.data)
    store, tokenizer = open_tokens(documents, vocab_size=model.vocab_size, folder=cache_folder() / "tokens")
    batches = Batches(store.train(), batch_seqs=job.batch_seqs, seq_len=job.seq_len, seed=settings.seed)
    optimizer = make_optimizer(model, settings)
    step = TrainStep(model, strategy, optimizer=optimizer, max_grad_norm=settings.max_grad_norm)
    _check_divides(step, job)
    return _Setup(step, store, tokenizer, batches)


def _run(
    setup: _Setup,
    progress: _Progress,
    settings: TrainSettings,
    predicted: Predicted,
    folder: RunFolder,
    live: LiveLine,
    on_step: OnStep | None,
) -> None:
    """Compile the step once, then run steps until the last, Ctrl-C, or a loss that is not finite."""
    start = time.perf_counter()
    first = setup.batches.global_batch(0, setup.step.batch_shardings)
    compiled = setup.step.compile.lower(progress.state, first).compile()
    progress.compile_s = time.perf_counter() - start
    progress.memory = _memory(progress.state, first, compiled)
    live.say(f"{folder.path}: compiled in {format_seconds(progress.compile_s)}")
    for record in _steps(compiled, progress, setup, first, settings, predicted):
        folder.record(record)
        live.show(record)
        try:
            if on_step:
                on_step(record)
        except KeyboardInterrupt:
            # Between steps the state is whole, so this ends like a Ctrl-C that the handler saw.
            progress.stop = True


def _check_divides(step: TrainStep, job: Job) -> None:
    """Raise InputError unless every device gets an equal part of the batch; `plan.legal` has looked at the weights."""
    split = step.declared.declared["tokens"]
    for name, letter, size in (("batch_seqs", "B", job.batch_seqs), ("seq_len", "T", job.seq_len)):
        axes = split.axes_of(letter)
        parts = math.prod(step.strategy.mesh[a] for a in axes)
        parts *= step.strategy.num_microbatches if letter == "B" else 1
        if size % parts:
            raise InputError(
                f"{name}={size} does not divide into {parts} parts "
                f"({' x '.join(axes)}{' x microbatches' if letter == 'B' else ''}). Use a multiple of {parts}."
            )


def _steps(
    compiled: Any,
    progress: _Progress,
    setup: _Setup,
    batch: Batch,
    settings: TrainSettings,
    predicted: Predicted,
) -> Iterator[StepRecord]:
    """Run steps one by one and say what each came to."""
    batches, shardings = setup.batches, setup.step.batch_shardings
    # All at once: a schedule is JAX code, and would compile and run beside the steps.
    rates = np.asarray(learning_rate(settings)(jnp.arange(settings.steps, dtype=jnp.int32)))
    tokens = batches.batch_seqs * batches.seq_len
    for index in range(settings.steps):
        start = time.perf_counter()
        progress.state, metrics = compiled(progress.state, batch)
        # The next batch is read while the devices work.
        batch = batches.global_batch(index + 1, shardings)
        loss = float(metrics.loss)
        step_s = time.perf_counter() - start
        progress.losses.append(loss)
        progress.step_s.append(step_s)
        yield StepRecord(
            step=index + 1,
            tokens=tokens * (index + 1),
            loss=loss,
            grad_norm=float(metrics.grad_norm),
            learning_rate=float(rates[index]),
            step_s=step_s,
            tokens_per_s=tokens / step_s,
            mfu=predicted.mfu(step_s),
            predicted_step_s=predicted.step_s,
        )
        if progress.stop or not math.isfinite(loss):
            return


@contextmanager
def _ctrl_c(progress: _Progress, live: LiveLine) -> Iterator[None]:
    """The first Ctrl-C asks the loop to stop after its step: an interrupted step would lose its state."""

    def ask(signum: int, frame: FrameType | None) -> None:
        if progress.stop:
            raise KeyboardInterrupt
        progress.stop = True
        live.say("stopping after this step; Ctrl-C again stops at once")

    try:
        before = signal.signal(signal.SIGINT, ask)
    except ValueError:  # only the main thread may set handlers; elsewhere Ctrl-C is not ours to handle
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _memory(state: State, batch: Batch, compiled: Any) -> MemoryUse:
    device = jax.local_devices()[0]

    def held(tree: Any) -> int:
        shards = (shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards)
        return sum(shard.data.nbytes for shard in shards if shard.device == device)

    analysis = compiled.memory_analysis()
    return MemoryUse(
        weights_bytes=held(state.params),
        optimizer_bytes=held(state.opt_state),
        batch_bytes=held(batch),
        temporaries_bytes=int(analysis.temp_size_in_bytes) if analysis is not None else None,
    )


def _validation(setup: _Setup, progress: _Progress, job: Job) -> float | None:
    held_out = setup.store.held_out()
    return held_out_loss(setup.step, progress.state.params, held_out, batch_seqs=job.batch_seqs, seq_len=job.seq_len)


def _result(
    path: Path,
    settings: TrainSettings,
    job: Job,
    predicted: Predicted,
    progress: _Progress,
    validation: float | None,
) -> TrainResult:
    step_s = typical_step_s(progress.step_s)
    return TrainResult(
        run=str(path),
        steps=len(progress.losses),
        stopped=len(progress.losses) < settings.steps,
        losses=progress.losses,
        validation_loss=validation,
        step_s=step_s,
        step_s_predicted=predicted.step_s,
        tokens_per_s=job.tokens_per_step / step_s if step_s else None,
        mfu=predicted.mfu(step_s) if step_s else None,
        compile_s=progress.compile_s,
        memory=progress.memory,
    )


def _diverged(progress: _Progress, settings: TrainSettings, path: Path) -> str:
    return (
        f"the loss is {progress.losses[-1]} at step {len(progress.losses)} with learning_rate="
        f"{settings.learning_rate:g} and warmup_steps={settings.warmup_steps}. Use a lower rate or a longer warmup; "
        f"the metrics are in {path}."
    )
