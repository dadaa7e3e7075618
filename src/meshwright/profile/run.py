"""Runs steps of a plan under the profiler, and keeps their trace, program, times and memory."""

import time
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import jax
import msgspec

from meshwright.core.errors import InputError
from meshwright.core.host_memory import keep_freed_memory
from meshwright.core.progress import tracked, working
from meshwright.parallel.train_step import TrainStep
from meshwright.profile.events import STEP, STEP_END, newest_trace
from meshwright.profile.hlo import parse_program
from meshwright.profile.memory import MAX_OWNERS, MemoryProfile, Sampler, temporary_owners
from meshwright.profile.subjects import Subject, Training
from meshwright.spec.job import Job

WARMUP_STEPS = 3
CPU_WARMUP_STEPS = 5
"""Warm-up steps on CPU, where the first steps also cause page faults on all their memory."""
HLO_FILE = "program.hlo.txt"


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a profiled run: files in a folder, and seconds on the host's clock.

    ``step_s`` has the seconds of the last half of the warm-up steps, ``profiled_s`` of the steps under the profiler. In
    these ``cores`` is the mean number of busy CPU cores, and ``host_s`` the CPU time per step of the thread that
    dispatches steps; None if they were not measured.
    """

    trace: Path
    hlo: Path
    step_s: tuple[float, ...]
    profiled_s: tuple[float, ...]
    memory: MemoryProfile
    cores: float | None = None
    host_s: float | None = None


def warmup_steps() -> int:
    """Returns the default number of warm-up steps on the backend."""
    return CPU_WARMUP_STEPS if jax.default_backend() == "cpu" else WARMUP_STEPS


class TracedSteps:
    """Profiles some steps: samples memory and counts warm-up steps, then traces ``steps`` more.

    The caller runs the steps and calls `step_done` after each. Unless steps are annotated, a step is the time between
    two end marks, which includes the host's work between steps.
    """

    def __init__(self, folder: Path, *, steps: int, warmup: int) -> None:
        self.folder, self.steps, self.warmup = folder, steps, warmup
        self.sampler = Sampler()
        self.warm_s: list[float] = []
        self.profiled_s: list[float] = []
        self.cores: float | None = None
        self.host_s: float | None = None
        self._trace: ExitStack | None = None
        self._began = (0.0, 0.0, 0.0)

    def __enter__(self) -> "TracedSteps":
        self.sampler.__enter__()
        self.sampler.mark("start")
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def done(self) -> int:
        """Number of steps that have ended."""
        return len(self.warm_s) + len(self.profiled_s)

    def step_done(self, step_s: float) -> None:
        """Counts a finished step; starts the profiler after the last warm-up step, stops it after ``steps`` more."""
        if self._trace:
            self.profiled_s.append(step_s)
            _mark_end(self.done)
            if len(self.profiled_s) == self.steps:
                self.close()
        elif self.done < self.warmup:
            self.warm_s.append(step_s)
            self.sampler.mark(f"after step {self.done}")
            if self.done == self.warmup:
                # sampling stops here: the profiler keeps its events in the memory of the process
                self.sampler.close()
                self._trace = ExitStack()
                self._trace.enter_context(traced(self.folder))
                self._began = _clocks()
                _mark_end(self.done)

    def close(self) -> None:
        """Stops tracing and sampling; records the busy cores and the host's seconds per step."""
        if self._trace:
            wall_s, busy_s, own_s = (now_s - began_s for now_s, began_s in zip(_clocks(), self._began, strict=True))
            self.cores, self.host_s = busy_s / wall_s, own_s / max(len(self.profiled_s), 1)
            self._trace.close()
            self._trace = None
        self.sampler.close()

    def recording(self, step: TrainStep, job: Job) -> Recording:
        """Returns the recording; compiles the step again for its text. Raises InputError if no step was profiled."""
        if not self.profiled_s:
            raise InputError(f"the run ended after {self.done} steps, before one was profiled. Give it more --steps.")
        return self.recorded(Training(step, job), step.lower(job.batch_seqs, job.seq_len).compile())

    def recorded(self, subject: Subject, compiled: jax.stages.Compiled) -> Recording:
        """Writes the program's text beside the trace, and returns the recording with the owners of the peak memory."""
        program_text, hlo_path, sampler = compiled.as_text() or "", self.folder / HLO_FILE, self.sampler
        hlo_path.write_text(program_text, encoding="utf-8")
        temporaries, live_bytes = temporary_owners(parse_program(program_text))
        owners = sorted([*subject.owners(), *temporaries], key=lambda owner: -owner.num_bytes)
        analysis = compiled.memory_analysis()
        memory = MemoryProfile(
            counted=sampler.counted,
            samples=tuple(sampler.samples),
            marks=tuple(sampler.marks),
            owners=tuple(owners[:MAX_OWNERS]),
            arguments_bytes=float(analysis.argument_size_in_bytes) if analysis is not None else None,
            temporaries_bytes=float(analysis.temp_size_in_bytes) if analysis is not None else None,
            live_bytes=live_bytes,
        )
        return Recording(
            trace=newest_trace(self.folder),
            hlo=hlo_path,
            step_s=tuple(self.warm_s[len(self.warm_s) // 2 :]) if self.warmup > 1 else (),
            profiled_s=tuple(self.profiled_s),
            memory=memory,
            cores=self.cores,
            host_s=self.host_s,
        )


def record_steps(subject: Subject, *, folder: Path, steps: int, warmup: int) -> Recording:
    """Runs warm-up steps and then ``steps`` under the profiler, on random tokens; writes the trace to ``folder``."""
    if jax.default_backend() == "cpu":
        keep_freed_memory()
    folder.mkdir(parents=True, exist_ok=True)
    with TracedSteps(folder, steps=steps, warmup=warmup) as traced_steps:
        subject.begin(0)
        traced_steps.sampler.mark("compile")
        with working("compiling the step"):
            compiled = subject.compile()
        traced_steps.sampler.mark("step 1")
        for step_index in tracked(range(warmup + steps), "running steps"):
            with jax.profiler.TraceAnnotation(STEP, step=step_index):
                start_s = time.perf_counter()
                subject.advance(compiled)
                step_s = time.perf_counter() - start_s
            traced_steps.step_done(step_s)
    return traced_steps.recorded(subject, compiled)


def _clocks() -> tuple[float, float, float]:
    """Returns wall-clock seconds, and CPU seconds of the process and of this thread."""
    return time.perf_counter(), time.process_time(), time.thread_time()


def traced(folder: Path) -> AbstractContextManager[None]:
    """Context in which JAX writes a trace to the folder, without the Python tracer, which would slow the host down."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    return jax.profiler.trace(folder, profiler_options=options)


def _mark_end(step_index: int) -> None:
    with jax.profiler.TraceAnnotation(STEP_END, step=step_index):
        pass
