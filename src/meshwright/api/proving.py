"""Proofs of plans: compiles the step of a strategy for its chips, and compares it with the derivation."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.algebra.rewrites.torus import mesh_order
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.fields import Checked
from meshwright.core.progress import tracked
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import price_strategy
from meshwright.plan.plan_file import PHASES, GenerationPhase, ServicePlan
from meshwright.spec.assumptions import AS_RUN, require_runnable_assumptions
from meshwright.spec.strategy import Form, Strategy
from meshwright.verify.request import Depth, Request
from meshwright.verify.targets import CompilerPlatform, target_of, usable_target

if TYPE_CHECKING:
    from meshwright.verify.proof import Proof

PROGRAM = "meshwright.api.compiling"
"""Module that compiles steps; runs as a separate process."""

TIMEOUT_S = 600.0


class ProofOptions(Checked, frozen=True, kw_only=True):
    """Options for compiling a step.

    ``depth`` is "lower" (do all sizes divide and agree), "partition" (memory and collectives, takes seconds) or "full".
    ``form`` "gspmd" compiles shardings as constraints, to compare the compiler's choice of collectives with the derived
    ones. ``platform`` is the compiler, by default the cluster's. ``settings`` are training settings by name. The folder
    ``keep`` gets the compiler's files. ``asked`` is the step's name in the proof, "" for the kind of the job."""

    depth: Depth = "partition"
    form: Form = "shard_map"
    platform: CompilerPlatform | None = None
    settings: Mapping[str, Any] = {}
    timeout_s: float = TIMEOUT_S
    keep: Path | None = None
    asked: str = ""


USUAL = ProofOptions()


def prove_strategy(setting: Setting, strategy: Strategy, options: ProofOptions = USUAL) -> "Proof":
    """Compiles the real step of a strategy for its chips, which may be absent, and compares it with the derivation.

    Returns a `verify.proof.Proof`; if the step does not partition or does not fit, ``proof.runs`` is False and
    ``proof.refusal`` says why. For islands, it proves the step of one; ``proof.exchange`` lists what they exchange.
    Raises InputError if the mesh has another number of devices than the cluster.
    """
    from meshwright.verify.exchange import exchange_proof
    from meshwright.verify.proof import prove
    from meshwright.verify.running import python_program

    request = request_of(setting.of_island(strategy), strategy.inner(), options)
    proof = prove(request, program=python_program(PROGRAM), timeout_s=options.timeout_s, keep=options.keep)
    if strategy.num_islands == 1:
        return proof
    return msgspec.structs.replace(proof, exchange=exchange_proof(setting, strategy, proof.traffic))


def prove_service(
    plan: ServicePlan, phases: Sequence[GenerationPhase] = PHASES, options: ProofOptions = USUAL
) -> "Mapping[GenerationPhase, Proof]":
    """Returns the proof of each phase's step of a planned service, for the chips of one engine.

    Raises CannotRunError for weights in fp4.
    """
    if plan.weights == "fp4":
        raise CannotRunError(
            "weights in fp4 are planned but not executed in this version. Plan the service with --weights int4 or fp8 "
            "to prove it."
        )
    plan_as_run = msgspec.structs.replace(plan, assumptions=AS_RUN)
    step_by_phase = {phase: plan_as_run.phase(phase) for phase in phases}
    return {
        phase: prove_strategy(setting, msgspec.structs.replace(strategy, precision=""), options)
        for phase, (setting, strategy) in tracked(step_by_phase.items(), "proving steps")
    }


def request_of(setting: Setting, strategy: Strategy, options: ProofOptions = USUAL) -> Request:
    """Returns the request to compile a strategy's step, with chips in the order of its placement. Raises InputError if
    the mesh has another size than the cluster, and for form "gspmd" of a step that does not train."""
    from meshwright.train.settings import program_options, settings_from_table

    cluster, job = setting.cluster, setting.job
    require_runnable_assumptions(setting.assumptions)
    if strategy.num_chips != cluster.num_chips:
        raise InputError(
            f"the mesh has {strategy.num_chips} devices, but {cluster.short_name} has {cluster.num_chips} chips. "
            f"Give axes whose product is {cluster.num_chips}, or a cluster of {strategy.num_chips}."
        )
    if options.form == "gspmd" and not job.trains:
        raise InputError(f"the GSPMD form needs a training step, and this is a {job.kind} step. Leave the form out.")
    # lowering for the cluster's own platform needs no compiler
    platform = options.platform
    native = target_of(cluster, only_lower=True) if options.depth == "lower" and platform != "cpu" else None
    target = native if native and platform in (None, native.platform) else usable_target(cluster, wanted=platform)
    chip_order: tuple[int, ...] = ()
    if target.platform != "cpu" or cluster.kind == "torus":
        placement = price_strategy(setting, strategy).placement
        strategy = msgspec.structs.replace(strategy, placement=placement.describe())
        link_names = [link.name for link in placement.links]
        chip_order = tuple(mesh_order(strategy.mesh, strategy.placement, links=link_names).ravel().tolist())
    optimizer_setting = {"optimizer": job.optimizer} if job.optimizer != "adamw" else {}
    settings_table = optimizer_setting | dict(options.settings) if job.trains else {}
    proved_job = msgspec.structs.replace(job, optimizer=settings_table.get("optimizer", "adamw"))
    return Request(
        setting=msgspec.structs.replace(setting, job=proved_job),
        strategy=strategy,
        target=target,
        step=options.asked or job.kind,  # type: ignore[arg-type]
        depth=options.depth,
        form=options.form,
        settings=settings_table,
        options=program_options(settings_from_table(settings_table), strategy, several_documents=False),
        order=chip_order,
    )
