"""What `verify` asks of the compiler for a plan: its step, and its chips as the plan lays its mesh on them."""

from typing import Any, get_args

import msgspec

from meshwright.algebra.generation import Storage
from meshwright.cli.verbs.job_steps import job_of_step
from meshwright.core.errors import InputError
from meshwright.spec.calibration import Calibration
from meshwright.spec.cluster import Cluster
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.strategy import AS_RUN, Assumptions, Strategy, require_runnable_assumptions

PROGRAM = "meshwright.cli.verbs.verify_child"
"""The module that compiles, in a process of its own."""

TIMEOUT_S = 600.0


def request_of(
    model: Model,
    cluster: Cluster,
    strategy: Strategy,
    job: Job,
    *,
    step: str = "train",
    depth: str = "partition",
    platform: str | None = None,
    weights: str = "as they are",
    cache_dtype: str = "bf16",
    settings: dict[str, Any] | None = None,
    calibration: Calibration | None = None,
    assumptions: Assumptions = AS_RUN,
) -> Any:
    """The request that a plan makes; its chips in the order in which the strategy lies on the cluster."""
    from meshwright.cost.setting import Setting
    from meshwright.train.settings import program_options, settings_from_table
    from meshwright.verify.request import AskedStep, Request
    from meshwright.verify.targets import mesh_order

    assert step in get_args(AskedStep)
    require_runnable_assumptions(assumptions)
    if strategy.num_chips != cluster.num_chips:
        raise InputError(
            f"the mesh has {strategy.num_chips} devices and {cluster.short_name} {cluster.num_chips} chips. "
            f"Give axes whose product is {cluster.num_chips}, or a smaller cluster."
        )
    order: tuple[int, ...] = ()
    target = _target(cluster, depth, platform)
    if target.platform != "cpu":
        order = tuple(
            mesh_order(_placement(model, cluster, strategy, job_of_step(job, step), calibration, assumptions))
            .ravel()
            .tolist()
        )
    bounded = {"capacity_factor": assumptions.imbalance} if model.num_experts and assumptions.imbalance > 1 else {}
    named = {"optimizer": job.optimizer} if job.optimizer != "adamw" else {}
    table = named | bounded | (settings or {}) if step == "train" else {}
    asked = msgspec.structs.replace(job_of_step(job, step), optimizer=table.get("optimizer", "adamw"))
    storage = Storage(cache_dtype=cache_dtype, quantised=weights == "int8")  # type: ignore[arg-type]
    return Request(
        setting=Setting(model, cluster, asked, calibration, storage, assumptions),
        strategy=strategy,
        target=target,
        step=step,  # type: ignore[arg-type]
        depth=depth,  # type: ignore[arg-type]
        settings=table,
        options=program_options(settings_from_table(table), several_documents=False),
        order=order,
    )


def _target(cluster: Cluster, depth: str, platform: Any) -> Any:
    """What is asked for, else what is installed; to lower, the cluster's own needs no compiler."""
    from meshwright.verify.targets import target_of, usable_target

    if depth == "lower" and platform != "cpu":
        own = target_of(cluster)
        if platform in (None, own.platform):
            return own
    return usable_target(cluster, wanted=platform)


def _placement(
    model: Model,
    cluster: Cluster,
    strategy: Strategy,
    job: Job,
    calibration: Calibration | None,
    assumptions: Assumptions,
) -> Any:
    """How the mesh lies on the links, as the step is priced."""
    from meshwright.cost.setting import Setting
    from meshwright.cost.train_step import price_strategy

    setting = Setting(model, cluster, job, calibration, assumptions=assumptions)
    return price_strategy(setting, strategy).placement
