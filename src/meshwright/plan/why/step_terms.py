"""Where the seconds of a step go: what each kind of work takes by itself, and what it adds to the step."""

from collections.abc import Collection

import msgspec

from meshwright.cost.offload import NOTHING, Offload, offloaded
from meshwright.cost.pass_times import block_times
from meshwright.cost.pipeline import Pipeline, strategy_pipeline
from meshwright.cost.step_costs import StepCost
from meshwright.cost.train_step import PricedStrategy, price_parts
from meshwright.cost.work.ops import op_term
from meshwright.spec.strategy import Strategy

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


class StepTerm(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of work: its seconds by itself, and those that the step is longer for it.

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


def step_terms(priced: PricedStrategy, strategy: Strategy) -> tuple[StepTerm, ...]:
    """Every term of a priced step, what adds most first.

    All communication adds what the step is longer with it than without; a group of axes has its part of that, in
    proportion to what the step would be shorter without it alone. Local work adds what it takes where nothing is
    communicated, the bubble what the schedule leaves idle.
    """
    model = _Parts(priced, strategy)
    step_s, bubble_s, links = model.step_s(), model.bubble_s, set(model.network_s)
    added = {name: model.quiet_s - model.busy_s({*links, name}, sends=False) for name in model.local}
    added |= _exposed(model, step_s - bubble_s)
    added["bubble"] = bubble_s
    if strategy.offload:
        added["pcie"] = model.quiet_s - model.busy_s(links, sends=False, offload=NOTHING)
    added["other"] = step_s - sum(added.values())
    alone = dict(priced.estimate.terms) | model.network_s
    found = [
        StepTerm(name=name, alone_s=float(alone.get(name, s)), added_s=float(s), share=float(s / step_s))
        for name, s in added.items()
        if max(abs(s), float(alone.get(name, 0.0))) > 1e-9 * step_s
    ]
    return tuple(sorted(found, key=lambda term: (-term.added_s, -term.alone_s)))


class _Parts:
    """A priced step whose work can be left out piece by piece."""

    def __init__(self, priced: PricedStrategy, strategy: Strategy) -> None:
        self.priced = priced
        self.pipeline: Pipeline = strategy_pipeline(strategy)
        parts = price_parts(priced.derived, priced.sizes, priced.rates, pipeline=self.pipeline)
        self.costs = parts.costs
        self.offload = offloaded(parts.memory, priced.rates.pcie_bytes_per_s, self.pipeline, strategy.offload)
        every = self.costs.all
        self.local = dict.fromkeys(_name(cost) for cost in every if not cost.step.is_collective)
        self.network_s: dict[str, float] = {}
        for cost in every:
            if cost.step.is_collective:
                spent = float(cost.network_s * cost.here)
                self.network_s[_name(cost)] = self.network_s.get(_name(cost), 0.0) + spent
        if self.costs.boundary:
            between = parts.times.sends_s(self.pipeline) + parts.times.meet_s(self.pipeline)
            self.network_s["pipeline"] = self.network_s.get("pipeline", 0.0) + float(between)
        self.meetings_s = parts.times.meetings_s
        self.bubble_s = float(parts.times.step_s(self.pipeline, self.offload).bubble_s)
        self.quiet_s = self.busy_s(set(self.network_s), sends=False)

    def step_s(self) -> float:
        """The whole step."""
        return self.busy_s(()) + self.bubble_s

    def busy_s(self, without: Collection[str], *, sends: bool = True, offload: Offload | None = None) -> float:
        """Seconds without the bubble when the work of some terms takes no time."""
        costs = self.costs.changed(lambda cost: _free(cost) if _name(cost) in without else cost)
        costs = costs if sends else msgspec.structs.replace(costs, boundary=())
        meet = self.meetings_s if sends else (0.0, 0.0)
        times = block_times(self.priced.derived, costs, self.priced.rates, meetings_s=meet)
        found = times.step_s(self.pipeline, self.offload if offload is None else offload)
        return float(found.step_s - found.bubble_s)


def _exposed(model: _Parts, busy_s: float) -> dict[str, float]:
    """What each group of axes, and the sends between stages, add to the busy seconds."""
    alone = {name: busy_s - model.busy_s({name}, sends=name != "pipeline") for name in model.network_s}
    exposed = busy_s - model.quiet_s
    alone = {name: max(0.0, s) for name, s in alone.items()}
    if sum(alone.values()) <= 1e-9 * busy_s:
        # two links that are busy equally long: neither alone shortens the step
        alone = {name: model.network_s.get(name, 0.0) for name in alone}
    whole = sum(alone.values())
    return {name: exposed * s / whole if whole else 0.0 for name, s in alone.items()}


def _name(cost: StepCost) -> str:
    return ",".join(cost.step.axes) if cost.step.is_collective else op_term(cost.step)


def _free(cost: StepCost) -> StepCost:
    """The same step taking no time."""
    return msgspec.structs.replace(
        cost, math_s=0.0, hbm_s=0.0, launch_s=0.0, num_kernels=0, network_s=0.0, latency_s=0.0
    )
