"""Trains in islands: the leading island prints and writes the run's folder; if it leaves, another one leads."""

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import msgspec

from meshwright.core.digests import summed_line
from meshwright.core.errors import CannotRunError
from meshwright.core.files import cache_folder
from meshwright.core.toml_file import sealed_toml
from meshwright.islands.codec import codec_of
from meshwright.islands.exchange import Timeouts
from meshwright.islands.ledger import Ledger, SampleBlock, deal, num_samples
from meshwright.islands.member import Identity, Member
from meshwright.islands.rounds import Done, Rounds
from meshwright.islands.watch import GoBackError
from meshwright.parallel.mesh import keep_compiled_programs
from meshwright.parallel.processes import is_first, shared
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.prediction import Prediction
from meshwright.spec.strategy import Strategy
from meshwright.train.checkpoint import CHECKPOINTS, DAMAGED, NEAR, Checkpoints, StorageError
from meshwright.train.elastic.identity import settings_of
from meshwright.train.elastic.outer_work import OuterWork, outer_settings
from meshwright.train.elastic.work import GradientWork
from meshwright.train.interrupt import stop_on_signals
from meshwright.train.loop import Flight, OnStep, Run, keep_tokenizer, open_checkpoints
from meshwright.train.record.metrics import LiveLine, StepRecord
from meshwright.train.record.result import Stopwatch, TrainResult, measured_memory
from meshwright.train.record.run_folder import METRICS, RESOLVED, RunFolder, create_run_folder, held_alone
from meshwright.train.record.tracking import Tracking
from meshwright.train.settings import TrainSettings, with_whole_paths
from meshwright.train.setup import held_out, prepare, start_words

KEPT_STEPS = 1000
"""Newest steps that every island remembers, in case the leader dies before it has written their lines."""
LOOKED_FOR = 16
"""Steps between a leader's checks that its files still exist, in a run without regular checkpoints."""
NOT_WRITTEN = "no line of step"


class IslandRun(NamedTuple):
    """Arguments of an island's run: one island's strategy and job, the strategy of all ``islands``, folders."""

    model: Model
    strategy: Strategy
    job: Job
    settings: TrainSettings
    run_root: Path
    resume: Path | None
    predicted: Prediction[float] | None
    on_step: OnStep | None
    texts: Mapping[str, str]
    islands: Strategy


def train_island(identity: Identity, told: IslandRun) -> TrainResult | None:
    """Trains as one of several islands. Returns the result in the island that leads at the end, else None.

    ``told`` has the strategy and the batch of one island.
    """
    keep_compiled_programs(cache_folder())
    told = told._replace(settings=with_whole_paths(told.settings))
    return _Island(identity, told).train()


def say_on_stderr(line: str) -> None:
    """Prints a line on standard error."""
    print(line, file=sys.stderr, flush=True)


