"""The tables and pictures of `plan --pareto` and `plan --breakdown`, and the line about overlap."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from meshwright.cli.verbs.plan_words import MEMORY, STEP, mfu_columns
from meshwright.core.errors import CannotRunError
from meshwright.core.units import format_bytes, format_count, format_seconds
from meshwright.cost.breakdown import Breakdown, PricedOverlap
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import price_strategy
from meshwright.plan.pareto import Frontier, pareto
from meshwright.plan.ranking import TIE
from meshwright.plan.result import PlannedStrategy, PlanResult
from meshwright.report.answer import Answer, Piece, Table, TableColumns
from meshwright.report.bars import breakdown_figure
from meshwright.report.figure import Figure
from meshwright.report.plans.pareto import pareto_figure
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import require_runnable
from meshwright.spec.strategy import Strategy, mesh_words, require_runnable_strategy, short_mesh
from meshwright.verify.targets import target_of

LEAST_SAVING = 0.1
"""Share of memory that a listed plan saves over the one listed before it."""

MIN_HIDDEN = 0.1
"""Least share of a step that overlap hides for it to be said."""


# -- frontiers ------------------------------------------------------------------------------------------


def frontier_answer(result: PlanResult, *, png: Path | None) -> Answer:
    """Returns the frontiers of the job that was planned.

    They are those of the cluster that the plans use: all of it, or the largest part that the job divides over.
    """
    cluster = result.strategies[0].cluster
    setting = result.setting.on(cluster)
    found = pareto(result)
    facts = {"memory": [_facts(one) for one in found.memory], "cost": [_facts(one) for one in found.cost]}
    text = _frontier_text(cluster, found)
    return Answer({"pareto": facts}, text, {png: lambda: _frontier_figure(setting, found)})


def listed(frontier: Sequence[PlannedStrategy]) -> list[PlannedStrategy]:
    """Returns plans of a frontier, fastest first, each with at least a tenth less memory than the one before it.

    Of plans that are equally fast it takes the smallest.
    """
    kept: list[PlannedStrategy] = []
    for one in frontier:
        at = one.estimate
        if kept and at.step_s <= (1 + TIE) * kept[-1].estimate.step_s:
            kept[-1] = one
        elif not kept or at.hbm_bytes_per_chip <= (1 - LEAST_SAVING) * kept[-1].estimate.hbm_bytes_per_chip:
            kept.append(one)
    return kept


OF_FRONTIER = (
    *("num_chips", "axes", "zero", "num_microbatches", "remat"),
    *("schedule", "step_s", "mfu", "hbm_bytes_per_chip"),
)
"""Keys of `plan --json` that a plan of a frontier has."""


def _facts(found: PlannedStrategy) -> dict[str, Any]:
    every = found.to_json()
    chosen = {name: every[name] for name in OF_FRONTIER}
    return {**chosen, "cluster": found.cluster.short_name, "usd_per_token": found.usd_per_token}


def _frontier_text(cluster: Cluster, found: Frontier) -> Iterator[Piece]:
    rows = {id(one): number for number, one in enumerate(listed(found.memory), 1)}
    columns: TableColumns = {
        "#": (lambda one: rows[id(one)], None, "number"),
        **STEP,
        **MEMORY,
        **mfu_columns(found.memory),
        "microbatches": "strategy.num_microbatches",
        "remat": ("strategy.remat", lambda remat: remat if isinstance(remat, str) else "+".join(remat)),
        **MESH,
    }
    yield ""
    yield Table.of(listed(found.memory), columns, "Plans that nothing beats in both step time and memory")
    left_out = len(found.memory) - len(rows)
    if left_out:
        yield f"{left_out} more that save less than {LEAST_SAVING:.0%} of memory are in --json and in --png"
    if not found.cost:
        yield f"{cluster.chip.name} has no price (--price), so step time is not weighed against cost"
        return
    yield ""
    price = f"${cluster.chip.price_usd_per_hour:,.2f} a chip and hour"
    columns = {
        "chips": "num_chips",
        **STEP,
        "cost of 1 B tokens": (_usd, "${:,.2f}".format, "usd_per_billion_tokens"),
        **mfu_columns(found.cost),
        **MESH,
    }
    yield Table.of(found.cost, columns, f"Step time against cost, on all chips and on parts ({price})")


MESH: TableColumns = {"mesh": ("strategy.mesh", mesh_words, "axes")}


def _usd(found: PlannedStrategy) -> float:
    return 1e9 * (found.usd_per_token or 0.0)


def _frontier_figure(setting: Setting, found: Frontier) -> Figure:
    model, cluster, job = setting.model, setting.cluster, setting.job
    numbers = {id(one): str(number) for number, one in enumerate(listed(found.memory), 1)}
    limit = setting.memory_limit
    memory = [(one.estimate.step_s, one.estimate.hbm_bytes_per_chip, numbers.get(id(one), "")) for one in found.memory]
    return pareto_figure(
        memory,
        [(one.estimate.step_s, _usd(one), f"{one.cluster.num_chips:,} chips") for one in found.cost],
        limit_bytes=None if limit == float("inf") else limit,
        title=f"{model.name} on {cluster.short_name}: plans that nothing beats",
        subtitle=f"{format_count(job.tokens_per_step)} tokens a step. Numbered dots are rows of the table, small ones "
        "save too little memory to be listed.",
    )


# -- the parts of a step --------------------------------------------------------------------------------


def overlap_words(priced: PricedOverlap, setting: Setting, strategy: Strategy) -> str:
    """Returns what overlap hides, and the verb that shows more if it can compile this; "" below `MIN_HIDDEN`."""
    if priced.hidden_s < MIN_HIDDEN * priced.step_s:
        return ""
    hidden, alone, step = map(format_seconds, (priced.hidden_s, priced.alone_s, priced.exposed_step_s))
    step += f" (MFU {priced.exposed_mfu:.0%})"
    try:
        require_runnable(setting.model)
        require_runnable_strategy(strategy)
        compiled = target_of(setting.cluster).platform != "cpu" and not setting.assumptions.of_other_software
    except CannotRunError:
        compiled = False
    more = ". meshwright verify shows what of it is compiled" * compiled
    return f"hides {hidden} of {alone} of communication; without any the step takes {step}{more}"


def breakdown_answer(result: PlanResult, png: Path | None) -> Answer:
    """Returns the parts of the best plan's step, and its collectives."""
    best = result.strategies[0]
    parts = Breakdown(price_strategy(best.setting, best.strategy))
    facts = {"parts": parts.named(), "traffic": parts.traffic}
    return Answer({"breakdown": facts}, _traffic_text(parts), {png: lambda: _breakdown_figure(result, parts)})


