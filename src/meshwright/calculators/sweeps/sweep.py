"""The best plan on each of several clusters: scaling against chips, with the batch or the work per chip fixed."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from meshwright.core.errors import InputError
from meshwright.core.units import format_bytes
from meshwright.cost.breakdown import Breakdown
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import price_strategy
from meshwright.plan.planner import space_of
from meshwright.plan.result import PlannedStrategy
from meshwright.plan.search import SearchOutcome, search
from meshwright.plan.space import USUAL, Choices, Space
from meshwright.spec.chip import Chip
from meshwright.spec.cluster import Cluster, make_cluster, parse_cluster
from meshwright.spec.job import Job

MAX_CLUSTERS = 64
_RANGE = re.compile(r"(?P<first>[^,]+?)\.\.(?P<last>[^,]+)")


class SweepPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The best plan of a job on one cluster. Where nothing runs ``best`` is None and ``reason`` says why."""

    cluster: Cluster
    job: Job
    best: PlannedStrategy | None
    parts: Breakdown | None
    reason: str = ""

    @property
    def num_chips(self) -> int:
        return self.cluster.num_chips

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of all chips together."""
        return None if self.best is None else self.job.tokens_per_step / self.best.estimate.step_s

    @property
    def usd_per_token(self) -> float | None:
        """What the chips cost while one token is trained; None without a price."""
        price, rate = self.cluster.chip.price_usd_per_hour, self.tokens_per_s
        return None if price is None or rate is None else price * self.num_chips / 3600 / rate

    def to_json(self) -> dict[str, Any]:
        """Plain data: figures are None where nothing runs."""
        found = self.best
        at = None if found is None else found.estimate
        strategy = None if found is None else found.strategy
        return {
            "cluster": self.cluster.short_name,
            "num_chips": self.num_chips,
            "batch_seqs": self.job.batch_seqs,
            "tokens_per_step": self.job.tokens_per_step,
            "reason": self.reason or None,
            "step_s": at and at.step_s,
            "step_s_lower": at and at.step_s_lower,
            "step_s_upper": at and at.step_s_upper,
            "tokens_per_s": self.tokens_per_s,
            "mfu": at and at.mfu,
            "exposed_share": self.parts and self.parts.exposed_share,
            "bubble_share": self.parts and self.parts.bubble_s / self.parts.step_s,
            "hbm_bytes_per_chip": at and at.hbm_bytes_per_chip,
            "usd_per_token": self.usd_per_token,
            "bound_by": at and at.bound_by,
            "axes": strategy and dict(strategy.mesh),
            "zero": strategy and strategy.zero,
            "num_microbatches": strategy and strategy.num_microbatches,
            "remat": strategy and (strategy.remat if isinstance(strategy.remat, str) else list(strategy.remat)),
            "schedule": strategy and strategy.schedule,
        }


def scaling_curve(
    setting: Setting,
    clusters: Sequence[Cluster],
    *,
    weak: bool = False,
    axes: Mapping[str, int] | None = None,
    overrides: Mapping[str, Any] | None = None,
    choices: Choices = USUAL,
) -> tuple[SweepPoint, ...]:
    """The best plan on every cluster. All search one space, opened once.

    Strong scaling keeps the setting's batch; ``weak`` keeps the sequences per chip of the first cluster. ``axes`` and
    ``overrides`` fix choices as in `planner.rank_plans`.
    """
    _same_chip(clusters)
    space = space_of(setting.on(clusters[0]), axes or {}, overrides or {}, choices)
    return tuple(best_on(space, cluster, _job_on(cluster, clusters[0], setting.job, weak)) for cluster in clusters)


def best_on(space: Space, cluster: Cluster, job: Job) -> SweepPoint:
    """The fastest strategy of a space on all chips of one cluster, with the parts of its step."""
    outcome = search(space, cluster, job.batch_seqs, top=1)
    if not outcome.found:
        return SweepPoint(cluster=cluster, job=job, best=None, parts=None, reason=_why_not(space, cluster, outcome))
    best = outcome.found[0]
    priced = price_strategy(msgspec.structs.replace(space.setting, cluster=cluster, job=job), best.strategy)
    return SweepPoint(cluster=cluster, job=job, best=best, parts=Breakdown(priced))


def _why_not(space: Space, cluster: Cluster, outcome: SearchOutcome) -> str:
    if not outcome.num_meshes:
        return "does not divide"
    if outcome.least_bytes == float("inf"):
        return "cannot be laid"
    limit = space.setting.on(cluster).memory_limit
    return f"does not fit: {format_bytes(outcome.least_bytes)} of {format_bytes(limit)}"


def _job_on(cluster: Cluster, first: Cluster, job: Job, weak: bool) -> Job:
    if not weak:
        return job
    sequences = job.batch_seqs * cluster.num_chips
    if sequences % first.num_chips:
        raise InputError(
            f"{job.batch_seqs} sequences on {first.num_chips} chips are no whole number on {cluster.num_chips} chips. "
            f"Give a batch that is a multiple of {first.num_chips} sequences."
        )
    return msgspec.structs.replace(job, batch_seqs=sequences // first.num_chips)


def _same_chip(clusters: Sequence[Cluster]) -> None:
    if not clusters:
        raise InputError("there is no cluster to plan for. Give at least one.")
    if len(clusters) > MAX_CLUSTERS:
        raise InputError(f"{len(clusters)} clusters are too many for one sweep. Give at most {MAX_CLUSTERS}.")
    names = {cluster.chip.name for cluster in clusters}
    if len(names) > 1:
        raise InputError(f"a sweep is over clusters of one chip, not of {' and '.join(sorted(names))}. Sweep each.")


# -- clusters from text ---------------------------------------------------------------------------------


def sweep_clusters(text: str) -> tuple[Cluster, ...]:
    """Clusters of ``"h100:8x4,h100:8x8"`` or ``"h100:8x1..8x512"``, fewest chips first.

    A range doubles the shortest size that has not reached its end, the last of several: 8x1, 8x2, ... 8x512, and
    4x4x4, 4x4x8, 4x8x8, ... 16x16x16.
    """
    found: list[Cluster] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        found += _cluster_range(match["first"], match["last"]) if match else [parse_cluster(part)]
    if len(found) > MAX_CLUSTERS:
        raise InputError(f"{text} are {len(found)} clusters. Give at most {MAX_CLUSTERS}.")
    return tuple(sorted(found, key=lambda cluster: cluster.num_chips))


def _cluster_range(first: str, last: str) -> list[Cluster]:
    start = parse_cluster(first)
    end = parse_cluster(last if ":" in last else f"{first.partition(':')[0]}:{last}")
    sizes, goal = list(start.shape), end.shape
    same = start.chip.name == end.chip.name and start.num_slices == end.num_slices and len(sizes) == len(goal)
    if not same or any(size > most for size, most in zip(sizes, goal, strict=False)):
        raise InputError(
            f"{first}..{last} is no range of clusters. Write the smallest and the largest shape of one chip, "
            f"such as h100:8x1..8x512 or v5p:4x4x4..16x16x16."
        )
    found = [start]
    while tuple(sizes) != goal:
        number = min((i for i in range(len(sizes)) if sizes[i] < goal[i]), key=lambda i: (sizes[i], -i))
        sizes[number] = min(2 * sizes[number], goal[number])
        found.append(make_cluster(start.chip, tuple(sizes), num_slices=start.num_slices))
    return found


def node_clusters(chip: Chip, nodes: Iterable[int]) -> tuple[Cluster, ...]:
    """Clusters of so many whole nodes: switched domains of the chip's own size, joined by its network."""
    if chip.topology != "switched":
        raise InputError(f"{chip.name} has no nodes. Give shapes instead: --on {chip.name}:4x4x4..8x8x8.")
    domain = chip.domain_chips or chip.chips_per_host or 1
    return tuple(make_cluster(chip, (domain, count)) for count in nodes)
