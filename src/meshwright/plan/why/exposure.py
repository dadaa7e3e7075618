"""Where the time of one planned step goes, and what every collective costs: by itself, and as the step waits for it."""

from collections.abc import Iterable, Sequence

import msgspec

from meshwright.cost.memory import memory_parts
from meshwright.cost.network.collectives import KindRate
from meshwright.cost.offload import offloaded
from meshwright.cost.pipeline import strategy_pipeline
from meshwright.cost.step_costs import StepCost
from meshwright.cost.step_rates import Group, StepRates
from meshwright.cost.train_step import PricedStrategy, estimate_many, price_parts, price_strategy
from meshwright.spec.calibration import Calibration
from meshwright.spec.cluster import Cluster
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.strategy import Strategy

LOCAL_TERMS: tuple[str, ...] = ("matmul", "attention", "elementwise", "loss_head", "optimizer")
"""Terms of an estimate that are work on the device itself; the others are communication, or waiting."""


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of collective over one group of mesh axes, in one training step of the busiest device.

    ``num_bytes`` are those of the full arrays, all executions together. ``alone_s`` is their time with nothing else
    going on. ``exposed_s`` is their part of what the step waits for: collectives are made free in turn, from the
    longest to the shortest and the other way round, and each has the mean of what it saves. The parts add up.
    """

    op: str
    axes: tuple[str, ...]
    executions: float
    num_bytes: float
    alone_s: float
    exposed_s: float


class StepParts(msgspec.Struct, frozen=True, kw_only=True):
    """The seconds of one step; ``local``, ``exposed_s``, ``bubble_s`` and ``other_s`` add up to ``step_s``.

    ``local`` is work on the busiest device, by kind. ``exposed_s`` is what the step would be shorter by with links that
    take no time, ``bubble_s`` the idle time of the pipeline that would then be left, ``other_s`` the rest: stragglers,
    a host that starts kernels too slowly, PCIe. ``alone`` are the collectives by themselves, by mesh axes.
    """

    step_s: float
    local: dict[str, float]
    exposed_s: float
    bubble_s: float
    other_s: float
    alone: dict[str, float]

    @property
    def exposed_share(self) -> float:
        """Share of the step that is waiting for communication."""
        return self.exposed_s / self.step_s

    @property
    def hidden_s(self) -> float:
        """Seconds of communication that pass behind something else."""
        return max(0.0, sum(self.alone.values()) - self.exposed_s)

    def named(self) -> dict[str, float]:
        """The parts that add up, by name, without those of less than a ten-thousandth of the step."""
        parts = {**self.local, "exposed communication": self.exposed_s, "bubble": self.bubble_s, "other": self.other_s}
        return {name.replace("_", " "): seconds for name, seconds in parts.items() if seconds > 1e-4 * self.step_s}


def step_parts(
    model: Model, cluster: Cluster, job: Job, strategy: Strategy, *, calibration: Calibration | None = None
) -> StepParts:
    """The parts of one strategy's step."""
    return parts_of_step(model, job, strategy, price_strategy(model, cluster, job, strategy, calibration=calibration))


def parts_of_step(model: Model, job: Job, strategy: Strategy, priced: PricedStrategy) -> StepParts:
    """The same of a strategy that is priced already: the step is priced once more with links that take no time."""
    estimate = priced.estimate
    free = estimate_many(
        model,
        priced.derived,
        priced.sizes,
        without(priced.rates),
        batch_seqs=float(job.batch_seqs),
        seq_len=job.seq_len,
        pipeline=strategy_pipeline(strategy),
        offload=strategy.offload,
    ).at(0)
    local = {name: estimate.terms[name] for name in LOCAL_TERMS}
    bubble = free.terms.get("bubble", 0.0)
    waits = {"bubble", "pcie", *LOCAL_TERMS}
    return StepParts(
        step_s=estimate.step_s,
        local=local,
        exposed_s=max(0.0, estimate.step_s - free.step_s),
        bubble_s=bubble,
        other_s=max(0.0, free.step_s - bubble - sum(local.values())),
        alone={name: seconds for name, seconds in estimate.terms.items() if name not in waits and seconds > 0},
    )


def traffic(strategy: Strategy, priced: PricedStrategy) -> tuple[Traffic, ...]:
    """Every collective of the step by kind and mesh axes, the most exposed first."""
    found: dict[tuple[str, Group], list[StepCost]] = {}
    for cost in priced.costs.all:
        if cost.step.is_collective and float(cost.network_s) > 0:
            found.setdefault((cost.step.op, cost.group), []).append(cost)
    alone = {key: sum(float(cost.network_s * cost.here) for cost in costs) for key, costs in found.items()}
    order = sorted(found, key=lambda key: -alone[key])
    ways = (_saved_in_turn(strategy, priced, order), _saved_in_turn(strategy, priced, order[::-1]))
    rows = [
        Traffic(
            op=key[0],
            axes=costs[0].step.axes,
            executions=sum(float(cost.here) for cost in costs),
            num_bytes=sum(float(cost.network_bytes * cost.here) for cost in costs),
            alone_s=alone[key],
            exposed_s=max(0.0, sum(way[key] for way in ways) / len(ways)),
        )
        for key, costs in found.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.exposed_s, -row.alone_s)))


def _saved_in_turn(
    strategy: Strategy, priced: PricedStrategy, order: Sequence[tuple[str, Group]]
) -> dict[tuple[str, Group], float]:
    """Seconds that each saves when it becomes free, those before it being free already."""
    pipeline = strategy_pipeline(strategy)
    memory = memory_parts(priced.derived, priced.sizes)
    moved = offloaded(memory, priced.rates.pcie_bytes_per_s, pipeline, strategy.offload)
    saved, before = {}, priced.estimate.step_s
    for number, key in enumerate(order, 1):
        rates = without(priced.rates, order[:number])
        parts = price_parts(priced.derived, priced.sizes, rates, pipeline=pipeline, memory=memory)
        after = float(parts.times.step_s(pipeline, moved).step_s)
        saved[key], before = before - after, after
    return saved


def without(rates: StepRates, chosen: Iterable[tuple[str, Group]] | None = None) -> StepRates:
    """Rates with which some kinds of collectives on some groups take no time; all of them unless they are named."""
    which = None if chosen is None else set(chosen)
    groups = {
        group: msgspec.structs.replace(
            found,
            kinds={
                kind: KindRate(0.0) if which is None or (kind, group) in which else rate
                for kind, rate in found.kinds.items()
            },
        )
        for group, found in rates.groups.items()
    }
    return msgspec.structs.replace(rates, groups=groups)
