"""`meshwright train`: run a plan, with the prediction beside every measured step."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from meshwright.cli.fields import parse_fields, take_axes, with_fields
from meshwright.cli.machine import rates_for
from meshwright.cli.output import emit_json, json_option, say
from meshwright.cli.verbs.train_text import print_result
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.toml_file import dump_toml
from meshwright.core.units import format_count, format_seconds, parse_count
from meshwright.cost.setting import Setting, setting_of
from meshwright.cost.train_step import estimate_step
from meshwright.parallel.process_env import find_processes
from meshwright.plan.legal import require_legal
from meshwright.plan.planner import plan
from meshwright.spec.catalogue import model as find_model
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job, parse_batch, require_training
from meshwright.spec.model import require_runnable
from meshwright.spec.plan_file import Plan, load_plan
from meshwright.spec.strategy import AS_RUN, mesh_words, require_runnable_assumptions

if TYPE_CHECKING:
    from meshwright.cli.verbs.profile_train import Report
    from meshwright.train.record.result import TrainResult
    from meshwright.train.run import OnStep


PROFILED_STEPS = 3
"""What ``--profile`` without a number profiles."""

NEWEST = "newest"
"""What ``--resume`` without a folder says."""


@click.command()
@click.argument("what", metavar="PLAN.toml | MODEL", required=False)
@click.option("--on", "on", help="The cluster: cpu:8 is this machine as 8 emulated devices.")
@click.option("--axes", help="Mesh axes to keep fixed, such as fsdp=4,tensor=2.")
@click.option("--batch", help="Tokens a step (16Ki) or sequences (32seq).")
@click.option("--seq", "seq_len", help="Tokens of a sequence.")
@click.option("--steps", type=int, help="Optimizer steps; with --resume, of the whole run.")
@click.option(
    "--data",
    help="A text, JSON lines or Parquet file, or a folder of them; FILE#FIELD names the field of the text. "
    "Python's own documentation by default.",
)
@click.option("--seed", type=int, help="Of the first weights and of the order of the data.")
@click.option("--runs", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
@click.option(
    "--resume",
    is_flag=False,
    flag_value=NEWEST,
    metavar="[RUN]",
    help="Go on with the run in this folder, or with the model's newest run, from its newest checkpoint.",
)
@click.option("--set", "pairs", multiple=True, metavar="KEY=VALUE", help="Any field: strategy.remat=block.")
@click.option("--calibration", type=click.Path(path_type=Path), help="Rates of the cluster (TOML), or datasheet.")
@click.option(
    "--profile",
    "profiled",
    type=int,
    is_flag=False,
    flag_value=PROFILED_STEPS,
    metavar="[N]",
    help=f"Profile N steps ({PROFILED_STEPS}) after the first ones; the report goes into the folder of the run.",
)
@json_option
def command(
    what: str | None,
    on: str | None,
    axes: str | None,
    batch: str | None,
    seq_len: str | None,
    steps: int | None,
    data: str | None,
    seed: int | None,
    runs: Path,
    resume: str | None,
    pairs: tuple[str, ...],
    calibration: Path | None,
    profiled: int | None,
    as_json: bool,
) -> None:
    """Train by a plan file, or a MODEL planned on the way, and compare each step with its prediction.

    A resumed run goes on in its own folder, with its own settings where none are given, by its own plan or by
    another one for the same model: on other devices and another number of processes.
    """
    if what is None and resume and resume.endswith(".toml"):
        # `train --resume plan.toml`: the option took the plan for its folder.
        what, resume = resume, NEWEST
    fields = _with_optimizer(_with_slots(parse_fields(pairs)))
    plan_path = _plan_path(what, resume)
    if plan_path:
        if on or axes or batch or seq_len:
            raise InputError(
                f"{plan_path} says the cluster, axes, batch and seq; leave --on, --axes, --batch and --seq out."
            )
        chosen = _changed(load_plan(plan_path), fields)
        require_training(chosen.job, "train")
    else:
        chosen = _planned(str(what), on, axes, batch, seq_len, fields, calibration)
    options = {"steps": steps, "data": data, "seed": seed}
    settings = {**fields["train"], **{k: v for k, v in options.items() if v is not None}}
    if not resume and chosen.job.optimizer != "adamw":
        settings.setdefault("optimizer", chosen.job.optimizer)
    if resume:
        _resume(chosen, settings, resume, runs=runs, profiled=profiled, as_json=as_json)
    elif profiled is None:
        _show(chosen, run_plan(chosen, settings, runs=runs), as_json=as_json)
    else:
        _run_profiled(chosen, settings, profiled, runs=runs, as_json=as_json)


def _with_optimizer(fields: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The fields with the optimizer of the run as that of the job, so that the prediction is of the same update."""
    named = fields["train"].get("optimizer")
    return fields if named is None else {**fields, "job": {"optimizer": named, **fields["job"]}}


