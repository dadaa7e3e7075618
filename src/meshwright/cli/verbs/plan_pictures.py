"""What `plan --pareto` and `plan --breakdown` print and draw beside the ranked strategies."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.core.units import format_bytes, format_count, format_seconds
from meshwright.cost.breakdown import Breakdown
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import price_strategy
from meshwright.plan.pareto import Frontier, pareto
from meshwright.plan.ranking import TIE
from meshwright.plan.result import PlannedStrategy, PlanResult
from meshwright.report.answer import Answer, Piece, Table
from meshwright.report.bars import breakdown_figure
from meshwright.report.figure import Figure
from meshwright.report.plans.pareto import ParetoPoint, pareto_figure
from meshwright.spec.cluster import Cluster
from meshwright.spec.strategy import short_mesh

LEAST_SAVING = 0.1
"""Share of memory that a listed plan saves over the one listed before it."""


# -- frontiers ------------------------------------------------------------------------------------------


def frontier_answer(result: PlanResult, *, png: Path | None) -> Answer:
    """The frontiers of the job that was planned.

    They are of the cluster that the plans use: all of it, or the largest part that the job divides over.
    """
    cluster = result.strategies[0].cluster
    setting = result.setting.on(cluster)
    found = pareto(result)
    facts = {"memory": [_as_json(one) for one in found.memory], "cost": [_as_json(one) for one in found.cost]}
    text = _frontier_text(cluster, found)
    return Answer({"pareto": facts}, text, {png: lambda: _frontier_figure(setting, found)})


def listed(frontier: Sequence[PlannedStrategy]) -> list[PlannedStrategy]:
    """Of a frontier, fastest first, those that hold at least a tenth less than the one listed before; of plans that
    are equally fast the smallest.
    """
    kept: list[PlannedStrategy] = []
    for one in frontier:
        at = one.estimate
        if kept and at.step_s <= (1 + TIE) * kept[-1].estimate.step_s:
            kept[-1] = one
        elif not kept or at.hbm_bytes_per_chip <= (1 - LEAST_SAVING) * kept[-1].estimate.hbm_bytes_per_chip:
            kept.append(one)
    return kept


def _as_json(found: PlannedStrategy) -> dict[str, Any]:
    strategy, at = found.strategy, found.estimate
    return {
        "cluster": found.cluster.short_name,
        "num_chips": found.cluster.num_chips,
        "axes": dict(strategy.mesh),
        "zero": strategy.zero,
        "num_microbatches": strategy.num_microbatches,
        "remat": strategy.remat if isinstance(strategy.remat, str) else list(strategy.remat),
        "schedule": strategy.schedule,
        "step_s": at.step_s,
        "mfu": at.mfu,
        "hbm_bytes_per_chip": at.hbm_bytes_per_chip,
        "usd_per_token": found.usd_per_token,
    }


def _frontier_text(cluster: Cluster, found: Frontier) -> Iterator[Piece]:
    rows = listed(found.memory)
    yield ""
    yield Table(
        ["#", "step", "memory", "MFU", "micro", "remat", "mesh"],
        [
            [number, format_seconds(one.estimate.step_s), format_bytes(one.estimate.hbm_bytes_per_chip),
             f"{one.estimate.mfu:.0%}", one.strategy.num_microbatches, _remat(one), short_mesh(one.strategy.mesh)]
            for number, one in enumerate(rows, 1)
        ],
        "Plans that nothing beats in both step time and memory",
    )  # fmt: skip
    left_out = len(found.memory) - len(rows)
    if left_out:
        yield f"{left_out} more that save less than {LEAST_SAVING:.0%} of memory are in --json and in --png"
    if not found.cost:
        yield f"{cluster.chip.name} has no price, so step time is not weighed against cost"
        return
    yield ""
    yield Table(
        ["chips", "step", "cost of 1 B tokens", "MFU", "mesh"],
        [
            [one.cluster.num_chips, format_seconds(one.estimate.step_s), _usd(one), f"{one.estimate.mfu:.0%}",
             short_mesh(one.strategy.mesh)]
            for one in found.cost
        ],
        f"Step time against cost, on all chips and on parts (${cluster.chip.price_usd_per_hour:,.2f} a chip and hour)",
    )  # fmt: skip


def _remat(found: PlannedStrategy) -> str:
    return found.strategy.remat if isinstance(found.strategy.remat, str) else "+".join(found.strategy.remat)


def _usd(found: PlannedStrategy) -> str:
    return f"${1e9 * (found.usd_per_token or 0.0):,.2f}"


def _frontier_figure(setting: Setting, found: Frontier) -> Figure:
    model, cluster, job = setting.model, setting.cluster, setting.job
    numbers = {id(one): str(number) for number, one in enumerate(listed(found.memory), 1)}
    limit = setting.memory_limit
    return pareto_figure(
        [
            ParetoPoint(
                step_s=one.estimate.step_s, amount=one.estimate.hbm_bytes_per_chip, label=numbers.get(id(one), "")
            )
            for one in found.memory
        ],
        [
            ParetoPoint(
                step_s=one.estimate.step_s,
                amount=1e9 * (one.usd_per_token or 0.0),
                label=f"{one.cluster.num_chips:,} chips",
            )
            for one in found.cost
        ],
        limit_bytes=None if limit == float("inf") else limit,
        title=f"{model.name} on {cluster.short_name}: plans that nothing beats",
        subtitle=f"{format_count(job.tokens_per_step)} tokens a step. Numbers are those of the table.",
    )


# -- the parts of a step --------------------------------------------------------------------------------


def breakdown_answer(result: PlanResult, png: Path) -> Answer:
    """Where the best plan's step goes, and its collectives."""
    best = result.strategies[0]
    parts = Breakdown(price_strategy(best.setting, best.strategy))
    facts = {"parts": parts.named(), "traffic": parts.traffic}
    return Answer({"breakdown": facts}, _traffic_text(parts), {png: lambda: _breakdown_figure(result, parts)})


def _traffic_text(parts: Breakdown) -> Iterator[Piece]:
    """Every collective of a step: how often, how many bytes, alone and exposed."""
    if not parts.traffic:
        return
    yield ""
    yield Table(
        ["collective", "over", "times", "bytes", "alone", "exposed"],
        [
            [row.op.replace("_", " "), ", ".join(row.axes), round(row.executions), format_bytes(row.num_bytes),
             format_seconds(row.alone_s), format_seconds(row.exposed_s)]
            for row in parts.traffic
        ],
        f"Communication of one step: {format_seconds(parts.exposed_s)} exposed ({parts.exposed_share:.0%}), "
        f"{format_seconds(parts.hidden_s)} hidden",
    )  # fmt: skip


def _breakdown_figure(result: PlanResult, parts: Breakdown) -> Figure:
    best = result.strategies[0]
    links = {name if name == "latency" else f"{name} links": seconds for name, seconds in _largest(parts.alone).items()}
    return breakdown_figure(
        parts.named(),
        links,
        title=f"{result.model.name} on {best.cluster.short_name}: where a step goes",
        subtitle=f"{short_mesh(best.strategy.mesh)}, {format_count(best.job.tokens_per_step)} tokens a step, "
        f"remat {best.strategy.remat}. Of the links' own time {format_seconds(parts.exposed_s)} are exposed.",
    )


def _largest(alone: Mapping[str, float]) -> dict[str, float]:
    """The groups of mesh axes without those whose links are busy for less than a thousandth of the rest."""
    total = sum(alone.values())
    return {name.replace(",", "+"): seconds for name, seconds in alone.items() if seconds > 1e-3 * total}
