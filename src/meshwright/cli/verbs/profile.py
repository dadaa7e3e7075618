"""`meshwright profile`: a few steps of a plan under the profiler, each figure beside its prediction."""

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from meshwright.algebra.generation import Storage
from meshwright.cli.output import emit_json, json_option, say
from meshwright.cli.verbs.job_steps import CACHE_DTYPES, STEPS, job_of_step, require_storage
from meshwright.cli.verbs.profile_text import print_profile, profile_json
from meshwright.core.errors import InputError
from meshwright.spec.model import require_runnable
from meshwright.spec.plan_file import Plan, load_plan

if TYPE_CHECKING:
    from meshwright.parallel.generate_step import GenerateStep
    from meshwright.parallel.train_step import TrainStep
    from meshwright.profile.summary import Profile


@click.command()
@click.argument("plan_file", metavar="PLAN.toml", type=click.Path(path_type=Path))
@click.option("--steps", default=3, show_default=True, help="Steps under the profiler.")
@click.option("--warmup", type=int, help="Steps before them: 3, on CPU 5.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder of the report; runs/NAME-profile by default.")
@click.option("--step", type=click.Choice(STEPS), help="The step of the plan's model; the plan's own by default.")
@click.option("--weights", type=click.Choice(["as they are", "int8"]), default="as they are", help="To generate.")
@click.option("--cache-dtype", type=click.Choice(CACHE_DTYPES), default="bf16", show_default=True, help="To generate.")
@click.option("--trace", type=click.Path(path_type=Path), help="Read this trace (*.xplane.pb) and run nothing.")
@click.option("--hlo", type=click.Path(path_type=Path), help="The text of the program of --trace.")
@json_option
def command(
    plan_file: Path,
    steps: int,
    warmup: int | None,
    out: Path | None,
    step: str | None,
    weights: str,
    cache_dtype: str,
    trace: Path | None,
    hlo: Path | None,
    as_json: bool,
) -> None:
    """Run a few steps of a plan under the profiler, and say where their time goes beside the prediction.

    --step prefill runs prompts of the plan's length, --step decode one more token against a full cache. Writes a page,
    pictures and a timeline that opens in Perfetto. --trace and --hlo read a trace that was taken elsewhere, of the
    program that the plan compiles to.
    """
    if (trace is None) != (hlo is None):
        raise InputError("--trace and --hlo go together: a trace names instructions whose text the other one has.")
    if steps < 1:
        raise InputError(f"--steps {steps} profiles nothing. Give 1 or more.")
    if warmup is not None and warmup < 1:
        raise InputError(f"--warmup {warmup}: the first step is slower than the others. Give 1 or more.")
    chosen = load_plan(plan_file)
    chosen = msgspec.structs.replace(chosen, job=job_of_step(chosen.job, step))
    require_storage(chosen.job.kind, weights=weights, cache_dtype=cache_dtype)
    storage = Storage(cache_dtype=cache_dtype, quantised=weights == "int8")  # type: ignore[arg-type]
    folder = out or Path("runs") / f"{chosen.model.name}-profile"
    if trace is not None and hlo is not None:
        found = _read(chosen, storage, trace, hlo)
    else:
        found = _run(chosen, storage, folder, steps=steps, warmup=warmup)
    _show(found, folder, as_json=as_json)


def _read(chosen: Plan, storage: Storage, trace: Path, hlo: Path) -> "Profile":
    from meshwright.profile.summary import analyse

    return analyse(chosen, trace, hlo, storage=storage)


def _run(chosen: Plan, storage: Storage, folder: Path, *, steps: int, warmup: int | None) -> "Profile":
    """The step on the devices at hand."""
    from meshwright.cli.verbs.train import require_devices

    require_runnable(chosen.model)
    require_devices(chosen)
    import jax

    from meshwright.parallel.processes import is_first
    from meshwright.profile.run import record_steps, warmup_steps
    from meshwright.profile.summary import analyse

    step = _step_of(chosen, storage)
    if is_first():
        first = warmup_steps() if warmup is None else warmup
        what = "" if chosen.job.trains else f", {chosen.job.kind}"
        say(
            f"{chosen.model.name} on {chosen.cluster.short_name}{what}: {first} steps to warm up, then {steps} under "
            "the profiler"
        )
    # one folder each: processes on one machine would write files of the same name
    own = "trace" if is_first() else f"trace-{jax.process_index()}"
    recording = record_steps(step, chosen.job, folder=folder / own, steps=steps, warmup=warmup)
    return analyse(chosen, recording.trace, recording.hlo, recording, storage=storage)


def _step_of(chosen: Plan, storage: Storage) -> "TrainStep | GenerateStep":
    """The step that `train` runs by the plan, with its default settings, or the one of `generate`."""
    if not chosen.job.trains:
        from meshwright.parallel.generate_step import GenerateStep

        return GenerateStep(
            chosen.model,
            chosen.strategy,
            max_len=chosen.job.seq_len,
            batch_seqs=chosen.job.batch_seqs,
            cache_dtype=storage.cache_dtype,
            weights="int8" if storage.quantised else "as they are",
        )
    from meshwright.train.settings import settings_from_table
    from meshwright.train.setup import make_step, require_divides

    step = make_step(chosen.model, chosen.strategy, settings_from_table({}), several_documents=False)
    require_divides(step, chosen.job)
    return step


def _show(found: "Profile", folder: Path, *, as_json: bool) -> None:
    """Write the report and print its short form, or all of it as JSON; one process of many does."""
    from meshwright.parallel.processes import is_first
    from meshwright.report.machine.profile_report import write_report

    if not is_first():
        return
    files = write_report(found, folder)
    if as_json:
        emit_json(profile_json(found, files))
    else:
        print_profile(found, files)
