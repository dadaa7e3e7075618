"""`meshwright train`: run a plan, with the prediction beside every measured step."""

import math
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from meshwright.api.planning import plan_of
from meshwright.api.running import island_plan, require_devices, run_training
from meshwright.cli.asked import PlanOptions, read_fields, resolve
from meshwright.cli.output import busy_words, or_dash, say
from meshwright.cli.verb import Count, argument, option, verb
from meshwright.cli.verbs.plan_words import sharding_words
from meshwright.core.errors import InputError, StoppedError
from meshwright.core.files import cache_folder
from meshwright.core.units import counted, format_bytes, format_count, format_seconds
from meshwright.islands.member import find_identity
from meshwright.plan.plan_file import Plan
from meshwright.plan.planner import UNEVEN, imbalance_notes
from meshwright.report.answer import Answer, Facts, Paragraph, Piece, Table, utilisation_rows
from meshwright.spec.job import require_training
from meshwright.spec.model import require_runnable
from meshwright.spec.strategy import mesh_words

if TYPE_CHECKING:
    from meshwright.train.record.result import Goodput, TrainResult

SAME_SPEED = 0.1
"""Relative change of the machine's speed since its rates were measured, up to which the text says nothing."""
PROFILED_STEPS = 3
"""Steps that ``--profile`` without a number profiles."""

NEWEST = "newest"
"""Value of ``--resume`` without a folder."""


class Given(PlanOptions, group="Run"):
    what: str | None = argument(metavar="PLAN.toml | MODEL")  # type: ignore[assignment]
    steps: Count | None = option("Optimizer steps; with --resume, of the whole run.")
    data: str | None = option(
        "A text, JSON lines or Parquet file, or a folder of them; FILE#FIELD names the field of the text. "
        "Python's own documentation by default.",
        group="Data",
    )
    skip_bad_records: bool = option("Skip records of the data that cannot be read, and count them.", group="Data")
    seed: int | None = option("Seed of the initial weights and of the order of the data.")
    from_scratch: bool = option("Start from random weights, even if the model's folder has weights.")
    runs: Path = option("Folder of all runs.", default=Path("runs"))
    resume: str | None = option(
        "Resume the run in this folder, or the model's newest run, from its newest checkpoint.",
        is_flag=False,
        flag_value=NEWEST,
        metavar="[RUN]",
    )
    profiled: Count | None = option(
        f"Profile N steps ({PROFILED_STEPS}) after warm-up; the report goes into the folder of the run.",
        "--profile",
        is_flag=False,
        flag_value=PROFILED_STEPS,
        metavar="[N]",
    )


@verb(Given, needs="run")
def command(given: Given) -> Answer | None:
    """Train as a plan file says, or plan a MODEL first, and compare each step with its prediction.

    A resumed run stays in its folder and keeps the settings that are not given again; a new plan of the same model may
    move it to other devices and another number of processes.
    """
    fields = read_fields(given.pairs)
    if given.from_scratch and given.resume:
        raise InputError("--resume goes on from a checkpoint, --from-scratch from random weights. Leave one out.")
    plan = _plan(given, fields)
    overrides = {"steps": given.steps, "data": given.data, "seed": given.seed}
    overrides |= {"skip_bad_records": given.skip_bad_records or None, "weights": "" if given.from_scratch else None}
    settings = {**fields["train"], **{name: value for name, value in overrides.items() if value is not None}}
    if given.resume:
        return _resumed(plan, settings, given)
    if plan.job.optimizer != "adamw":
        settings.setdefault("optimizer", plan.job.optimizer)
    return _run(plan, settings, given)


def _plan(given: Given, fields: dict[str, Facts]) -> Plan:
    """Returns the plan of the file or of the run to resume, or the best plan of the model."""
    if given.what is None and given.resume and given.resume.endswith(".toml"):
        # `train --resume plan.toml`: the option took the plan for its folder.
        given.what, given.resume = given.resume, NEWEST
    if given.what is None:
        if given.resume in (None, NEWEST):
            raise InputError("train needs a plan or a model. Write: train plan.toml, or train --resume runs/NAME-001.")
        run = Path(str(given.resume))
        given.what = str(run / "plan.toml")
        if not Path(given.what).is_file():
            raise InputError(f"{run} is not the folder of a run: it has no plan.toml. Give one, such as runs/NAME-001.")
    setting, strategy, _ = resolve(given, fields, verb="train")
    require_training(setting.job, "train")
    return plan_of(setting, strategy)


