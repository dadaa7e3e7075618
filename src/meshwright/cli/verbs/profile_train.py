"""`train --profile`: some steps of a training run under the profiler, and their report in the folder of the run."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.cli.verbs.profile_text import profile_json, profile_text
from meshwright.core.errors import InputError
from meshwright.report.answer import Piece
from meshwright.spec.plan_file import Plan

if TYPE_CHECKING:
    from meshwright.profile.run import TracedSteps
    from meshwright.profile.summary import Profile
    from meshwright.train.record.metrics import StepRecord

FOLDER = "profile"
"""Inside the folder of the run."""


class Report(msgspec.Struct, frozen=True):
    """A profile and the files that show it."""

    found: Any
    files: list[Path]

    def text(self) -> Iterator[Piece]:
        """The short form."""
        return profile_text(self.found, self.files)

    def as_json(self) -> dict[str, Any]:
        return profile_json(self.found, self.files)


class ProfiledRun:
    """A training run while some of its steps are traced."""

    def __init__(self, chosen: Plan, settings: dict[str, Any], traced: "TracedSteps") -> None:
        self.chosen, self.settings, self.traced = chosen, settings, traced

    def on_step(self, record: "StepRecord") -> None:
        """What the loop calls after every step."""
        self.traced.step_done(record.step_s)

    def report(self, run: Path) -> Report | None:
        """Analyse what was traced, and write it into the folder of the run; None in all processes but one."""
        from meshwright.parallel.processes import is_first
        from meshwright.profile.summary import analyse
        from meshwright.report.machine.profile_report import write_report
        from meshwright.train.settings import settings_from_table
        from meshwright.train.setup import prepare

        chosen = self.chosen
        setup = prepare(chosen.model, chosen.strategy, chosen.job, settings_from_table(self.settings))
        # compiled by every process: compilers of GPUs share the search for the fastest kernels among them
        recording = self.traced.recording(setup.step, chosen.job)
        if not is_first():
            shutil.rmtree(self.traced.folder, ignore_errors=True)
            return None
        found: Profile = analyse(chosen, recording.trace, recording.hlo, recording)
        folder = run / FOLDER
        files = write_report(found, folder)
        shutil.rmtree(folder / "trace", ignore_errors=True)
        shutil.move(self.traced.folder, folder / "trace")
        return Report(found, files)


@contextmanager
def profiled_run(
    chosen: Plan, settings: dict[str, Any], steps: int, *, runs: Path, resume: Path | None
) -> Iterator[ProfiledRun]:
    """A run whose steps are traced once it is warm, into a folder beside the runs until it has one of its own.

    The devices of the plan are there already. Raises InputError where the run has too few steps for it.
    """
    if steps < 1:
        raise InputError(f"--profile {steps} profiles nothing. Give 1 or more.")
    from meshwright.profile.run import TracedSteps, warmup_steps
    from meshwright.train.record.run_folder import finished_steps
    from meshwright.train.settings import settings_from_table

    done = (finished_steps(resume) or 0) if resume else 0
    wanted, warmup = settings_from_table(settings).steps, warmup_steps()
    if wanted - done < warmup + steps:
        raise InputError(
            f"--profile {steps} needs {warmup} steps to warm up and {steps} more, and the run has {wanted - done}. "
            f"Give --steps {done + warmup + steps} or more."
        )
    runs.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=runs, prefix=".profile-"))
    try:
        with TracedSteps(folder, steps=steps, warmup=warmup) as traced:
            yield ProfiledRun(chosen, settings, traced)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