def _with_slots(fields: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Fields in which a bound on the slots of experts is priced: each has that many, empty or not."""
    bound = fields["train"].get("capacity_factor")
    if not isinstance(bound, int | float) or bound < 1:
        return fields
    return {**fields, "assumptions": {"imbalance": bound, **fields["assumptions"]}}


def _plan_path(what: str | None, resume: str | None) -> Path | None:
    """The plan file to run: the one given, or that of the run to resume; None for a model that is planned."""
    if what is None:
        if resume in (None, NEWEST):
            raise InputError(
                "train needs a plan file or a model. Write: train plan.toml, or train --resume runs/NAME-001."
            )
        run = Path(str(resume))
        if not (run / "plan.toml").is_file():
            raise InputError(f"{run} is not the folder of a run: it has no plan.toml. Give one, such as runs/NAME-001.")
        return run / "plan.toml"
    return Path(what) if what.endswith(".toml") else None


def _run_profiled(
    chosen: Plan, settings: dict[str, Any], steps: int, *, runs: Path, as_json: bool, resume: Path | None = None
) -> None:
    """Train with some steps under the profiler, and show the run and then the profile."""
    from meshwright.cli.verbs.profile_train import profiled_run

    require_runnable(chosen.model)
    require_devices(chosen)
    with profiled_run(chosen, settings, steps, runs=runs, resume=resume) as run:
        result = run_plan(chosen, settings, runs=runs, resume=resume, on_step=run.on_step)
    _show(chosen, result, as_json=as_json, profile=run.report(Path(result.run)))


def _resume(
    chosen: Plan, changes: dict[str, Any], which: str, *, runs: Path, profiled: int | None, as_json: bool
) -> None:
    """Go on with a run under its own settings and what is changed of them; one line when it is finished."""
    from meshwright.train.record.run_folder import finished_steps, newest_run, read_resolved, read_summary
    from meshwright.train.settings import settings_from_table

    run = newest_run(runs, chosen.model.name) if which == NEWEST else Path(which)
    settings = {**read_resolved(run).get("train", {}), **changes}
    done, wanted = finished_steps(run), settings_from_table(settings).steps
    if profiled is not None and (done is None or done < wanted):
        _run_profiled(chosen, settings, profiled, runs=runs, as_json=as_json, resume=run)
        return
    if done is None or done < wanted:
        _show(chosen, run_plan(chosen, settings, runs=runs, resume=run), as_json=as_json)
        return
    say(f"{run} is finished after {done} steps. Give more, such as --steps {2 * done}, or leave --resume out.")
    if as_json:
        emit_json(read_summary(run))


def _show(chosen: Plan, result: "TrainResult", *, as_json: bool, profile: "Report | None" = None) -> None:
    """What a run came to, and its profile; one process of many says it."""
    from meshwright.parallel.processes import is_first

    if not is_first():
        return
    if as_json:
        emit_json(msgspec.to_builtins(result) | ({"profile": profile.as_json()} if profile else {}))
    else:
        print_result(chosen, result)
        if profile:
            profile.print()


def _planned(
    name: str,
    on: str | None,
    axes: str | None,
    batch: str | None,
    seq_len: str | None,
    fields: dict[str, dict[str, Any]],
    calibration: Path | None,
) -> Plan:
    """The best plan for a model with the axes given."""
    for option, value in (("--on", on), ("--batch", batch), ("--seq", seq_len)):
        if value is None:
            raise InputError(
                f"train {name} needs {option}. Write: --on cpu:8 --batch 16Ki --seq 512, or give a plan file."
            )
    if find_processes(os.environ):
        # Each process might measure, and so plan, differently.
        raise InputError(f"several processes need one plan. Write it first: plan {name} --on {on} ... -o plan.toml.")
    model = with_fields(find_model(name), "model", fields["model"])
    require_runnable(model)
    cluster = parse_cluster(str(on))
    length = parse_count(str(seq_len), what="seq")
    job = with_fields(Job(batch_seqs=parse_batch(str(batch), seq_len=length), seq_len=length), "job", fields["job"])
    assumed = with_fields(AS_RUN, "assumptions", fields["assumptions"])
    result = plan(
        Setting(model, cluster, job, rates_for(cluster, calibration, fitted=True), assumptions=assumed),
        axes=take_axes(axes, fields["strategy"]),
        overrides=fields["strategy"],
        top=1,
    )
    best = result.strategies[0]
    if best.num_chips < cluster.num_chips:
        raise CannotRunError(". ".join(result.shortfall))
    return result.plan()


def _changed(found: Plan, fields: dict[str, dict[str, Any]]) -> Plan:
    """A plan with fields set on the command line, checked and predicted again: a file may have been edited."""
    parts = ("model", "job", "strategy", "assumptions")
    if "mesh" in fields["strategy"]:
        mesh = {**found.strategy.mesh, **fields["strategy"]["mesh"]}
        fields["strategy"] |= {"mesh": mesh, "placement": {}}
    changed = {part: with_fields(getattr(found, part), part, fields[part]) for part in parts}
    found = msgspec.structs.replace(found, **changed)
    setting = setting_of(found)
    require_legal(setting, found.strategy)
    return msgspec.structs.replace(found, predicted=estimate_step(setting, found.strategy))


def run_plan(
    chosen: Plan,
    settings: dict[str, Any],
    *,
    runs: Path,
    resume: Path | None = None,
    on_step: "OnStep | None" = None,
) -> "TrainResult":
    """Train by a plan on the devices at hand, of this process or of all that were launched together.

    Raises CannotRunError when the devices are not those of the plan.
    """
    require_runnable(chosen.model)
    require_devices(chosen)
    from meshwright.parallel.processes import is_first
    from meshwright.train.loop import train
    from meshwright.train.settings import settings_from_table

    job, resolved = chosen.job, settings_from_table(settings)
    if is_first():
        say(
            f"{chosen.model.name} on {chosen.cluster.short_name}: {mesh_words(chosen.strategy.mesh)}, "
            f"{format_count(job.tokens_per_step)} tokens a step, remat {chosen.strategy.remat}, "
            f"predicted {format_seconds(chosen.predicted.step_s)} a step"
        )
    return train(
        chosen.model,
        chosen.strategy,
        job,
        resolved,
        run_root=runs,
        resume=resume,
        predicted=chosen.predicted,
        on_step=on_step,
        texts={"plan.toml": dump_toml(chosen)},
    )


def require_devices(chosen: Plan) -> None:
    """Join the other processes, emulate devices where the plan says so, and count what there is.

    Raises CannotRunError for a plan of other people's software too: its prediction is not of what would run.
    """
    require_runnable_assumptions(chosen.assumptions)
    from meshwright.parallel.mesh import emulate_devices
    from meshwright.parallel.processes import start_processes

    cluster, processes = chosen.cluster, start_processes()
    share, left = divmod(cluster.num_chips, processes)
    if left:
        raise CannotRunError(
            f"{cluster.num_chips} devices of {cluster.short_name} do not divide into {processes} processes. "
            f"Launch a number of processes that divides {cluster.num_chips}."
        )
    if cluster.kind == "host":
        emulate_devices(share)
    import jax

    devices = jax.devices()
    if cluster.kind != "host" and (devices[0].platform == "cpu" or len(devices) < cluster.num_chips):
        raise CannotRunError(
            f"the plan is for {cluster.num_chips} chips of {cluster.chip.name} and this machine has "
            f"{len(devices)} of platform {devices[0].platform}. Run it there, or plan for emulated devices: --on cpu:8."
        )
    if processes > 1 and jax.local_device_count() != share:
        raise CannotRunError(
            f"this process has {jax.local_device_count()} devices and the plan gives each of {processes} processes "
            f"{share}. Start them with launch --processes {processes} --devices {share}, or with that many in sight."
        )