def _resumed(plan: Plan, changes: Facts, given: Given) -> Answer | None:
    """Resumes a run with its own settings and ``changes``; a run that has all its steps is not run, and says so."""
    from meshwright.train.record.run_folder import finished_steps, newest_run, read_resolved, read_summary
    from meshwright.train.settings import settings_from_table

    run = newest_run(given.runs, plan.model.name) if given.resume == NEWEST else Path(str(given.resume))
    settings = dict(read_resolved(run).get("train", {}))
    settings.pop("trust_checkpoints", None)  # holds for one resume only
    settings |= changes
    capacity_factor = settings.pop("capacity_factor", 0.0)  # older runs keep it among these settings
    if capacity_factor and not plan.strategy.capacity_factor:
        strategy = msgspec.structs.replace(plan.strategy, capacity_factor=capacity_factor)
        plan = msgspec.structs.replace(plan, strategy=strategy)
    num_done, num_steps = finished_steps(run), settings_from_table(settings).steps
    if num_done is None or num_done < num_steps:
        return _run(plan, settings, given, resume=run)
    if not ((identity := find_identity()) and identity.island):
        more_text = f"Give more, such as --steps {2 * num_done}, or leave --resume out."
        say(f"{run} is finished after {num_done} steps. {more_text}")
    return Answer(read_summary(run), [])


def _run(plan: Plan, settings: Facts, given: Given, *, resume: Path | None = None) -> Answer | None:
    """Trains, and profiles some steps with --profile. Returns None in every process but the first.

    Raises InputError for --profile with islands or with too few steps, StoppedError if the run was asked to stop."""
    require_runnable(plan.model)
    identity = find_identity()
    require_devices(island_plan(plan, identity.count) if identity else plan)
    from meshwright.parallel.processes import is_first

    if given.profiled is not None and identity:
        raise InputError("--profile is of one program, and islands have one each. Profile a plan of one island.")
    if given.profiled is not None:
        _check_profiled(given.profiled, settings, resume)
    if is_first() and not (identity and identity.island):
        sharding_text = ", ".join(filter(None, (mesh_words(plan.strategy.mesh), sharding_words(plan.strategy))))
        say(
            f"{plan.model.name} on {plan.cluster.short_name}: {sharding_text}, "
            f"{format_count(plan.job.tokens_per_step)} tokens a step, remat {plan.strategy.remat}, "
            f"predicted {format_seconds(plan.predicted.step_s)} a step"
        )
        if identity and 1 < plan.strategy.num_islands != identity.count:
            each = plan.job.batch_seqs // plan.strategy.num_islands
            say(
                f"{identity.count} islands of {each} sequences train, and the plan has {plan.strategy.num_islands}: "
                f"{identity.count * each} a step"
            )
    if given.profiled is None:
        result, profile = run_training(plan, settings, runs=given.runs, resume=resume), None
    else:
        result, profile = _run_profiled(plan, settings, given, resume)
    if result is None:  # another island has the result
        return None
    stopped_error = None
    if result.stopped:
        stopped_error = StoppedError(f"stopped after step {result.steps}; train --resume {result.run} goes on.")
    if not is_first():
        if stopped_error:
            raise stopped_error
        return None
    from meshwright.bench.machine import machine_speed

    speed = machine_speed(plan.calibration)
    pieces = [*result_text(plan, result, speed), *(profile.pieces if profile else ())]
    facts = msgspec.structs.asdict(result) | {"machine_speed": speed} | ({"profile": profile.facts} if profile else {})
    return Answer(facts, pieces, raw=[[facts]], error=stopped_error)


def _check_profiled(steps: int, settings: Facts, resume: Path | None) -> None:
    from meshwright.profile.run import warmup_steps
    from meshwright.train.record.run_folder import finished_steps
    from meshwright.train.settings import settings_from_table

    num_done = (finished_steps(resume) or 0) if resume else 0
    num_steps, warmup = settings_from_table(settings).steps, warmup_steps()
    if num_steps - num_done < warmup + steps:
        raise InputError(
            f"--profile {steps} needs {warmup} steps to warm up and {steps} more, and the run has "
            f"{num_steps - num_done}. Give --steps {num_done + warmup + steps} or more."
        )


