"""Steps of a plan under the profiler: the trace, the program that was traced, times and memory."""

import contextlib
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import msgspec

from meshwright.core.errors import InputError
from meshwright.core.host_memory import keep_freed_memory
from meshwright.parallel.generate_step import GenerateStep
from meshwright.parallel.train_step import TrainStep
from meshwright.profile.events import STEP, STEP_END, newest_trace
from meshwright.profile.hlo import parse_program
from meshwright.profile.memory import MAX_OWNERS, MemoryProfile, Sampler, temporary_owners
from meshwright.profile.subjects import Subject, subject_of
from meshwright.spec.job import Job

WARMUP_STEPS = 3
CPU_WARMUP_STEPS = 5
"""The first steps on CPU also fault in their memory, page by page."""
HLO_FILE = "program.hlo.txt"


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """What a profiled run leaves: files in a folder, and seconds on the clock of the host.

    ``step_s`` are warm steps without the profiler, ``profiled_s`` those with it. ``cores`` are the processor's cores
    that the process kept busy in those, None where that was not measured.
    """

    trace: Path
    hlo: Path
    step_s: tuple[float, ...]
    profiled_s: tuple[float, ...]
    memory: MemoryProfile
    cores: float | None = None

    @property
    def typical_s(self) -> float | None:
        """The median step without the profiler; None where none was timed."""
        return statistics.median(self.step_s) if self.step_s else None


def warmup_steps() -> int:
    """How many steps run before any counts."""
    return CPU_WARMUP_STEPS if jax.default_backend() == "cpu" else WARMUP_STEPS


def record_steps(
    step: TrainStep | GenerateStep,
    job: Job,
    *,
    folder: Path,
    steps: int = 3,
    warmup: int | None = None,
    seed: int = 0,
) -> Recording:
    """Run warm-up steps and then so many under the profiler, on random tokens; the trace lies in ``folder``.

    Raises InputError for no step to profile.
    """
    if steps < 1:
        raise InputError(f"steps={steps} profiles nothing. Give --steps 1 or more.")
    warmup = warmup_steps() if warmup is None else max(warmup, 1)
    if jax.default_backend() == "cpu":
        keep_freed_memory()
    folder.mkdir(parents=True, exist_ok=True)
    subject = subject_of(step, job)
    with Sampler() as sampler:
        sampler.mark("state")
        subject.begin(seed)
        sampler.mark("compile")
        compiled = subject.compile()
        warm = []
        for number in range(warmup):
            sampler.mark(f"step {number + 1}")
            warm.append(_timed(subject, compiled))
    # no samples from here: what the profiler keeps of the events is memory of the process too
    with traced(folder):
        busy_s = time.process_time()
        profiled = [_timed(subject, compiled, number) for number in range(steps)]
        busy_s = time.process_time() - busy_s
    return _recording(
        folder,
        subject,
        compiled,
        sampler,
        step_s=tuple(warm[len(warm) // 2 :]) if warmup > 1 else (),
        profiled_s=tuple(profiled),
        cores=busy_s / sum(profiled),
    )


def _timed(subject: Subject, compiled: Any, number: int | None = None) -> float:
    """Seconds of one step until its results are there; with a number, marked as a step in the trace."""
    mark = contextlib.nullcontext() if number is None else jax.profiler.TraceAnnotation(STEP, step=number)
    with mark:
        start = time.perf_counter()
        subject.advance(compiled)
        return time.perf_counter() - start


def start_trace(folder: Path) -> None:
    """Start the profiler without its Python tracer, which would slow the host down."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    jax.profiler.start_trace(folder, profiler_options=options)


@contextlib.contextmanager
def traced(folder: Path) -> Iterator[None]:
    """Everything inside is traced into the folder."""
    start_trace(folder)
    try:
        yield
    finally:
        jax.profiler.stop_trace()


class TracedSteps:
    """The steps ``first`` to ``first + steps - 1`` of a training run under the profiler, told after each step.

    A step lies between the marks at the end of the one before it and its own, so that what the host does in between is
    part of it.
    """

    def __init__(self, folder: Path, *, steps: int, warmup: int) -> None:
        self.folder, self.steps, self.warmup = folder, steps, warmup
        self.sampler = Sampler()
        self.warm_s: list[float] = []
        self.profiled_s: list[float] = []
        self.done = 0
        self.cores: float | None = None
        self._tracing = False
        self._began = (0.0, 0.0)

    def __enter__(self) -> "TracedSteps":
        self.sampler.__enter__()
        self.sampler.mark("start")
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def step_done(self, step_s: float) -> None:
        """One more step has ended."""
        self.done += 1
        if self._tracing:
            _mark_end(self.done)
            self.profiled_s.append(step_s)
        elif self.done <= self.warmup:
            self.sampler.mark(f"after step {self.done}")
            self.warm_s.append(step_s)
        if self.done == self.warmup:
            self.sampler.close()
            start_trace(self.folder)
            self._tracing = True
            self._began = (time.process_time(), time.perf_counter())
            _mark_end(self.done)
        elif self._tracing and len(self.profiled_s) == self.steps:
            self.close()

    def close(self) -> None:
        """Stop tracing and sampling; what was traced until then is kept."""
        if self._tracing:
            self._tracing = False
            busy_s, wall_s = time.process_time() - self._began[0], time.perf_counter() - self._began[1]
            self.cores = busy_s / wall_s
            jax.profiler.stop_trace()
        self.sampler.close()

    def recording(self, step: TrainStep, job: Job) -> Recording:
        """What was recorded, with the step compiled once more for its text: from the cache of compiled programs."""
        if not self.profiled_s:
            raise InputError(f"the run ended after {self.done} steps, before one was profiled. Give it more --steps.")
        compiled = step.lower(job.batch_seqs, job.seq_len).compile()
        return _recording(
            self.folder,
            subject_of(step, job),
            compiled,
            self.sampler,
            step_s=tuple(self.warm_s[len(self.warm_s) // 2 :]),
            profiled_s=tuple(self.profiled_s),
            cores=self.cores,
        )


def _mark_end(number: int) -> None:
    with jax.profiler.TraceAnnotation(STEP_END, step=number):
        pass


def _recording(folder: Path, subject: Subject, compiled: Any, sampler: Sampler, **seconds: Any) -> Recording:
    """What lies in the folder, the text of the program beside its trace, and who owns the peak of one device."""
    text = compiled.as_text() or ""
    (folder / HLO_FILE).write_text(text, encoding="utf-8")
    temporary, live = temporary_owners(parse_program(text))
    owners = sorted([*subject.owners(), *temporary], key=lambda owner: -owner.num_bytes)
    analysis = compiled.memory_analysis()
    memory = MemoryProfile(
        counted=sampler.counted,
        samples=tuple(sampler.samples),
        marks=tuple(sampler.marks),
        owners=tuple(owners[:MAX_OWNERS]),
        arguments_bytes=float(analysis.argument_size_in_bytes) if analysis is not None else None,
        temporaries_bytes=float(analysis.temp_size_in_bytes) if analysis is not None else None,
        live_bytes=live,
    )
    return Recording(trace=newest_trace(folder), hlo=folder / HLO_FILE, memory=memory, **seconds)
