"""A run in islands: who leads it prints and writes its folder; when that island leaves, another does."""

import contextlib
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import jax
import msgspec

from meshwright.core.digests import summed_line
from meshwright.core.errors import CannotRunError
from meshwright.core.files import cache_folder
from meshwright.core.toml_file import sealed_toml
from meshwright.islands.member import Identity, Member
from meshwright.islands.rounds import Done, Rounds
from meshwright.parallel.mesh import keep_compiled_programs
from meshwright.parallel.processes import is_first, shared
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.prediction import Prediction
from meshwright.spec.strategy import Strategy
from meshwright.train.checkpoint import Checkpoints, Position
from meshwright.train.elastic.identity import settings_of
from meshwright.train.elastic.work import GradientWork
from meshwright.train.interrupt import stop_on_signals
from meshwright.train.loop import Flight, OnStep, Run, keep_tokenizer
from meshwright.train.record.metrics import LiveLine, StepRecord
from meshwright.train.record.result import Stopwatch, TrainResult, measured_memory
from meshwright.train.record.run_folder import METRICS, RESOLVED, RunFolder, create_run_folder, held_alone
from meshwright.train.record.tracking import Tracking
from meshwright.train.settings import TrainSettings, with_whole_paths
from meshwright.train.setup import prepare, start_state

KEPT_RECORDS = 16
"""Newest steps that every island remembers, for the case that the leader died before it wrote their lines."""
NOT_WRITTEN = "no line of step"


class IslandRun(NamedTuple):
    """What an island is told: the plan of one island, and where the run's files go."""

    model: Model
    strategy: Strategy
    job: Job
    settings: TrainSettings
    run_root: Path
    resume: Path | None
    predicted: Prediction[float] | None
    on_step: OnStep | None
    texts: Mapping[str, str]


def train_island(identity: Identity, told: IslandRun) -> TrainResult | None:
    """Trains as one of several islands. Returns the result in the island that leads at the end, None in the others.

    ``told`` has the strategy and the batch of one island.
    """
    keep_compiled_programs(cache_folder())
    told = told._replace(settings=with_whole_paths(told.settings))
    return _Island(identity, told).train()