def _traffic_text(parts: Breakdown) -> Iterator[Piece]:
    """Yields every collective of a step: how often it runs, bytes that a device sends, seconds alone and exposed."""
    if not parts.traffic:
        return
    yield ""
    columns: TableColumns = {
        "collective": ("op", lambda op: op.replace("_", " ")),
        "over": ("axes", ", ".join),
        "times": ("executions", round),
        "bytes": ("num_bytes", format_bytes),
        "alone": ("alone_s", format_seconds),
        "exposed": ("exposed_s", format_seconds),
    }
    title = f"Communication of one step: {format_seconds(parts.exposed_s)} exposed ({parts.exposed_share:.0%}), "
    yield Table.of(parts.traffic, columns, f"{title}{format_seconds(parts.hidden_s)} hidden; bytes that a device sends")


def _breakdown_figure(result: PlanResult, parts: Breakdown) -> Figure:
    best = result.strategies[0]
    # groups of mesh axes whose links are busy for more than a thousandth of the total
    links = {
        name if name == "latency" else f"{name.replace(',', '+')} links": seconds
        for name, seconds in parts.alone.items()
        if seconds > 1e-3 * sum(parts.alone.values())
    }
    return breakdown_figure(
        parts.named(),
        links,
        title=f"{result.model.name} on {best.cluster.short_name}: where a step goes",
        subtitle=f"{short_mesh(best.strategy.mesh)}, {format_count(best.job.tokens_per_step)} tokens a step, "
        f"remat {best.strategy.remat}. Of the links' own time {format_seconds(parts.exposed_s)} are exposed.",
    )