class _Island:
    """One island of a run; ``run`` is not None while it leads."""

    def __init__(self, identity: Identity, told: IslandRun) -> None:
        self.told, self.watch = told, Stopwatch()
        self.setup = prepare(told.model, told.strategy, told.job, told.settings)
        # as many rows as one mesh would read
        num_batches = told.settings.evaluate_batches * max(told.islands.num_islands, identity.count)
        rows = held_out(self.setup.step, self.setup.data.held_out, told.job, max_batches=num_batches)
        self.setup = self.setup._replace(held_out=rows)
        place = identity.island, jax.process_index()
        outer = outer_settings(told.islands, told.settings)
        with self.watch.timed("compile"):
            of_gradients = (self.setup, place, self._open_store)
            self.work = OuterWork(outer, *of_gradients) if outer else GradientWork(*of_gradients)
        period = outer.end(outer.fragments) - outer.end(outer.fragments - 1) if outer else 1  # the longest
        usual = Timeouts()
        self.member = Member(
            identity,
            process=place[1],
            processes=jax.process_count(),
            settings=settings_of(told, self.setup.step),
            timeouts=Timeouts(step_s=usual.step_s * period, start_s=usual.start_s * period),
            say=say_on_stderr,
        )
        codec = codec_of(told.islands.outer_bits)
        self.rounds = Rounds(self.member, self.work, codec=codec, on_done=self._done, on_world=self._world_begins)
        self.rounds.say, self.rounds.is_long = say_on_stderr, self._is_long
        self._end_of = outer.end if outer else lambda number: number
        if isinstance(self.work, OuterWork):
            self.work.begin_sum = self.rounds.begin_sum
        self.run: Run | None = None
        self.stack = ExitStack()
        self.path = told.resume
        self.recent: deque[tuple[Flight, int]] = deque(maxlen=KEPT_STEPS)
        self.last_end = time.perf_counter()
        self.fault = ""
        self.restored_from: Checkpoints | None = None
        self.step_s: list[float] = []
        self.result: TrainResult | None = None

    def train(self) -> TrainResult | None:
        """Runs to the last step, or until this island or all are asked to stop."""
        with stop_on_signals(lambda line: None) as self.request, self.stack:
            self.member.asks_stop = lambda: self.request.asked
            self.rounds.asks_stop = lambda: self.request.stops_after((self.rounds.step or 0) + 1)
            self.rounds.run(self.work.rounds)
            self.rounds.conclude(self._finish)
        return self.result

    # -- states ------------------------------------------------------------------------------------------

    def _open_store(self) -> Checkpoints:
        """Opens the run's checkpoints; called when no island has a state: at the start, and after going back."""
        self._let_go()  # all go back
        self._find_path()
        self._set_aside()
        self.restored_from = open_checkpoints(self.path or Path(), self.told.settings)
        return self.restored_from

    def _find_path(self) -> None:
        run = self.rounds.links.world.run
        if run:
            self.path = Path(run)
        elif self.path is None:
            told = self.told
            self.path = Path(shared(lambda: str(create_run_folder(told.run_root, told.model.name)))).absolute()
        self.member.note_run(str(self.path))

    # -- the leader ---------------------------------------------------------------------------------------

    def _set_aside(self) -> None:
        """Renames checkpoints of later steps than the last one whose state is known to be undamaged."""
        run = self.path or Path()
        tiers = [run, *([run / NEAR] if (run / NEAR).is_dir() else [])] if self.rounds.trusted >= 0 else []
        for folder in (folder for tier in tiers for folder in tier.glob(f"{CHECKPOINTS}/*[0-9]")):
            is_later = folder.name.isdecimal() and int(folder.name) > self._end_of(self.rounds.trusted)
            if is_first() and is_later:
                say_on_stderr(
                    f"checkpoint {folder.name} may hold a damaged state and is kept as {folder.name}{DAMAGED}"
                )
                folder.rename(folder.with_name(folder.name + DAMAGED))

    def _world_begins(self) -> None:
        if self.run and (not self.rounds.links.is_leader or self.rounds.trusted >= 0):
            self._let_go()
        if not self.run and self.rounds.links.is_leader:
            self._set_aside()
            self._find_path()
            try:
                self.run = self._lead()
            except (StorageError, OSError) as error:
                self._no_storage(error)

    def _no_storage(self, error: Exception) -> None:
        """Prints that files cannot be written; training continues, and the next checkpoint is tried."""
        fault = str(error).partition(" Make room")[0].rstrip(".")
        if fault != self.fault and is_first():
            say_on_stderr(f"{fault}; training goes on, and tries again")
        self.fault = fault

    def _let_go(self) -> None:
        self.run = None
        with contextlib.suppress(CannotRunError, OSError):  # another island leads and writes, or storage is lost
            self.stack.close()

    def _lead(self) -> Run:
        told, stack, path, position = self.told, self.stack, self.path, self.work.position
        assert path is not None
        assert position is not None
        settings = told.settings
        path.mkdir(parents=True, exist_ok=True)  # the storage may have been lost and remounted
        # A leader that hangs keeps the lock; it finds that it no longer leads before it writes.
        with contextlib.suppress(CannotRunError):
            shared(lambda: str(stack.enter_context(held_alone(path))))
        store = stack.enter_context(open_checkpoints(path, settings))
        store.forget_after(position.step)
        tables = {"model": told.model, "strategy": told.strategy, "job": told.job, "train": settings}
        is_new = not position.step and not (path / METRICS).exists()
        if is_first() and not is_new:
            (path / METRICS).touch()
            self._write_missing(path / METRICS)
        texts = {RESOLVED: sealed_toml(tables), **told.texts}
        folder = stack.enter_context(RunFolder(path, texts, step=None if is_new else position.step, writes=is_first()))
        live = stack.enter_context(LiveLine(steps=settings.steps, every=settings.log_every, shown=is_first()))
        tracking = stack.enter_context(
            Tracking(settings.track if is_first() else (), path, msgspec.to_builtins(tables))
        )
        notes = [note for note in folder.notes if NOT_WRITTEN not in note]
        live.say(f"island {self.member.place.island} leads; {path}")
        starts, self.restored_from = self.restored_from, None
        lines = [*starts.passed_over, f"goes on after step {position.step}"] if starts and position.step else []
        lines += filter(None, [start_words(settings, told.model, position.step)] if lines else [])
        for line in [*lines, *store.passed_over, *notes]:
            live.say(line)
        if is_first() and self.setup.data.tokenizer:
            keep_tokenizer(self.setup.data.tokenizer, settings.tokenizer, path)
        resumed = (position.step or None) if starts else None
        state = self.work.state
        assert state is not None
        run = Run(
            self.setup, folder, live, tracking, store, self.watch, self.request, told.predicted, told.on_step,
            position, state, resumed,
        )  # fmt: skip
        run.step_s = list(self.step_s)
        run.last_end, run.beside = self.last_end, self.work.beside
        run.num_islands = len(self.rounds.links.world.numbers)
        run.memory = measured_memory(state, {}, self.work.program)
        return run

    def _write_missing(self, metrics: Path) -> None:
        """Adds the metrics lines of steps that the previous leader died before writing."""
        last_step = max((line.get("step", 0) for line in _records(metrics)), default=0)
        with metrics.open("ab") as file:
            for flight, tokens in self.recent:
                if flight.number > last_step:
                    file.write(summed_line(_bare_record(flight, tokens, self.told.job)))

    def _is_long(self, number: int) -> bool:
        """True if a checkpoint or an evaluation follows an exchange."""
        first, last, settings = self._end_of(number - 1), self._end_of(number), self.told.settings
        periods = settings.checkpoint_every, settings.local_every, settings.evaluate_every
        return any(every and last // every > first // every for every in periods)

    # -- steps --------------------------------------------------------------------------------------------

    def _done(self, done: Done) -> None:
        """Records a round's steps, judges their losses, and runs checkpoints and evaluations that are due."""
        all_metrics, position = jax.block_until_ready(self.work.metrics), self.work.position
        assert position is not None
        first, job, end = position.step - len(all_metrics) + 1, self.told.job, time.perf_counter()
        step_s, flights = (end - self.last_end) / len(all_metrics), list[Flight]()
        tokens = position.tokens - job.seq_len * sum(count for block in done.blocks.values() for _, count in block)
        for i, metrics in enumerate(all_metrics):
            blocks = {island: _part(block, i, len(all_metrics)) for island, block in done.blocks.items()}
            num_samples = sum(count for block in blocks.values() for _, count in block)
            start = self.last_end + i * step_s
            tokens += num_samples * job.seq_len
            flights.append(Flight(first + i, start, {}, metrics, num_samples, start + step_s, blocks))
            while self.recent and self.recent[-1][0].number >= first + i:  # all went back
                self.recent.pop()
            self.recent.append((flights[-1], tokens))
        self.last_end = end
        self.step_s += [step_s] * len(flights)
        settings, every = self.told.settings, self.told.settings.checkpoint_every or LOOKED_FOR
        is_due = position.step // every > (first - 1) // every and jax.process_count() == 1
        run = self.run
        if is_due and self.rounds.links.is_leader and not (run and (run.folder.path / METRICS).is_file()):
            self._let_go()  # its files are gone
            self._world_begins()
            run = self.run
        elif run and self.work.state:
            run.flying += flights
            run.state = self.work.state
            run.land()
            run.position = position
        try:
            self._judge(flights)
        except GoBackError as error:
            self.work.skips_to = done.ledger
            if self.rounds.links.decides:
                say_on_stderr(
                    f"{error}; all go back to the newest checkpoint, and on with sample {done.ledger.samples}"
                )
            raise
        if run is None:
            return
        for every, act in run.tasks():
            if every and position.step // every > (first - 1) // every and position.step < settings.steps:
                run.state = self.work.shared_state()
                run.evaluate() if act == run.evaluate else self._save(act)

    def _judge(self, flights: list[Flight]) -> None:
        """Applies ``on_bad_loss`` to the steps; all islands have equal losses, and so decide alike."""
        for flight in flights:
            step, metrics = flight.number, flight.metrics
            numbers = step, float(metrics.loss), float(metrics.grad_norm)
            line = self.work.losses.judge(*numbers, partial(self._give_up, step))
            if line and self.rounds.links.decides:
                say_on_stderr(f"{line}, and its samples are skipped")

    def _give_up(self, step: int, fault: str) -> None:
        if self.run:
            self.run.give_up(fault, step, {})
        raise CannotRunError(f"{fault} at step {step}.")

    def _save(self, save: Callable[[], None]) -> None:
        try:
            try:
                save()
            except StorageError as error:  # perhaps from writing the previous checkpoint
                self._no_storage(error)
                save()
            self.fault = ""
        except StorageError as error:
            self._no_storage(error)

    def _finish(self) -> None:
        if self.rounds.links.is_leader and not self.run:
            self.run = self._lead()
        if self.run:
            self.run.state = self.work.shared_state()
            with contextlib.suppress(StorageError):  # of an earlier checkpoint
                self.run.checkpoints.wait()
            self.result = self.run.finish()


def _records(metrics: Path) -> list[dict[str, Any]]:
    lines = metrics.read_bytes().split(b"\n")[:-1]
    records = []
    for line in lines:
        with contextlib.suppress(msgspec.DecodeError):
            records.append(msgspec.json.decode(line))
    return [record for record in records if isinstance(record, dict)]


def _part(block: SampleBlock, index: int, num_steps: int) -> SampleBlock:
    """Returns the samples of a block that inner step ``index`` of ``num_steps`` uses."""
    size = num_samples(block) // num_steps
    return deal(Ledger(postponed=block), dict.fromkeys(range(index + 1), size))[0][index] if block else ()


def _bare_record(flight: Flight, tokens: int, job: Job) -> StepRecord:
    """Returns the metrics line of a step in which this island did not lead; its learning rate is 0."""
    step_s = max((flight.end or 0.0) - flight.start, 1e-9)
    num_tokens = flight.samples * job.seq_len
    return StepRecord(
        step=flight.number,
        tokens=tokens,
        loss=float(flight.metrics.loss),
        grad_norm=float(flight.metrics.grad_norm),
        learning_rate=0.0,
        step_s=step_s,
        tokens_per_s=num_tokens / step_s,
        predicted_step_s=None,
        islands=flight.blocks or {},
    )
