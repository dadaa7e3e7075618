"""Pareto frontiers: plans unbeaten in step time and memory, or in step time and money."""

from collections.abc import Sequence

import msgspec

from meshwright.plan.candidates import parts_of
from meshwright.plan.plan_file import Plan
from meshwright.plan.planner import space_of
from meshwright.plan.result import PlanResult
from meshwright.plan.search import search
from meshwright.plan.space import Space

MAX_HALVINGS = 12
LEAST_CHEAPER = 2e-3
"""Share of the cost that a smaller cluster has to save to be listed."""


class Frontier(msgspec.Struct, frozen=True, kw_only=True):
    """Two lists of plans, fastest first. ``memory``: plans on all chips, each with less memory than the one before.
    ``cost``: plans on the cluster and parts of it, each cheaper per token; () if the chip has no price."""

    memory: tuple[Plan, ...]
    cost: tuple[Plan, ...]


def pareto(result: PlanResult) -> Frontier:
    """Returns both frontiers on the cluster of a result's best plan, ``cost`` also on half its chips, a quarter, ..."""
    setting = result.setting.on(result.plans[0].cluster)
    space = space_of(setting, result.axes, result.overrides, result.choices)
    outcome = search(space, setting.cluster, setting.job.batch_seqs, top=1, frontier=True)
    has_price = setting.cluster.chip.price_usd_per_hour is not None
    return Frontier(memory=outcome.frontier, cost=_cheaper([outcome.found[0], *_on_parts(space)]) if has_price else ())


def _on_parts(space: Space) -> list[Plan]:
    """Returns the best plan on half the chips, a quarter and so on, until one does not run."""
    cluster, job = space.setting.cluster, space.setting.job
    plans: list[Plan] = []
    num_chips = cluster.num_chips
    for _ in range(MAX_HALVINGS):
        half_clusters = parts_of(cluster, num_chips // 2) if num_chips % 2 == 0 else ()
        best_plans = search(space, half_clusters[0], job.batch_seqs, top=1).found if half_clusters else ()
        if not best_plans:
            break
        plans.append(best_plans[0])
        num_chips //= 2
    return plans


def _cheaper(plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """Selects the plans whose step takes fewer chip-seconds, by at least `LEAST_CHEAPER`, than every faster plan's."""
    cheaper: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: plan.predicted.step_s):
        chip_seconds = plan.predicted.step_s * plan.num_chips
        if not cheaper or chip_seconds < (1 - LEAST_CHEAPER) * cheaper[-1].predicted.step_s * cheaper[-1].num_chips:
            cheaper.append(plan)
    return tuple(cheaper)
