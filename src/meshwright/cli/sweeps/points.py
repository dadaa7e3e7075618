"""Points of a sweep: for each setting the best plan, or the given strategy, with one record of figures."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from meshwright.algebra.notation import product
from meshwright.cli.fields import PLANNED, parse_fields, take_axes, with_fields
from meshwright.cli.sweeps.fields import OWN, SweptFields, combinations
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.progress import tracked
from meshwright.core.units import counted, format_bytes, parse_count
from meshwright.cost.breakdown import Breakdown
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import price_strategy
from meshwright.plan.legal import MEMORY_RULE, legal
from meshwright.plan.plan_file import Plan
from meshwright.plan.planner import refuse_given, space_of
from meshwright.plan.result import planned
from meshwright.plan.search import search
from meshwright.plan.space import Space
from meshwright.report.answer import Facts
from meshwright.spec.assumptions import AS_RUN
from meshwright.spec.calibration import Calibration
from meshwright.spec.cluster import Cluster
from meshwright.spec.job import Job, parse_batch, require_training
from meshwright.spec.strategy import BATCH_AXES, Strategy, make_mesh

NO_RATES: dict[str, Calibration | None] = {}
"""Chips at the rates of their data sheets."""

_PREDICTED = ("step_s", "step_s_lower", "step_s_upper", "mfu", "mfu_causal", "hbm_bytes_per_chip", "bound_by", "memory")
_OF_STRATEGY = ("zero", "num_microbatches", "remat", "schedule", "state")


class SweepPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One setting with its strategy; ``values`` are the swept fields as they are shown.

    If nothing runs ``best`` is None and ``reason`` says why. A strategy that was given whole is priced even if it does
    not fit. If no plan fits, ``least_bytes`` is the least memory of a chip that any plan needs.
    """

    values: Mapping[str, str]
    setting: Setting
    best: Plan | None
    reason: str
    least_bytes: float | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of all chips together; None if nothing runs."""
        return None if self.best is None else self.setting.job.tokens_per_step / self.best.predicted.step_s

    def to_json(self) -> Facts:
        """Returns plain data: figures are None where nothing runs."""
        plan, job, cluster, limit_bytes = self.best, self.setting.job, self.setting.cluster, self.setting.memory_limit
        estimate, strategy = plan and plan.predicted, plan and plan.strategy
        breakdown = plan and Breakdown(price_strategy(plan.setting, plan.strategy))
        return {
            "label": ", ".join(f"{name} {value}" for name, value in self.values.items()),
            "values": dict(self.values),
            "model": self.setting.model.name,
            "cluster": cluster.short_name,
            "chip": cluster.chip.name,
            "num_chips": cluster.num_chips,
            "batch_seqs": job.batch_seqs,
            "seq_len": job.seq_len,
            "tokens_per_step": job.tokens_per_step,
            "tokens_per_chip": job.tokens_per_step / cluster.num_chips,
            "reason": self.reason or None,
            "tokens_per_s": self.tokens_per_s,
            "exposed_share": breakdown and breakdown.exposed_share,
            "bubble_share": breakdown and breakdown.bubble_s / breakdown.step_s,
            "usd_per_token": plan and plan.usd_per_token,
            "least_bytes": self.least_bytes,
            "limit_bytes": None if math.isinf(limit_bytes) else limit_bytes,
            "fits": estimate and estimate.hbm_bytes_per_chip <= limit_bytes,
            **{name: getattr(estimate, name, None) for name in _PREDICTED},
            "axes": strategy and dict(strategy.mesh),
            **{name: getattr(strategy, name, None) for name in _OF_STRATEGY},
        }


def records(points: Sequence[SweepPoint]) -> list[Facts]:
    """Returns every point as plain data, with ``scaling``: its tokens/s per chip over that of the first that runs."""
    rows = [point.to_json() for point in points]
    rates = [row["tokens_per_s"] and row["tokens_per_s"] / row["num_chips"] for row in rows]
    base_rate = next(filter(None, rates), None)
    return [{**row, "scaling": rate and base_rate and rate / base_rate} for row, rate in zip(rows, rates, strict=True)]


def sweep_points(
    fields: SweptFields,
    varied: Sequence[str],
    rates: Mapping[str, Calibration | None] = NO_RATES,
    *,
    weak: bool = False,
) -> tuple[SweepPoint, ...]:
    """Returns every combination of the fields' values; ``varied`` names those shown.

    ``rates`` are calibrations by name of the chip; ``weak`` keeps the batch per chip of the first cluster.
    A point with a ``batch`` is the best plan on all chips, with everything that is given held fixed. A point with
    ``micro`` is the strategy that is given, fsdp on the chips that are left, each replica on ``micro`` sequences at a
    time. Raises InputError for too many points.
    """
    first_cluster = next(iter(fields["on"].values()))
    return tuple(
        _point({name: texts[name] for name in varied}, values, rates, first_cluster if weak else values["on"])
        for texts, values in tracked(combinations(fields), "pricing points")
    )


def _point(
    values: Mapping[str, str], point: Mapping[str, Any], rates: Mapping[str, Calibration | None], first: Cluster
) -> SweepPoint:
    """Returns the point of one combination of values; the batch per chip is that of the ``first`` cluster."""
    cluster, seq_len = point["on"], parse_count(point["seq_len"], what="seq_len", least=1)
    fields_of = parse_fields([f"{name}={value}" for name, value in point.items() if name not in OWN], sections=PLANNED)
    mesh_axes = take_axes(None, fields_of["strategy"])
    strategy: Strategy | None = None
    if "micro" in point:
        strategy = with_fields(Strategy(mesh=filled_mesh(cluster, mesh_axes)), "strategy", fields_of["strategy"])
        num_replicas = int(product(strategy.mesh[axis] for axis in BATCH_AXES))
        batch_seqs = parse_count(point["micro"], what="micro", least=1) * num_replicas * strategy.num_microbatches
    else:
        first_seqs = parse_batch(point["batch"], seq_len=seq_len)
        batch_seqs, remainder = divmod(first_seqs * cluster.num_chips, first.num_chips)
        if remainder:
            raise InputError(
                f"{first_seqs} sequences on {first.num_chips} chips are no whole number on {cluster.num_chips} chips. "
                f"Give a batch that is a multiple of {counted(first.num_chips, 'sequence')}."
            )
    job = with_fields(Job(batch_seqs=batch_seqs, seq_len=seq_len), "job", fields_of["job"])
    require_training(job, "sweep")
    setting = Setting(
        with_fields(point["model"], "model", fields_of["model"]),
        cluster,
        job,
        rates.get(cluster.chip.name),
        assumptions=with_fields(AS_RUN, "assumptions", fields_of["assumptions"]),
    )
    if strategy is None:
        return _searched(values, setting, space_of(setting, mesh_axes, fields_of["strategy"]))
    reason = next((refusal.message for refusal in legal(setting, strategy) if refusal.rule != MEMORY_RULE), "")
    if reason:
        return SweepPoint(values=values, setting=setting, best=None, reason=reason)
    best_plan = planned(setting, job.batch_seqs, strategy)
    needed_bytes = best_plan.predicted.hbm_bytes_per_chip
    reason = _too_large(needed_bytes, setting) if needed_bytes > setting.memory_limit else ""
    return SweepPoint(values=values, setting=setting, best=best_plan, reason=reason)


def _searched(values: Mapping[str, str], setting: Setting, space: Space) -> SweepPoint:
    """Returns the fastest strategy of a space on all chips, or why nothing runs."""
    outcome = search(space, setting.cluster, setting.job.batch_seqs, top=1)
    if outcome.found:
        return SweepPoint(values=values, setting=setting, best=outcome.found[0], reason="")
    least_bytes = outcome.least_bytes if math.isfinite(outcome.least_bytes) else None
    reason = "cannot be laid" if least_bytes is None else _too_large(least_bytes, setting)
    if not outcome.num_meshes:
        try:
            refuse_given(space)
            reason = "does not divide"
        except CannotRunError as error:
            reason = f"does not divide: {error}"
    return SweepPoint(values=values, setting=setting, best=None, reason=reason, least_bytes=least_bytes)


def _too_large(need_bytes: float, setting: Setting) -> str:
    return f"does not fit: {format_bytes(need_bytes)} of {format_bytes(setting.memory_limit)}"


def filled_mesh(cluster: Cluster, axes: Mapping[str, int]) -> dict[str, int]:
    """Returns the mesh of all chips, with fsdp on those that ``axes`` leave, or data if these say how many fsdp has.
    Raises InputError if sizes do not fit."""
    mesh = make_mesh(axes)
    num_named_chips, rest_axis = math.prod(mesh.values()), "data" if "fsdp" in axes else "fsdp"
    if rest_axis not in axes and cluster.num_chips % num_named_chips == 0:
        mesh[rest_axis] = cluster.num_chips // num_named_chips
    if math.prod(mesh.values()) != cluster.num_chips:
        axes_text = ", ".join(f"{axis}={size}" for axis, size in axes.items())
        raise InputError(
            f"axes {axes_text} do not make up the {counted(cluster.num_chips, 'chip')} of {cluster.short_name}. "
            f"Use sizes that divide them, and leave fsdp out to let it take the rest."
        )
    return mesh