class _Island:
    """One island; `run` is there while it leads."""

    def __init__(self, identity: Identity, told: IslandRun) -> None:
        self.told, self.watch = told, Stopwatch()
        self.setup = prepare(told.model, told.strategy, told.job, told.settings)
        place = identity.island, jax.process_index()
        with self.watch.timed("compile"):
            self.work = GradientWork(self.setup, place, self._restored)
        self.member = Member(
            identity, process=place[1], processes=jax.process_count(), settings=settings_of(told, self.setup.step)
        )
        self.rounds = Rounds(self.member, self.work, on_done=self._done, on_world=self._world_begins)
        self.run: Run | None = None
        self.stack = ExitStack()
        self.path = told.resume
        self.recent: deque[tuple[Done, Flight]] = deque(maxlen=KEPT_RECORDS)
        self.last_end = time.perf_counter()
        self.result: TrainResult | None = None

    def train(self) -> TrainResult | None:
        """Runs to the last step, or until one island is asked to stop."""
        with stop_on_signals(lambda line: None) as self.request, self.stack:
            self.rounds.asks_stop = lambda: self.request.stops_after((self.rounds.step or 0) + 1)
            self.rounds.run(self.told.settings.steps)
            self.rounds.conclude(self._finish)
        return self.result

    # -- states ------------------------------------------------------------------------------------------

    def _restored(self) -> tuple[Position, Any]:
        """Returns the newest checkpoint of the run, or the first state; called where no island has a state."""
        self._find_path()
        with Checkpoints(self.path or Path(), keep=self.told.settings.keep_checkpoints) as store:
            return start_state(self.setup, store)

    def _find_path(self) -> None:
        run = self.rounds.links.world.run
        if run:
            self.path = Path(run)
        elif self.path is None:
            told = self.told
            self.path = Path(shared(lambda: str(create_run_folder(told.run_root, told.model.name)))).absolute()
        self.member.note_run(str(self.path))

    # -- the leader ---------------------------------------------------------------------------------------

    def _world_begins(self) -> None:
        if self.run and not self.rounds.links.is_leader:
            self.run = None
            with contextlib.suppress(CannotRunError):  # another leads, and writes its own
                self.stack.close()
        elif not self.run and self.rounds.links.is_leader:
            self._find_path()
            self.run = self._lead()

    def _lead(self) -> Run:
        told, stack, path, position = self.told, self.stack, self.path, self.work.position
        assert path is not None
        assert position is not None
        settings = told.settings
        # A leader that is stopped but not dead keeps the lock; it finds out that it is out before it writes.
        with contextlib.suppress(CannotRunError):
            shared(lambda: str(stack.enter_context(held_alone(path))))
        store = stack.enter_context(Checkpoints(path, keep=settings.keep_checkpoints, keep_every=settings.keep_every))
        tables = {"model": told.model, "strategy": told.strategy, "job": told.job, "train": settings}
        is_new = not (path / METRICS).exists()
        if is_first() and not is_new:
            self._write_missing(path / METRICS)
        texts = {RESOLVED: sealed_toml(tables), **told.texts}
        folder = stack.enter_context(RunFolder(path, texts, step=None if is_new else position.step, writes=is_first()))
        live = stack.enter_context(LiveLine(steps=settings.steps, every=settings.log_every, shown=is_first()))
        tracking = stack.enter_context(
            Tracking(settings.track if is_first() else (), path, msgspec.to_builtins(tables))
        )
        notes = [note for note in folder.notes if NOT_WRITTEN not in note]
        live.say(f"island {self.member.place.island} leads; {path}")
        for line in [*store.passed_over, *notes]:
            live.say(line)
        if is_first() and self.setup.data.tokenizer:
            keep_tokenizer(self.setup.data.tokenizer, settings.tokenizer, path)
        resumed = position.step or None
        state = self.work.state
        assert state is not None
        run = Run(
            self.setup, folder, live, tracking, store, self.watch, self.request, told.predicted, told.on_step,
            position, state, resumed,
        )  # fmt: skip
        run.last_end = self.last_end
        run.memory = measured_memory(state, {}, self.work.programs[0])
        return run

    def _write_missing(self, metrics: Path) -> None:
        """Adds the lines of steps that the leader before did, and died before it wrote."""
        last_step = max((line.get("step", 0) for line in _records(metrics)), default=0)
        with metrics.open("ab") as file:
            for done, flight in self.recent:
                if done.step > last_step:
                    file.write(summed_line(_bare_record(done, flight, self.told.job)))

    # -- steps --------------------------------------------------------------------------------------------

    def _done(self, done: Done) -> None:
        """Records a step, and does what is due after it."""
        metrics = jax.block_until_ready(self.work.metrics)
        num_samples = sum(count for block in done.blocks.values() for _, count in block)
        flight = Flight(done.step, self.last_end, {}, metrics, num_samples, time.perf_counter(), done.blocks)
        self.recent.append((done, flight))
        run, position, state = self.run, self.work.position, self.work.state
        self.last_end = flight.end or 0.0
        if run is None or position is None or state is None:
            return
        run.flying.append(flight)
        run.state = state
        run.land_all()
        run.position = position
        settings = self.told.settings
        for every, act in ((settings.checkpoint_every, run.save), (settings.evaluate_every, run.evaluate)):
            if every and done.step % every == 0 and done.step < settings.steps:
                act()

    def _finish(self) -> None:
        if self.run:
            self.result = self.run.finish()


def _records(metrics: Path) -> list[dict[str, Any]]:
    lines = metrics.read_bytes().split(b"\n")[:-1]
    records = []
    for line in lines:
        with contextlib.suppress(msgspec.DecodeError):
            records.append(msgspec.json.decode(line))
    return [record for record in records if isinstance(record, dict)]


def _bare_record(done: Done, flight: Flight, job: Job) -> StepRecord:
    """Returns the line of a step that this island did not lead."""
    step_s = max((flight.end or 0.0) - flight.start, 1e-9)
    num_tokens = flight.samples * job.seq_len
    return StepRecord(
        step=done.step,
        tokens=done.ledger.samples * job.seq_len,
        loss=float(flight.metrics.loss),
        grad_norm=float(flight.metrics.grad_norm),
        learning_rate=0.0,
        step_s=step_s,
        tokens_per_s=num_tokens / step_s,
        predicted_step_s=None,
        islands=done.blocks,
    )
