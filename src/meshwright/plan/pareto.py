"""Pareto frontiers: plans unbeaten in step time and memory, or in step time and money."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from meshwright.core.errors import CannotRunError
from meshwright.core.units import format_bytes
from meshwright.cost.setting import Setting
from meshwright.plan.candidates import parts_of
from meshwright.plan.planner import space_of
from meshwright.plan.result import PlannedStrategy
from meshwright.plan.search import search
from meshwright.plan.space import USUAL, Choices, Space

MAX_HALVINGS = 12
LEAST_CHEAPER = 2e-3
"""Share of the cost that a smaller cluster has to save to be worth its longer steps."""


class Frontier(msgspec.Struct, frozen=True, kw_only=True):
    """``memory``: on all chips, fastest first, each needs less memory than the ones before. ``cost``: on the cluster
    and parts of it, fastest first, each cheaper per token than the ones before; () if the chip has no price."""

    memory: tuple[PlannedStrategy, ...]
    cost: tuple[PlannedStrategy, ...]


def pareto(
    setting: Setting,
    *,
    axes: Mapping[str, int] | None = None,
    overrides: Mapping[str, Any] | None = None,
    choices: Choices = USUAL,
) -> Frontier:
    """Returns both frontiers of a job; the parts of the cluster have half the chips, a quarter and so on.

    Raises CannotRunError when nothing runs on all chips.
    """
    model, cluster, job = setting.model, setting.cluster, setting.job
    space = space_of(setting, axes or {}, overrides or {}, choices)
    outcome = search(space, cluster, job.batch_seqs, top=1, frontier=True)
    if not outcome.found:
        limit = format_bytes(setting.memory_limit)
        need = (
            f"the best needs {format_bytes(outcome.least_bytes)} of {limit}" if outcome.num_meshes else "no mesh fits"
        )
        raise CannotRunError(
            f"no plan of {model.name} uses all chips of {cluster.short_name} ({need}), so there is no frontier. "
            f"Name another cluster or batch; without --pareto the largest part that runs is planned."
        )
    priced = cluster.chip.price_usd_per_hour is not None
    smaller = _on_parts(space) if priced else []
    return Frontier(memory=outcome.frontier, cost=_cheaper([outcome.found[0], *smaller]) if priced else ())


def _on_parts(space: Space) -> list[PlannedStrategy]:
    """The best plan on half the chips, a quarter and so on, until one does not run."""
    cluster, job = space.setting.cluster, space.setting.job
    found: list[PlannedStrategy] = []
    chips = cluster.num_chips
    for _ in range(MAX_HALVINGS):
        parts = parts_of(cluster, chips // 2) if chips % 2 == 0 else ()
        best = search(space, parts[0], job.batch_seqs, top=1).found if parts else ()
        if not best:
            break
        found.append(best[0])
        chips //= 2
    return found


def _cheaper(found: Sequence[PlannedStrategy]) -> tuple[PlannedStrategy, ...]:
    """Selects plans with clearly fewer chip-seconds than every faster plan."""
    kept: list[PlannedStrategy] = []
    for one in sorted(found, key=lambda one: one.estimate.step_s):
        spent = one.estimate.step_s * one.num_chips
        if not kept or spent < (1 - LEAST_CHEAPER) * kept[-1].estimate.step_s * kept[-1].num_chips:
            kept.append(one)
    return tuple(kept)
