"""Where the seconds of one training step go: what each kind of work takes by itself, and what it adds to the step."""

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property

import msgspec

from meshwright.algebra.ops import kind_of
from meshwright.algebra.steps import Step
from meshwright.core.labels import OPTIMIZER
from meshwright.cost.network.collectives import KindRate
from meshwright.cost.offload import NOTHING, Offload, offloaded
from meshwright.cost.pass_times import block_times
from meshwright.cost.step_costs import StepCost
from meshwright.cost.step_rates import Group, StepRates
from meshwright.cost.train_step import PricedStrategy, price_parts

LOCAL_TERMS: tuple[str, ...] = ("matmul", "attention", "elementwise", "loss_head", "optimizer")
"""Terms of an estimate that are work on the device itself; the others are communication, or waiting."""

WORDS: dict[str, str] = {
    "matmul": "matrix products",
    "attention": "attention",
    "elementwise": "elementwise work",
    "loss_head": "loss head",
    "optimizer": "optimizer",
    "bubble": "pipeline bubble",
    "pipeline": "sends between stages",
    "pcie": "transfers to the host",
    "other": "host, stragglers, latency",
}

ROUNDING = 1e-9
"""Share of a step below which a difference of sums is rounding."""


class Term(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of work: its seconds by itself, and those by which it makes the step longer.

    ``added_s`` of all terms add up to the step. What hides behind other work adds less than it takes, or nothing.
    ``name`` is that of `Estimate.terms`: a kind of local work, or the mesh axes of collectives.
    """

    name: str
    alone_s: float
    added_s: float
    share: float

    @property
    def words(self) -> str:
        """What a sentence calls it."""
        return term_words(self.name)


def term_words(name: str) -> str:
    """``"matrix products"``, ``"collectives over fsdp and context"``."""
    return WORDS.get(name) or f"collectives over {' and '.join(name.split(','))}"


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of collective over one group of mesh axes, in one training step of the busiest device.

    ``num_bytes`` are those of the full arrays, all executions together. ``alone_s`` is their time with nothing else
    going on. ``exposed_s`` is their part of what the step waits for: collectives are made free one by one, from the
    longest to the shortest and the other way round, and each has the mean of what it saves. The parts add up.
    """

    op: str
    axes: tuple[str, ...]
    executions: float
    num_bytes: float
    alone_s: float
    exposed_s: float


class LabelledStep(msgspec.Struct, frozen=True, kw_only=True):
    """All executions in one training step of the derived steps that carry one label, by themselves.

    ``gathers_weights`` says that it is a gather which could run ahead of its pass.
    """

    step: Step
    seconds: float
    flops: float
    gathers_weights: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes of a collective, none of local work."""
        return self.step.axes if self.step.is_collective else ()


def label_text(step: Step) -> str:
    """The label that a step's instructions carry; the updates of all weights are one."""
    local = not step.is_collective and kind_of(step).group == "optimizer"
    return OPTIMIZER if local else str(step.label)


class Partition(msgspec.Struct, frozen=True, kw_only=True):
    """The wall time of one step, predicted or measured, in five parts that add up to it."""

    compute_s: float = 0.0
    memory_s: float = 0.0
    exposed_s: float = 0.0
    overhead_s: float = 0.0
    idle_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.compute_s + self.memory_s + self.exposed_s + self.overhead_s + self.idle_s

    @property
    def parts(self) -> dict[str, float]:
        """Name -> seconds, in the order in which they are shown."""
        return {
            "compute": self.compute_s,
            "memory-bound": self.memory_s,
            "exposed communication": self.exposed_s,
            "overhead": self.overhead_s,
            "idle": self.idle_s,
        }


class Breakdown(msgspec.Struct, frozen=True, dict=True):
    """Where the seconds of a priced step go. Every property is computed when it is first read, and kept.

    ``local``, ``exposed_s``, ``bubble_s`` and ``other_s`` add up to ``step_s``; so do the ``added_s`` of ``terms``.
    """

    priced: PricedStrategy

    @property
    def step_s(self) -> float:
        return float(self.priced.estimate.step_s)

    @cached_property
    def steps(self) -> dict[str, LabelledStep]:
        """Label -> what is expected of the derived steps that carry it."""
        found: dict[str, LabelledStep] = {}
        for cost in self.priced.costs.all:
            name, here = label_text(cost.step), float(cost.here)
            before = found.get(name)
            found[name] = LabelledStep(
                step=cost.step,
                seconds=(before.seconds if before else 0.0) + float(cost.time_s) * here,
                flops=(before.flops if before else 0.0) + float(cost.flops) * here,
                gathers_weights=cost.gathers_weights,
            )
        return found

    # -- terms that add up ------------------------------------------------------------------------------

    @cached_property
    def terms(self) -> tuple[Term, ...]:
        """Every kind of work, what adds most first.

        All communication adds what the step is longer with it than without; a group of axes has its part of that, in
        proportion to what the step would be shorter without it alone. Local work adds what it takes where nothing is
        communicated, the bubble what the schedule leaves idle.
        """
        work = _Work(self.priced)
        step_s, bubble_s, links = work.step_s(), work.bubble_s, set(work.network_s)
        added = {name: work.quiet_s - work.busy_s({*links, name}, sends=False) for name in work.local}
        added |= work.exposed(step_s - bubble_s)
        added["bubble"] = bubble_s
        if self.priced.strategy.offload:
            added["pcie"] = work.quiet_s - work.busy_s(links, sends=False, offload=NOTHING)
        added["other"] = step_s - sum(added.values())
        alone = dict(self.priced.estimate.terms) | work.network_s
        found = [
            Term(name=name, alone_s=float(alone.get(name, s)), added_s=float(s), share=float(s / step_s))
            for name, s in added.items()
            if max(abs(s), float(alone.get(name, 0.0))) > ROUNDING * step_s
        ]
        return tuple(sorted(found, key=lambda term: (-term.added_s, -term.alone_s)))

    # -- communication, exposed and hidden --------------------------------------------------------------

    @cached_property
    def _free(self) -> tuple[float, float]:
        """Seconds of the step, and of its bubble, if links took no time."""
        priced, pipeline = self.priced, self.priced.pipeline
        free = price_parts(
            priced.derived, priced.sizes, without(priced.rates), pipeline=pipeline, memory=priced.parts.memory
        )
        found = free.times.step_s(pipeline, _offload(priced))
        return float(found.step_s), float(found.bubble_s) if pipeline.stages > 1 else 0.0

    @property
    def local(self) -> dict[str, float]:
        """Work on the busiest device by kind."""
        return {name: self.priced.estimate.terms[name] for name in LOCAL_TERMS}

    @property
    def alone(self) -> dict[str, float]:
        """Collectives by themselves, by mesh axes; what they take beyond bytes is ``latency``."""
        waits = {"bubble", "pcie", *LOCAL_TERMS}
        return {name: s for name, s in self.priced.estimate.terms.items() if name not in waits and s > 0}

    @property
    def exposed_s(self) -> float:
        """Seconds by which the step would be shorter if links took no time."""
        return max(0.0, self.step_s - self._free[0])

    @property
    def exposed_share(self) -> float:
        """Exposed communication as a share of the step."""
        return self.exposed_s / self.step_s

    @property
    def hidden_s(self) -> float:
        """Seconds of communication that pass behind something else."""
        return max(0.0, sum(self.alone.values()) - self.exposed_s)

    @property
    def bubble_s(self) -> float:
        """Idle seconds of the pipeline that would be left if links took no time."""
        return self._free[1]

    @property
    def other_s(self) -> float:
        """The rest: stragglers, a host that starts kernels too slowly, PCIe."""
        return max(0.0, self._free[0] - self.bubble_s - sum(self.local.values()))

    def named(self) -> dict[str, float]:
        """The parts that add up, by name, without those of less than a ten-thousandth of the step."""
        parts = {
            **self.local,
            "exposed communication": self.exposed_s,
            "bubble": self.bubble_s,
            "other": self.other_s,
        }
        return {name.replace("_", " "): seconds for name, seconds in parts.items() if seconds > 1e-4 * self.step_s}

    @cached_property
    def traffic(self) -> tuple[Traffic, ...]:
        """Every collective of the step by kind and mesh axes, the most exposed first."""
        found: dict[tuple[str, Group], list[StepCost]] = {}
        for cost in self.priced.costs.all:
            if cost.step.is_collective and float(cost.network_s) > 0:
                found.setdefault((cost.step.op, cost.group), []).append(cost)
        alone = {key: sum(float(cost.network_s * cost.here) for cost in costs) for key, costs in found.items()}
        order = sorted(found, key=lambda key: -alone[key])
        saved = (self._saved_in_turn(order), self._saved_in_turn(order[::-1]))
        rows = [
            Traffic(
                op=key[0],
                axes=costs[0].step.axes,
                executions=sum(float(cost.here) for cost in costs),
                num_bytes=sum(float(cost.network_bytes * cost.here) for cost in costs),
                alone_s=alone[key],
                exposed_s=max(0.0, sum(one[key] for one in saved) / len(saved)),
            )
            for key, costs in found.items()
        ]
        return tuple(sorted(rows, key=lambda row: (-row.exposed_s, -row.alone_s)))

    def _saved_in_turn(self, order: Sequence[tuple[str, Group]]) -> dict[tuple[str, Group], float]:
        """Seconds that each collective saves when it becomes free, those before it being free already."""
        priced, pipeline = self.priced, self.priced.pipeline
        memory, moved = priced.parts.memory, _offload(priced)
        saved, before = {}, priced.estimate.step_s
        for number, key in enumerate(order, 1):
            rates = without(priced.rates, order[:number])
            parts = price_parts(priced.derived, priced.sizes, rates, pipeline=pipeline, memory=memory)
            after = float(parts.times.step_s(pipeline, moved).step_s)
            saved[key], before = before - after, after
        return saved

    # -- the parts of a measured step -------------------------------------------------------------------

    @cached_property
    def partition(self) -> Partition:
        """The step in the five parts of a measured one.

        Local work is compute-bound or memory-bound by which takes longer, launches are overhead and the pipeline's
        bubble is idle. What the step takes beyond these is communication that nothing hides, at most all that there
        is; what is left is the host's and the stragglers' overhead.
        """
        priced = self.priced
        seconds = {"compute": 0.0, "memory": 0.0, "launch": 0.0}
        network = float(priced.estimate.terms.get("pipeline", 0.0))
        for cost in priced.costs.all:
            bound = "compute" if float(cost.math_s) > float(cost.hbm_s) else "memory"
            seconds[bound] += float(cost.local_s - cost.launch_s) * float(cost.here)
            seconds["launch"] += float(cost.launch_s) * float(cost.here)
            network += float(cost.network_s) * float(cost.here)
        idle = float(priced.estimate.terms.get("bubble", 0.0))
        rest = max(0.0, self.step_s - sum(seconds.values()) - idle)
        beyond = rest - network if rest - network > ROUNDING * self.step_s else 0.0
        return Partition(
            compute_s=seconds["compute"],
            memory_s=seconds["memory"],
            exposed_s=rest - beyond,
            overhead_s=seconds["launch"] + beyond,
            idle_s=idle,
        )


def _offload(priced: PricedStrategy) -> Offload:
    return offloaded(priced.parts.memory, priced.rates.pcie_bytes_per_s, priced.pipeline, priced.strategy.offload)


class _Work:
    """A priced step whose work can be left out piece by piece."""

    def __init__(self, priced: PricedStrategy) -> None:
        self.priced, self.pipeline, self.offload = priced, priced.pipeline, _offload(priced)
        every, times = priced.costs.all, priced.parts.times
        self.local = dict.fromkeys(cost.term for cost in every if not cost.step.is_collective)
        self.network_s: dict[str, float] = {}
        for cost in every:
            if cost.step.is_collective:
                self.network_s[cost.term] = self.network_s.get(cost.term, 0.0) + float(cost.network_s * cost.here)
        if priced.costs.boundary:
            between = times.sends_s(self.pipeline) + times.meet_s(self.pipeline)
            self.network_s["pipeline"] = self.network_s.get("pipeline", 0.0) + float(between)
        self.meetings_s = times.meetings_s
        self.bubble_s = float(times.step_s(self.pipeline, self.offload).bubble_s)
        self.quiet_s = self.busy_s(set(self.network_s), sends=False)

    def step_s(self) -> float:
        """The whole step."""
        return self.busy_s(()) + self.bubble_s

    def busy_s(self, without: Collection[str], *, sends: bool = True, offload: Offload | None = None) -> float:
        """Seconds without the bubble when the work of some terms takes no time."""
        costs = self.priced.costs.changed(lambda cost: _free(cost) if cost.term in without else cost)
        costs = costs if sends else msgspec.structs.replace(costs, boundary=())
        meet = self.meetings_s if sends else (0.0, 0.0)
        priced = self.priced
        times = block_times(priced.derived, costs, priced.rates, meetings_s=meet, sizes=priced.sizes)
        found = times.step_s(self.pipeline, self.offload if offload is None else offload)
        return float(found.step_s - found.bubble_s)

    def exposed(self, busy_s: float) -> dict[str, float]:
        """What each group of axes, and the sends between stages, add to the busy seconds."""
        alone = {name: max(0.0, busy_s - self.busy_s({name}, sends=name != "pipeline")) for name in self.network_s}
        exposed = busy_s - self.quiet_s
        if sum(alone.values()) <= ROUNDING * busy_s:
            # two links that are busy equally long: neither alone shortens the step
            alone = {name: self.network_s.get(name, 0.0) for name in alone}
        whole = sum(alone.values())
        return {name: exposed * s / whole if whole else 0.0 for name, s in alone.items()}


def _free(cost: StepCost) -> StepCost:
    """The same step taking no time."""
    return msgspec.structs.replace(
        cost, math_s=0.0, hbm_s=0.0, launch_s=0.0, num_kernels=0, network_s=0.0, latency_s=0.0
    )


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