def _run_profiled(
    plan: Plan, settings: Facts, given: Given, resume: Path | None
) -> "tuple[TrainResult, Answer | None]":
    """Trains, profiles ``given.profiled`` steps after the warm-up, and writes their report into the folder of the run.

    The trace is in a temporary folder until the run's own exists. The answer is None in every process but the first.
    """
    from meshwright.cli.verbs.profile import profile_answer
    from meshwright.parallel.processes import is_first
    from meshwright.profile.run import TracedSteps, warmup_steps
    from meshwright.profile.summary import analyse
    from meshwright.train.settings import settings_from_table, with_whole_paths
    from meshwright.train.setup import prepare

    given.runs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.runs, prefix=".profile-", ignore_cleanup_errors=True) as trace_folder:
        with TracedSteps(Path(trace_folder), steps=given.profiled or 0, warmup=warmup_steps()) as tracer:
            result = run_training(
                plan, settings, runs=given.runs, resume=resume, on_step=lambda record: tracer.step_done(record.step_s)
            )
        assert result is not None
        settings_table = {"weights": plan.job.weights, **settings}
        setup = prepare(plan.model, plan.strategy, plan.job, with_whole_paths(settings_from_table(settings_table)))
        # Compiled by every process: compilers of GPUs share the search for the fastest kernels among them.
        recording = tracer.recording(setup.step, plan.job)
        if not is_first():
            return result, None
        profile = analyse(plan, recording.trace, recording.hlo, recording)
        report_folder = Path(result.run) / "profile"
        answer = profile_answer(profile, report_folder)
        shutil.rmtree(report_folder / "trace", ignore_errors=True)
        shutil.move(trace_folder, report_folder / "trace")
    return result, answer


# -- what is printed, in `demo` too -------------------------------------------------------------------------


def result_text(chosen: Plan, result: "TrainResult", speed: float | None = None) -> Iterator[Piece]:
    """Yields the losses, and each prediction beside its measurement; ``speed`` is `machine_speed` after the run."""
    if not result.losses:
        yield f"stopped before the first step; {result.run} holds the plan"
        return
    stopped_text = " (stopped)" if result.stopped else ""
    held_out_text = or_dash(result.validation_loss, lambda loss: f"{loss:.3f}")
    finite_losses = [loss for loss in result.losses if math.isfinite(loss)]  # damaged lines of metrics have none
    losses_text = f"loss {finite_losses[0]:.3f} -> {finite_losses[-1]:.3f}" if finite_losses else "loss -"
    yield f"{counted(result.steps, 'step')}{stopped_text}: {losses_text}, held out {held_out_text}"
    estimate = chosen.predicted
    memory_bytes = result.memory.total_bytes if result.memory else None
    yield Table.compared(
        [
            ("step", estimate.step_s, result.step_s, format_seconds),
            *utilisation_rows(estimate, result),
            ("memory of a device", estimate.hbm_bytes_per_chip, memory_bytes, format_bytes),
        ]
    )
    yield from speed_words(chosen, speed)
    if (ratio := result.load_max_over_mean or 0) > UNEVEN:
        notes = imbalance_notes(chosen.setting, chosen.strategy, imbalance=round(ratio, 2))
        yield from (f"the busiest expert had {ratio:.3g} times the mean rows; predicted: {note}" for note in notes)
    if (result.mfu_causal or result.mfu or 0) > 1:
        rates_name = chosen.calibration.name if chosen.calibration else "the data sheet"
        yield (
            f"an MFU above 100%: the machine is faster than the plan's rates ({rates_name}), which may have been "
            f"measured under load. Remove them from {cache_folder()} and plan again to measure again."
        )
    rate_text = or_dash(result.tokens_per_s, lambda tokens: f"{tokens:,.0f}")
    yield Paragraph(
        f"{rate_text} tokens/s; compiling took {format_seconds(result.compile_s)}; everything is in {result.run}", None
    )
    if result.skipped_records:
        yield f"skipped {counted(result.skipped_records, 'bad record')} of the data"
    if result.goodput:
        yield goodput_words(result.goodput)


def speed_words(chosen: Plan, speed: float | None) -> Iterator[str]:
    """Yields that the machine was busy before the run, and how its speed differs from its rates', if by a tenth."""
    yield from busy_words()
    if speed is not None and abs(speed - 1) > SAME_SPEED:
        yield (
            f"this machine is {'slower' if speed < 1 else 'faster'} now than when its rates were measured: a product "
            f"runs at {speed:.2f} times its speed then, and the predicted step would take "
            f"{format_seconds(chosen.predicted.step_s / speed)}"
        )


def goodput_words(goodput: "Goodput") -> str:
    """Returns ``goodput 83%: 12 s of 14.5 s in steps, compiling 1.2 s, ...``, without parts below one percent."""
    seconds_by_part = {
        "compiling": goodput.compile_s,
        "evaluation": goodput.evaluation_s,
        "waiting for checkpoints": goodput.checkpoint_s,
        "waiting for data": goodput.data_s,
        "start and files": goodput.other_s,
        f"{counted(goodput.lost_steps, 'step')} repeated": goodput.lost_s,
    }
    part_texts = [f"{name} {format_seconds(s)}" for name, s in seconds_by_part.items() if s >= goodput.wall_s / 100]
    steps_text = f"{format_seconds(goodput.steps_s)} of {format_seconds(goodput.wall_s)} in steps"
    return f"goodput {goodput.share:.0%}: " + ", ".join([steps_text, *part_texts])
