"""Trains a model step by step, and leaves a run folder from which training can be resumed.

Steps are dispatched, awaited and recorded; checkpoints and evaluations come between them.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import msgspec
import numpy as np

from meshwright.core.errors import CannotRunError
from meshwright.core.files import cache_folder
from meshwright.core.host_memory import keep_freed_memory
from meshwright.core.progress import working
from meshwright.core.toml_file import sealed_toml
from meshwright.core.units import format_seconds
from meshwright.islands.ledger import SampleBlock
from meshwright.islands.watch import GoBackError
from meshwright.nn.hf.beside import keep_beside
from meshwright.nn.hf.gguf import as_folder
from meshwright.nn.hf.tokenizer import TOKENIZER
from meshwright.nn.weights import Params
from meshwright.parallel.mesh import keep_compiled_programs
from meshwright.parallel.processes import is_first, shared, wait_for_all
from meshwright.parallel.train_step import Batch, State
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.prediction import Prediction
from meshwright.spec.strategy import Strategy
from meshwright.spec.weights import has_frozen_matrices
from meshwright.train.bad_loss import LossWatch
from meshwright.train.checkpoint import Checkpoints, Position
from meshwright.train.data.batches import Ahead
from meshwright.train.data.tokenizer import save_tokenizer
from meshwright.train.interrupt import StopRequest, stop_on_signals
from meshwright.train.optimizers.schedules import learning_rate
from meshwright.train.optimizers.table import averaged
from meshwright.train.record.health import where_not_finite
from meshwright.train.record.metrics import (
    EvaluationRecord,
    LiveLine,
    StepRecord,
    on_host,
    over_layers,
    typical_step_s,
)
from meshwright.train.record.result import MemoryUse, Stopwatch, TrainResult, measured_memory, peak_bytes
from meshwright.train.record.run_folder import RESOLVED, RunFolder, create_run_folder, held_alone, require_same_model
from meshwright.train.record.tracking import Tracking, require_trackers
from meshwright.train.settings import TrainSettings, with_whole_paths
from meshwright.train.setup import Setup, prepare, require_same_tokenizer, start_state, start_words
from meshwright.train.weights import save_base, save_weights

OnStep = Callable[[StepRecord], None]
LOSS_WEIGHTS = ("mtp_weight", "z_loss", "balance_loss", "router_z_loss")
POLL_S = 0.001
_averaged = jax.jit(averaged)


class Flight(NamedTuple):
    """A dispatched step of ``samples`` samples; ``end`` is the time at which it was found finished before its loss was
    read, else None. ``blocks`` are the samples of each island, if there are several."""

    number: int
    start: float
    batch: Batch
    metrics: Any
    samples: int
    end: float | None = None
    blocks: dict[int, SampleBlock] | None = None


def steps_ahead() -> int:
    """Returns the number of steps that are dispatched beyond the one that runs.

    One, so that devices do not wait for the host to read a loss. Zero on CPU, where host and devices share cores, and
    two programs with collectives may wait for each other's threads.
    """
    return 0 if jax.devices()[0].platform == "cpu" else 1


@dataclass
class Run:
    """The state of a run, which is now at ``position``; ``resumed_from`` is the step that it was resumed at."""

    setup: Setup
    folder: RunFolder
    live: LiveLine
    tracking: Tracking
    checkpoints: Checkpoints
    watch: Stopwatch
    request: StopRequest
    predicted: Prediction[float] | None
    on_step: OnStep | None
    position: Position
    state: State
    resumed_from: int | None
    flying: deque[Flight] = field(default_factory=deque)
    step_s: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    evaluations: list[EvaluationRecord] = field(default_factory=list)
    memory: MemoryUse | None = None
    last_end: float = 0.0
    num_islands: int = 1
    beside: Callable[[], Any] = lambda: None  # further arrays for checkpoints

    def __post_init__(self) -> None:
        self.job, self.settings = self.setup.job, self.setup.settings
        self.rates = learning_rate(self.settings)(np.arange(self.settings.steps))
        self.losses = list(self.folder.losses)
        self.loss_watch, self._program = LossWatch(self.settings), None

    # -- steps ---------------------------------------------------------------------------------------

    def steps(self) -> None:
        """Compiles the step, then runs steps until the last, a request to stop, or a bad loss that ends the run."""
        while True:
            try:
                return self._steps()
            except GoBackError as error:
                self._go_back(str(error))

    def _go_back(self, fault: str) -> None:
        """Restores the newest checkpoint, and continues with data after all samples used so far."""
        self.flying.clear()
        self.checkpoints.wait()
        for leaf in jax.tree.leaves(self.state):
            leaf.delete()  # two states may be more than there is room for
        samples, (position, self.state) = self.position.samples, start_state(self.setup, self.checkpoints)
        self.position = msgspec.structs.replace(position, samples=samples)
        del self.losses[position.step :]
        self.folder.go_back(position.step)
        self.live.say(f"{fault}; back to step {position.step}, without samples {position.samples} to {samples - 1}")
        self.last_end = time.perf_counter()

    def _steps(self) -> None:
        shardings = self.setup.step.batch_shardings
        with self.setup.batches.ahead(self.position.samples, shardings) as reader:
            if self.position.step >= self.settings.steps:
                return
            batch = self._read(reader)
            compiled_step = self._program = self._program or self._compile(batch)
            for step in range(self.position.step + 1, self.settings.steps + 1):
                start_s = time.perf_counter()
                self.state, metrics = compiled_step(self.state, batch)
                self.flying.append(Flight(step, start_s, batch, metrics, self.job.batch_seqs))
                # what needs the state of this step, before the next consumes it; `finish` does the last
                due_acts = [
                    act for every, act in self.tasks() if every and step % every == 0 and step < self.settings.steps
                ]
                self.land(0 if due_acts else steps_ahead())
                if self.request.stops_after(step):
                    break
                for act in due_acts:
                    act()
                if step < self.settings.steps:
                    batch = self._read(reader)
            self.land()

    def _compile(self, batch: Batch) -> Any:
        with self.watch.timed("compile"), working("compiling the step"):
            compiled_step = self.setup.step.compile.lower(self.state, batch).compile()
            if self.setup.held_out and self.settings.evaluate_every:
                self.setup.held_out.compile(self._evaluated_weights())
        self.memory = measured_memory(self.state, batch, compiled_step)
        resume_text = f"goes on after step {self.position.step}, " if self.position.step else ""
        compile_text = format_seconds(self.watch.seconds("compile"))
        self.live.say(f"{self.folder.path}: {resume_text}compiled in {compile_text}")
        return compiled_step

    def _read(self, reader: Ahead) -> Batch:
        """Returns the next batch. Waiting for it while devices are idle counts as "data", not as part of a step."""
        while self.flying and not reader.is_ready and not self.flying[-1].metrics.loss.is_ready():
            time.sleep(POLL_S)
        start_s = time.perf_counter()
        is_idle = not self.flying or self.flying[-1].metrics.loss.is_ready()
        if self.flying and is_idle:
            self.flying[-1] = self.flying[-1]._replace(end=start_s)
        _, batch = next(reader)
        if is_idle:
            self.watch.add("data", time.perf_counter() - start_s)
        return batch

    def land(self, remaining: int = 0) -> None:
        """Waits for the oldest steps until ``remaining`` are in flight, and records each."""
        while len(self.flying) > remaining:
            flight = self.flying.popleft()
            record = self._record(flight)
            self.folder.record(record)
            self.live.show(record)
            self.tracking.record(record)
            if not flight.blocks:  # islands judge together
                self._judge(flight, record)
            try:
                if self.on_step:
                    self.on_step(record)
            except KeyboardInterrupt:
                # The state is whole between steps, so this ends like a Ctrl-C that the handler received.
                self.request.ask()

    def _judge(self, flight: Flight, record: StepRecord) -> None:
        step, last = record.step, self.position.samples - 1
        line = self.loss_watch.judge(
            step, record.loss, record.grad_norm, lambda fault: self.give_up(fault, step, flight.batch)
        )
        if line:
            self.live.say(f"{line}, and samples {last + 1 - flight.samples} to {last} are skipped")

    def _record(self, flight: Flight) -> StepRecord:
        metrics = on_host(flight.metrics)
        end_s = flight.end or time.perf_counter()
        # A step dispatched while the previous one ran began when that one ended.
        step_s = end_s - max(flight.start, self.last_end)
        self.last_end = end_s
        num_tokens = flight.samples * self.job.seq_len
        self.losses.append(float(metrics.loss))
        self.step_s.append(step_s)
        self.position = msgspec.structs.replace(
            self.position,
            step=flight.number,
            samples=self.position.samples + flight.samples,
            tokens=self.position.tokens + num_tokens,
        )
        measured_fields = self.predicted.measured(step_s) if self.predicted else {}
        extras = over_layers(metrics.extras)
        self.loads += [extras[name] for name in ("load_max_over_mean",) if name in extras]
        return StepRecord(
            step=flight.number,
            tokens=self.position.tokens,
            loss=float(metrics.loss),
            grad_norm=float(metrics.grad_norm),
            learning_rate=float(self.rates[flight.number - 1]),
            step_s=step_s,
            tokens_per_s=num_tokens / step_s,
            **measured_fields,
            predicted_step_s=self.predicted.step_s if self.predicted else None,
            extras=extras,
            islands=flight.blocks or {},
        )

    # -- between steps -------------------------------------------------------------------------------

    def tasks(self) -> tuple[tuple[int, Callable[[], None]], ...]:
        """Returns (number of steps, function to call every so many steps) of each task; 0 for never."""
        settings = self.settings
        return (
            (settings.checkpoint_every, self.save),
            (settings.local_every, self.save_near),
            (settings.evaluate_every, self.evaluate),
        )

    def save(self, *, near: bool = False) -> None:
        with self.watch.timed("checkpoint"):
            saved_state = self.state._replace(params=self.setup.step.saved(self.state.params))
            save = self.checkpoints.save_near if near else self.checkpoints.save
            save(saved_state, self.position, to_canonical=self.setup.step.to_canonical, beside=self.beside())

    def save_near(self) -> None:
        before = self.checkpoints.near_fault
        self.save(near=True)
        if (fault := self.checkpoints.near_fault) != before:
            self.live.say(f"{fault}; training goes on without states there")

    def _evaluated_weights(self) -> Params:
        return _averaged(self.state.opt_state, self.state.params) if self.settings.average else self.state.params

    def evaluate(self) -> None:
        if self.setup.held_out is None:
            return
        with self.watch.timed("evaluation"):
            loss = self.setup.held_out.loss(self._evaluated_weights())
        record = EvaluationRecord(step=self.position.step, tokens=self.position.tokens, loss=loss)
        self.evaluations.append(record)
        self.folder.evaluated(record)
        self.tracking.evaluated(record)
        if record.step < self.settings.steps:  # the last one is in the result
            self.live.say(f"step {record.step}: held-out loss {loss:.3f}")

    # -- the end -------------------------------------------------------------------------------------

    def finish(self) -> TrainResult:
        """Runs the last evaluation, writes the last checkpoint, the weights and the summary; returns the result."""
        is_stopped = self.position.step < self.settings.steps
        if not is_stopped and self.position.step:
            # A request to stop does not wait for the evaluation.
            self.evaluate()
        if self.position.step:
            self.save()
            with self.watch.timed("checkpoint"):
                self.checkpoints.wait()
                self.checkpoints.forget_near()
        with self.watch.timed("checkpoint"):
            weights = self.setup.step.to_canonical(self._evaluated_weights())
            save_weights(self.setup.step.model, weights, self.folder.path, base=self.settings.weights)
        result = self._result()
        self.folder.summarise({**msgspec.to_builtins(result), "diverged": False})
        return result

    def _result(self) -> TrainResult:
        lost_s, num_steps, typical_s = self.folder.lost_s, self.position.step, typical_step_s(self.step_s)
        measured_fields = self.predicted.measured(typical_s) if self.predicted and typical_s else {}
        goodput = self.watch.goodput(steps_s=sum(self.step_s), lost_steps=len(lost_s), lost_s=float(sum(lost_s)))
        is_evaluated = bool(self.evaluations) and self.evaluations[-1].step == num_steps
        peak = peak_bytes()
        return TrainResult(
            run=str(self.folder.path),
            steps=num_steps,
            stopped=num_steps < self.settings.steps,
            losses=list(self.losses),
            validation_loss=self.evaluations[-1].loss if is_evaluated else None,
            step_s=typical_s,
            step_s_predicted=self.predicted.step_s if self.predicted else None,
            tokens_per_s=self.job.tokens_per_step / typical_s if typical_s else None,
            **measured_fields,
            compile_s=goodput.compile_s,
            memory=msgspec.structs.replace(self.memory, peak_bytes=peak) if self.memory and peak else self.memory,
            goodput=goodput,
            evaluations=list(self.evaluations),
            resumed_from=self.resumed_from,
            epochs=self.setup.batches.epochs(self.position.samples),
            processes=jax.process_count() * self.num_islands,
            skipped_records=self.setup.data.skipped_records,
            load_max_over_mean=typical_step_s(self.loads),
        )

    def give_up(self, fault: str, step: int, batch: Batch) -> None:
        """Writes the summary, and raises CannotRunError for a bad loss, naming an array that is not finite."""
        self.folder.summarise({**msgspec.to_builtins(self._result()), "diverged": True})
        place_text = f": {where_not_finite(self.setup.step, self.state, batch)}" if batch else ""
        settings, held_steps = self.settings, self.checkpoints.steps()
        setting_of = {"mtp_weight": self.setup.step.model.mtp_weight, **msgspec.structs.asdict(settings)}
        remedies = "".join(f", or a lower {name}={setting_of[name]:g}" for name in LOSS_WEIGHTS if setting_of[name] > 1)
        saved_text = f"the checkpoint of step {held_steps[-1]} and the metrics are" if held_steps else "the metrics are"
        raise CannotRunError(
            f"{fault} at step {step} with learning_rate={settings.learning_rate:g} and "
            f"warmup_steps={settings.warmup_steps}{place_text}. Use a lower rate or a longer warmup{remedies}; "
            f"{saved_text} in {self.folder.path}."
        )


def train(
    model: Model,
    strategy: Strategy,
    job: Job,
    settings: TrainSettings,
    *,
    run_root: Path,
    resume: Path | None = None,
    predicted: Prediction[float] | None = None,
    on_step: OnStep | None = None,
    texts: Mapping[str, str] | None = None,
) -> TrainResult:
    """Trains, and leaves a run folder under ``run_root``. Writes nothing to standard output.

    ``resume`` is the folder of an earlier run, which continues there after its newest checkpoint. ``texts`` are further
    files for the folder by name, such as the plan. Ctrl-C or SIGTERM ends the run after the current step with
    everything written. Raises CannotRunError, after the metrics are written, for a loss or gradient that is not finite.
    """
    watch = Stopwatch()
    keep_compiled_programs(cache_folder())
    require_trackers(settings.track)
    settings = with_whole_paths(settings)
    if resume:
        require_same_model(resume, model)
    setup = prepare(model, strategy, job, settings)
    if jax.default_backend() == "cpu":
        keep_freed_memory()
    if resume:
        require_same_tokenizer(resume, setup.data)
    path = resume or Path(shared(lambda: str(create_run_folder(run_root, model.name))))
    compiler = setup.step.compiler
    resolved_tables = {"model": model, "strategy": strategy, "job": job, "train": settings, "compiler": compiler.used}
    texts = {RESOLVED: sealed_toml(resolved_tables), **(texts or {})}
    with ExitStack() as stack:
        # Process 0 locks the folder for all before any file in it changes.
        shared(lambda: str(stack.enter_context(held_alone(path))))
        store = stack.enter_context(open_checkpoints(path, settings))
        position, state = start_state(setup, store)
        from_step = position.step if resume else None
        folder = stack.enter_context(RunFolder(path, texts, step=from_step, writes=is_first()))
        live = stack.enter_context(LiveLine(steps=settings.steps, every=settings.log_every, shown=is_first()))
        tracker_names = settings.track if is_first() else ()
        tracking = stack.enter_context(Tracking(tracker_names, path, msgspec.to_builtins(resolved_tables)))
        request = stack.enter_context(stop_on_signals(live.say))
        few_text = f"no held-out loss: train.held_out={settings.held_out:g} gives too few rows for the mesh. Change it"
        notes = [few_text] if setup.data.held_out and not setup.held_out else []
        start_lines = [start_words(settings, model, position.step)]
        for line in [
            *store.passed_over,
            *folder.notes,
            *filter(None, start_lines),
            *setup.batches.notes,
            *compiler.notes,
            *notes,
        ]:
            live.say(line)
        if is_first() and setup.data.tokenizer:
            keep_tokenizer(setup.data.tokenizer, settings.tokenizer, path)
        if has_frozen_matrices(model) and not settings.weights and position.step == 0:
            save_base(model, setup.step.to_canonical(state.params), path)
        run = Run(setup, folder, live, tracking, store, watch, request, predicted, on_step, position, state, from_step)
        run.steps()
        result = run.finish()
    wait_for_all("the end of the run")
    return result


def open_checkpoints(path: Path, settings: TrainSettings) -> Checkpoints:
    """Opens the checkpoints of a run's folder; the settings say which are kept, and where."""
    keep, keep_every = settings.keep_checkpoints, settings.keep_every
    near = settings.local_folder
    return Checkpoints(path, keep=keep, keep_every=keep_every, trust=settings.trust_checkpoints, near=near)


def keep_tokenizer(tokenizer: Any, source: str, path: Path) -> None:
    """Writes a tokenizer to the run's folder, with related files (a chat template) of the folder of ``source``."""
    if source:
        source_path = as_folder(Path(source))
        keep_beside(source_path if source_path.is_dir() else source_path.parent, path, tokenizer)
    save_tokenizer(tokenizer, path / TOKENIZER)
