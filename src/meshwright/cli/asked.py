"""The setting and the strategy of a verb that takes "PLAN.toml, or a MODEL with options"."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from meshwright.algebra.generation.program import Storage, weight_dtype
from meshwright.api.rates import rates_for
from meshwright.cli.fields import job_of, parse_fields, take_axes, with_fields
from meshwright.cli.verb import CALIBRATION, Count, MeshSizes, Options, argument, option
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.toml_file import read_toml
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import Estimate, estimate_step
from meshwright.parallel.process_env import find_processes
from meshwright.plan.islands import island_search
from meshwright.plan.legal import check_rules, strategy_sizes, zero_rules
from meshwright.plan.plan_file import SERVICE, Plan, ServicePlan, load_plan
from meshwright.plan.planner import rank_plans, refuse_given, space_of
from meshwright.plan.result import PlanResult, plan_in
from meshwright.report.answer import Facts
from meshwright.spec.assumptions import AS_RUN, require_runnable_assumptions
from meshwright.spec.catalogue import load_model, weights_of
from meshwright.spec.cluster import Cluster
from meshwright.spec.job import Job
from meshwright.spec.model import require_runnable
from meshwright.spec.strategy import Strategy, make_mesh

RUN = ("train", "profile")
"""Verbs that run the plan."""
Fields = Mapping[str, Facts]

AXES = option("Mesh axes to keep fixed, such as fsdp=1024,tensor=4.")
SET = option("A field: model.num_layers=2, strategy.remat=block.", "--set", metavar="KEY=VALUE ...")


class PlanOptions(Options, group="Plan"):
    """A plan file, or a model with the options that a plan file would state."""

    what: str = argument(metavar="PLAN.toml | MODEL")
    on: Cluster | None = option("The cluster, for a MODEL: v5p:16x20x28, h100:8x256, cpu:8.")
    axes: MeshSizes | None = AXES
    batch: str | None = option("Tokens a step (4Mi) or sequences (1024seq); to generate, sequences at once (32seq).")
    seq_len: Count | None = option("Tokens of a sequence; to generate, positions that the cache holds.", "--seq")
    pairs: tuple[str, ...] = SET
    calibration: Path | None = CALIBRATION


class Asked(NamedTuple):
    """A strategy in its setting, and the estimate of the plan file or the search; None if neither has one."""

    setting: Setting
    strategy: Strategy
    predicted: Estimate | None = None

    def plan(self) -> Plan:
        """Returns the plan, with a new estimate if there is none yet."""
        return plan_in(self.setting, self.strategy, self.predicted or estimate_step(self.setting, self.strategy))


STEP = option("The step; by default the job's.")
WEIGHTS = option("Stored weights, for prefill and generation.", default="as they are")
CACHE_DTYPE = option("Dtype of the cache, for prefill and generation.", default="bf16")


def read_fields(pairs: Sequence[str]) -> dict[str, Facts]:
    """Returns the fields of ``--set``. The run's optimizer is also the job's, whose price depends on it.

    A bound on the slots of experts (capacity_factor), which was a setting of training once, moves to the strategy.
    """
    fields = parse_fields(pairs)
    if "optimizer" in fields["train"]:
        fields["job"] = {"optimizer": fields["train"]["optimizer"], **fields["job"]}
    if capacity_factor := fields["train"].pop("capacity_factor", None):
        fields["strategy"] = {"capacity_factor": capacity_factor, **fields["strategy"]}
    return fields


def resolve(given: PlanOptions, fields: Fields, *, verb: str, step: str | None = None) -> Asked:
    """Returns the plan file with ``fields`` changed, or the best strategy for the model; ``step`` replaces the job's.

    A ``verb`` that runs the plan refuses models that do not run, and a strategy for fewer chips than are given. Raises
    InputError for options that a plan file states already, and for missing ones that a model needs.
    """
    text_by_option = {"--on": given.on, "--batch": given.batch, "--seq": given.seq_len, "--axes": given.axes}
    if given.what.endswith(".toml"):
        given_names = [name for name, value in {**text_by_option, "--calibration": given.calibration}.items() if value]
        if given_names:
            raise InputError(f"{given.what} says the cluster, axes, batch and seq; leave {', '.join(given_names)} out.")
        return _of_file(Path(given.what), fields, step)
    if verb in RUN and find_processes(os.environ):
        # Each process might measure, and so plan, differently.
        raise InputError(f"several processes need one plan. Write it first: plan {given.what} ... -o plan.toml.")
    if given.on is None or given.batch is None or given.seq_len is None:
        missing_name = next(name for name, value in text_by_option.items() if value is None)
        raise InputError(
            f"{verb} {given.what} needs {missing_name}, or name a plan file. Write: --on cpu:8 --batch 16Ki --seq 512."
        )
    model = with_fields(load_model(given.what), "model", fields["model"])
    job_fields = {"weights": weights_of(given.what), **fields["job"]}
    job = job_of_step(job_of(given.batch, given.seq_len, job_fields), step)
    assumptions = with_fields(AS_RUN, "assumptions", fields["assumptions"])
    axes = take_axes(given.axes, fields["strategy"])
    if verb in RUN:
        require_runnable(model)
        require_runnable_assumptions(assumptions)
    if not job.trains:
        calibration = rates_for(given.on, given.calibration, fitted=True) if verb in RUN else None
        strategy = Strategy(mesh=make_mesh(axes), state="bf16-adam")
        setting = Setting(model, given.on, job, calibration, assumptions=assumptions)
        return Asked(setting, with_fields(strategy, "strategy", fields["strategy"]))
    setting = Setting(model, given.on, job, assumptions=assumptions)
    return _planned(with_rates(setting, given.calibration, axes, fields["strategy"]), axes, fields["strategy"], verb)


def with_rates(setting: Setting, calibration: Path | None, axes: Mapping[str, int], fields: Facts) -> Setting:
    """Returns the setting with the rates of `rates_for`; what cannot run is refused before this machine is measured."""
    if setting.cluster.kind == "host":
        sought = island_search(setting, axes, fields)
        refuse_given(space_of(sought.setting, sought.axes, sought.overrides))
    new_calibration = rates_for(setting.cluster, calibration, fitted=True)
    return msgspec.structs.replace(setting, calibration=new_calibration)


def service_of(given: PlanOptions) -> ServicePlan | None:
    """Returns the service of a plan file, None for other plans and for models.

    Raises InputError for options that would change it.
    """
    path = Path(given.what)
    if path.suffix != ".toml" or not path.is_file() or SERVICE not in read_toml(path).data:
        return None
    value_by_option: Facts = {"--on": given.on, "--batch": given.batch, "--seq": given.seq_len, "--axes": given.axes}
    value_by_option |= {"--set": given.pairs, "--calibration": given.calibration}
    if given_names := [name for name, value in value_by_option.items() if value]:
        raise InputError(f"{given.what} says all of a service; leave {', '.join(given_names)} out, or plan it again.")
    return load_plan(path, ServicePlan)


def _of_file(path: Path, fields: Fields, step: str | None) -> Asked:
    plan = load_plan(path)
    edits = dict(fields["strategy"])
    if "mesh" in edits:
        edits |= {"mesh": {**plan.strategy.mesh, **edits["mesh"]}, "placement": {}}
    setting = Setting(
        with_fields(plan.model, "model", fields["model"]),
        plan.cluster,
        job_of_step(with_fields(plan.job, "job", fields["job"]), step),
        plan.calibration,
        assumptions=with_fields(plan.assumptions, "assumptions", fields["assumptions"]),
    )
    is_unchanged = step in (None, plan.job.kind) and not any(fields.values())
    strategy = with_fields(plan.strategy, "strategy", edits)
    for refusal in check_rules(zero_rules(strategy, given="assignment" in edits), strategy_sizes(setting, strategy)):
        raise CannotRunError(refusal.message)
    return Asked(setting, strategy, plan.predicted if is_unchanged else None)


def _planned(setting: Setting, axes: dict[str, int], overrides: Facts, verb: str) -> Asked:
    try:
        result: PlanResult = rank_plans(setting, axes=axes, overrides=overrides, top=1)
    except CannotRunError:
        if verb != "verify" or math.prod(axes.values()) != setting.cluster.num_chips:
            raise
        # The whole mesh is given: the compiler's verdict on it is the answer, under the remat that needs least memory.
        full_remat = Strategy(mesh=make_mesh(axes), state="bf16-adam", remat="full")
        return Asked(setting, with_fields(full_remat, "strategy", overrides))
    best_plan = result.plans[0]
    if verb in RUN and best_plan.num_chips < setting.cluster.num_chips:
        raise CannotRunError(". ".join(result.shortfall))
    return Asked(best_plan.setting, best_plan.strategy, best_plan.predicted)


def job_of_step(job: Job, step: str | None) -> Job:
    """Returns the job with a step of another kind, on as many sequences and positions; the same job for None."""
    kind = "decode" if step == "generate" else step or job.kind
    return msgspec.structs.replace(job, kind=kind, train_tokens=job.train_tokens if kind == "train" else None)


def storage_of(given: Any, job: Job) -> Storage:
    """Returns the storage of ``--weights`` and ``--cache-dtype``. Raises InputError for either with a training step."""
    if job.trains and (given.weights, given.cache_dtype) != ("as they are", "bf16"):
        raise InputError("--weights and --cache-dtype are for prefill and generation. Take --step generate.")
    return Storage(cache_dtype=given.cache_dtype, weights=weight_dtype(given.weights))
