"""Trains a model and leaves a run folder from which training can be resumed."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import jax
import msgspec

from meshwright.core.files import cache_folder
from meshwright.core.host_memory import keep_freed_memory
from meshwright.core.toml_file import dump_toml
from meshwright.nn.hf.tokenizer import TOKENIZER
from meshwright.parallel.mesh import keep_compiled_programs
from meshwright.parallel.processes import is_first, shared, wait_for_all
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.plan_file import Prediction
from meshwright.spec.strategy import Strategy
from meshwright.train.checkpoint import Checkpoints
from meshwright.train.data.tokenizer import save_tokenizer
from meshwright.train.interrupt import stop_on_signals
from meshwright.train.record.metrics import LiveLine
from meshwright.train.record.result import Stopwatch, TrainResult
from meshwright.train.record.run_folder import RESOLVED, RunFolder, create_run_folder, held_alone, require_same_model
from meshwright.train.record.tracking import Tracking, require_trackers
from meshwright.train.run import OnStep, Run
from meshwright.train.settings import TrainSettings
from meshwright.train.setup import prepare, require_same_tokenizer, start_state


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

    ``resume`` is the folder of an earlier run instead, which continues after its newest checkpoint. ``texts`` are
    further files for the folder by name: the plan, the resolved configuration. Ctrl-C or SIGTERM ends the run after the
    current step with everything written. Raises CannotRunError, with the metrics written, when the loss or the gradient
    is not finite; the newest checkpoint is of an earlier step.
    """
    watch = Stopwatch()
    keep_compiled_programs(cache_folder())
    require_trackers(settings.track)
    if resume:
        require_same_model(resume, model)
    setup = prepare(model, strategy, job, settings)
    if jax.default_backend() == "cpu":
        keep_freed_memory()
    if resume:
        require_same_tokenizer(resume, setup.data)
    path = resume or Path(shared(lambda: str(create_run_folder(run_root, model.name))))
    resolved = {"model": model, "strategy": strategy, "job": job, "train": settings}
    texts = {RESOLVED: dump_toml(resolved), **(texts or {})}
    with ExitStack() as stack:
        # Process 0 locks the folder for all before any file in it changes.
        shared(lambda: str(stack.enter_context(held_alone(path))))
        kept = stack.enter_context(Checkpoints(path, keep=settings.keep_checkpoints, keep_every=settings.keep_every))
        position, state = start_state(setup, kept)
        step = position.step if resume else None
        folder = stack.enter_context(RunFolder(path, texts, step=step, writes=is_first()))
        live = stack.enter_context(LiveLine(steps=settings.steps, every=settings.log_every, shown=is_first()))
        tracked = settings.track if is_first() else ()
        tracking = stack.enter_context(Tracking(tracked, path, msgspec.to_builtins(resolved)))
        request = stack.enter_context(stop_on_signals(live.say))
        if is_first():
            save_tokenizer(setup.data.tokenizer, path / TOKENIZER)
        run = Run(
            setup=setup,
            folder=folder,
            live=live,
            tracking=tracking,
            checkpoints=kept,
            watch=watch,
            request=request,
            predicted=predicted,
            on_step=on_step,
            position=position,
            state=state,
            resumed_from=step,
        )
        run.steps()
        result = run.finish()
    wait_for_all("the end of the run")
    return result
