"""Where the seconds of one training step go: each kind of work's seconds without overlap, and what they add to it."""

from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from itertools import pairwise

import msgspec
from msgspec.structs import replace

from meshwright.algebra.ops import kind_of
from meshwright.algebra.rewrites.rings import num_moves
from meshwright.algebra.steps import Step
from meshwright.core.labels import OPTIMIZER
from meshwright.cost.network.collectives import received_share
from meshwright.cost.network.legs import turns_text
from meshwright.cost.offload import NOTHING, Transfers
from meshwright.cost.pass_times import StepSeconds, block_times
from meshwright.cost.train_step import PricedStrategy
from meshwright.cost.work.kernels import AxisGroup, StepCost
from meshwright.cost.work.ops import LOCAL_TERMS

WORDS: dict[str, str] = {
    "matmul": "matrix products",
    "attention": "attention",
    "elementwise": "elementwise work",
    "loss_head": "loss head",
    "optimizer": "optimizer",
    "bubble": "pipeline bubble",
    "pipeline": "sends between stages",
    "pcie": "transfers to the host",
    "islands": "sums between islands",
    "other": "host, stragglers, latency",
}

ROUNDING = 1e-9
"""Share of a step below which a difference of two sums counts as rounding error."""


class Term(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of work: its seconds without overlap, and the seconds that it adds to the step.

    The ``added_s`` of all terms add up to the step; ``share`` is the term's share of it. Work that overlap hides adds
    less than ``alone_s``, or nothing. ``name`` is a key of `WORDS`, or the mesh axes of collectives, joined by commas.
    """

    name: str
    alone_s: float
    added_s: float
    share: float

    @property
    def words(self) -> str:
        """The term's name in a sentence."""
        return term_words(self.name)


def term_words(name: str) -> str:
    """Returns a term's name in a sentence: ``"matrix products"``, ``"collectives over fsdp and context"``."""
    return WORDS.get(name) or f"collectives over {' and '.join(name.split(','))}"


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of collective over one group of mesh axes, in one training step of the busiest device.

    ``num_bytes`` (sent by one device) and ``alone_s`` (no overlap) are sums over all executions. ``exposed_s`` is its
    part of the exposed communication: collectives are made free one by one, from the longest to the shortest and in
    reverse order, and each gets the mean of its two savings. The parts add up.
    """

    op: str
    axes: tuple[str, ...]
    executions: float
    num_bytes: float
    alone_s: float
    exposed_s: float


class PricedOverlap(msgspec.Struct, frozen=True, kw_only=True):
    """Overlap in the price of a step: of ``alone_s`` of communication it hides ``hidden_s``.

    ``exposed_step_s`` and ``exposed_mfu`` are of the step if a share of its communication, by default all, is not
    hidden."""

    step_s: float
    alone_s: float
    hidden_s: float
    exposed_step_s: float
    exposed_mfu: float


class LabelledStep(msgspec.Struct, frozen=True, kw_only=True):
    """All executions, in one training step, of the derived steps that carry one label. ``seconds`` are without overlap
    and without launches, which `Partition` counts as overhead.

    ``gathers_weights`` is true for a gather that could run ahead of its pass.
    """

    step: Step
    seconds: float
    flops: float
    gathers_weights: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes of a collective; () for local work."""
        return self.step.axes if self.step.is_collective else ()


def label_text(step: Step) -> str:
    """Returns the label that a step's instructions carry in a compiled program; all optimizer steps have one label."""
    is_optimizer = not step.is_collective and kind_of(step).group == "optimizer"
    return OPTIMIZER if is_optimizer else str(step.label)


class Partition(msgspec.Struct, frozen=True, kw_only=True):
    """The wall time of one step, predicted or measured, in five parts that add up to it."""

    compute_s: float = 0.0
    memory_s: float = 0.0
    exposed_s: float = 0.0
    overhead_s: float = 0.0
    idle_s: float = 0.0

    @property
    def total_s(self) -> float:
        return float(sum(msgspec.structs.astuple(self)))

    @property
    def parts(self) -> dict[str, float]:
        """Maps the name of each part to its seconds, in the order in which tables show them."""
        part_names = ("compute", "memory-bound", "exposed communication", "overhead", "idle")
        return dict(zip(part_names, msgspec.structs.astuple(self), strict=True))


class Breakdown(msgspec.Struct, frozen=True, dict=True):
    """Where the seconds of a priced step go. Every property is computed when it is first read, and kept.

    ``local``, ``exposed_s``, ``bubble_s`` and ``other_s`` add up to ``step_s``; so do the ``added_s`` of ``terms``.
    """

    priced: PricedStrategy

    @property
    def step_s(self) -> float:
        return float(self.priced.estimate.step_s)

    def _seconds(self, change: Callable[[StepCost], StepCost], offload: Transfers | None = None) -> StepSeconds:
        """Returns the seconds of the step after a change of its costs, with other transfers to the host if given."""
        priced = self.priced
        changed_times = block_times(priced.derived, priced.costs.changed(change), priced.sizes, priced.rates)
        seconds = changed_times.step_s(priced.pipeline, priced.moved if offload is None else offload)
        return replace(seconds, step_s=seconds.step_s + priced.exchange_s)

    def _busy_s(self, free_terms: Collection[str], offload: Transfers | None = None) -> float:
        """Returns the seconds of the step without its bubble if the work of the ``free_terms`` takes no time."""
        step_seconds = self._seconds(lambda cost: _free(cost) if cost.term in free_terms else cost, offload)
        return float(step_seconds.step_s - step_seconds.bubble_s)

    def added_s(self, free: StepCost) -> float:
        """Returns the seconds by which the step would be shorter if one derived step took no time."""
        return max(0.0, self.step_s - float(self._seconds(lambda cost: _free(cost) if cost is free else cost).step_s))

    @cached_property
    def steps(self) -> dict[str, LabelledStep]:
        """Maps each label to all priced steps that carry it, their seconds and FLOPs added."""
        step_by_label: dict[str, LabelledStep] = {}
        for cost in self.priced.costs.all:
            label, num_runs = label_text(cost.step), float(cost.here)
            earlier_step = step_by_label.get(label)
            step_by_label[label] = LabelledStep(
                step=cost.step,
                seconds=(earlier_step.seconds if earlier_step else 0.0) + float(cost.time_s - cost.launch_s) * num_runs,
                flops=(earlier_step.flops if earlier_step else 0.0) + float(cost.flops) * num_runs,
                gathers_weights=cost.gathers_weights,
            )
        return step_by_label

    # -- terms that add up ------------------------------------------------------------------------------

    @cached_property
    def terms(self) -> tuple[Term, ...]:
        """Every kind of work, the one that adds most first.

        All communication together adds as much as the step would be shorter without it; groups of axes divide that in
        proportion to what each saves if only it is free. Local work adds its seconds in a step without communication.
        The bubble adds the idle seconds of the schedule.
        """
        priced_step, comm_s_by_name = self.priced, self._links
        bubble_s = float(priced_step.seconds.bubble_s)
        busy_s, no_comm_s = self._busy_s(()), self._busy_s(set(comm_s_by_name))
        step_s = busy_s + bubble_s
        local_terms = dict.fromkeys(cost.term for cost in priced_step.costs.all if not cost.step.is_collective)
        added_s_by_name = {name: no_comm_s - self._busy_s({*comm_s_by_name, name}) for name in local_terms}
        added_s_by_name |= self._exposed(step_s - bubble_s, no_comm_s)
        added_s_by_name |= {"bubble": bubble_s, "islands": priced_step.exchange_s}
        if priced_step.offload:
            added_s_by_name["pcie"] = no_comm_s - self._busy_s(set(comm_s_by_name), NOTHING)
        added_s_by_name["other"] = step_s - sum(added_s_by_name.values())
        alone_s_by_name = dict(priced_step.estimate.terms) | comm_s_by_name
        terms = [
            Term(name=name, alone_s=float(alone_s_by_name.get(name, s)), added_s=float(s), share=float(s / step_s))
            for name, s in added_s_by_name.items()
            if max(abs(s), float(alone_s_by_name.get(name, 0.0))) > ROUNDING * step_s
        ]
        return tuple(sorted(terms, key=lambda term: (-term.added_s, -term.alone_s)))

    @cached_property
    def _links(self) -> dict[str, float]:
        """Seconds of the collectives of each group of axes, and of "pipeline": the sends between stages."""
        priced, seconds_by_term = self.priced, dict[str, float]()
        for cost in priced.costs.all:
            if cost.step.is_collective:
                seconds_by_term[cost.term] = seconds_by_term.get(cost.term, 0.0) + float(cost.network_s * cost.here)
        if priced.costs.boundary:
            stage_sends_s = priced.times.sends_s(priced.pipeline) + priced.times.exchange_s(priced.pipeline)
            seconds_by_term["pipeline"] = seconds_by_term.get("pipeline", 0.0) + float(stage_sends_s)
        return seconds_by_term

    def _exposed(self, busy_s: float, no_comm_s: float) -> dict[str, float]:
        """Maps each name of `_links` to its part of ``busy_s - no_comm_s``, the seconds that communication adds."""
        saved_s_by_name = {name: max(0.0, busy_s - self._busy_s({name})) for name in self._links}
        if sum(saved_s_by_name.values()) <= ROUNDING * busy_s:
            # two links are busy equally long: freeing only one does not shorten the step
            saved_s_by_name = self._links
        total_s = sum(saved_s_by_name.values())
        return {name: (busy_s - no_comm_s) * s / total_s if total_s else 0.0 for name, s in saved_s_by_name.items()}

    # -- communication, exposed and hidden --------------------------------------------------------------

    @cached_property
    def _free(self) -> tuple[float, float]:
        """Seconds of the step, and of its bubble, if all communication took no time."""
        step_seconds = self._seconds(_without_links)
        free_s = float(step_seconds.step_s) - self.priced.exchange_s
        return free_s, float(step_seconds.bubble_s) if self.priced.pipeline.stages > 1 else 0.0

    @property
    def local(self) -> dict[str, float]:
        """Maps each kind of local work to its seconds on the busiest device."""
        return {name: self.priced.estimate.terms[name] for name in LOCAL_TERMS}

    @property
    def alone(self) -> dict[str, float]:
        """Maps mesh axes to seconds of collectives without overlap, "latency" to the time that bytes do not explain."""
        non_comm_names = {"bubble", "pcie", *LOCAL_TERMS}
        return {name: s for name, s in self.priced.estimate.terms.items() if name not in non_comm_names and s > 0}

    @property
    def exposed_s(self) -> float:
        """Seconds by which the step would be shorter if communication took no time."""
        return max(0.0, self.step_s - self._free[0])

    @property
    def exposed_share(self) -> float:
        """Exposed communication as a share of the step."""
        return self.exposed_s / self.step_s

    @property
    def hidden_s(self) -> float:
        """Seconds of communication that overlap hides."""
        return max(0.0, sum(self.alone.values()) - self.exposed_s)

    def overlap(self, exposed: Callable[[StepCost], float] = lambda collective: 1.0) -> PricedOverlap:
        """Returns what overlap hides, and the step in which the ``exposed`` share of each collective is not hidden."""

        def split(cost: StepCost) -> StepCost:
            exposed_s = cost.network_s * exposed(cost) if cost.step.is_collective else 0.0
            return replace(cost, network_s=cost.network_s - exposed_s, exposed_s=exposed_s)

        exchange, exposed_step_s = self.priced.exchange, float(self._seconds(split).step_s)
        exposed_step_s += exchange.serial_s - exchange.exposed_s if exchange else 0.0
        return PricedOverlap(
            step_s=self.step_s,
            alone_s=sum(self.alone.values()),
            hidden_s=self.hidden_s,
            exposed_step_s=exposed_step_s,
            exposed_mfu=self.priced.estimate.mfu * self.step_s / exposed_step_s,
        )

    @property
    def bubble_s(self) -> float:
        """Idle seconds of the pipeline if communication took no time."""
        return self._free[1]

    @property
    def other_s(self) -> float:
        """Seconds that local work, exposed communication and bubble leave: stragglers, a slow host, PCIe."""
        return max(0.0, self._free[0] - self.bubble_s - sum(self.local.values()))

    def named(self) -> dict[str, float]:
        """Maps the parts of `step_s` by name to seconds; parts below a ten-thousandth of the step are left out."""
        s_by_part = {
            **self.local,
            "exposed communication": self.exposed_s,
            "bubble": self.bubble_s,
            "other": self.other_s,
        }
        return {name.replace("_", " "): part_s for name, part_s in s_by_part.items() if part_s > 1e-4 * self.step_s}

    @cached_property
    def turns(self) -> tuple[str, ...]:
        """Lines about groups of mesh axes whose reduce-scatter on a torus runs in two turns, and in which order."""
        summed_groups = {traffic.axes for traffic in self.traffic if traffic.op == "reduce_scatter"}
        text_by_axes = {", ".join(axes): turns_text(self.priced.placement, axes) for axes in sorted(summed_groups)}
        return tuple(f"{axes}: {text}" for axes, text in text_by_axes.items() if text)

    @cached_property
    def traffic(self) -> tuple[Traffic, ...]:
        """Every collective of the step by kind and mesh axes, the most exposed first."""
        costs_by_key: dict[tuple[str, AxisGroup], list[StepCost]] = {}
        send_costs = (replace(cost, here=self.priced.pipeline.num_sends / 2) for cost in self.priced.costs.boundary)
        for cost in (*self.priced.costs.all, *send_costs):
            if cost.step.is_collective and float(cost.network_s * cost.here) > 0:
                costs_by_key.setdefault((cost.step.op, cost.group), []).append(cost)
        net_s = {key: sum(float(cost.network_s * cost.here) for cost in costs) for key, costs in costs_by_key.items()}
        sorted_keys = sorted(costs_by_key, key=lambda key: -net_s[key])
        saved_in_orders = (self._saved_in_turn(sorted_keys), self._saved_in_turn(sorted_keys[::-1]))
        sizes, groups = self.priced.sizes, self.priced.rates.groups
        shares = {key: float(received_share(key[0], groups[key[1]].size)) for key in costs_by_key}
        collectives = [
            Traffic(
                op=key[0],
                axes=costs[0].step.axes,
                executions=sum(float(cost.here) for cost in costs),
                num_bytes=shares[key] * sum(float(c.network_bytes * c.here * num_moves(c.step, sizes)) for c in costs),
                alone_s=net_s[key],
                exposed_s=max(0.0, sum(saved_by_key[key] for saved_by_key in saved_in_orders) / len(saved_in_orders)),
            )
            for key, costs in costs_by_key.items()
        ]
        return tuple(sorted(collectives, key=lambda traffic: (-traffic.exposed_s, -traffic.alone_s)))

    def _saved_in_turn(self, key_order: Sequence[tuple[str, AxisGroup]]) -> dict[tuple[str, AxisGroup], float]:
        """Maps each collective to the seconds it saves when collectives become free one by one in ``key_order``."""
        steps_s = [self.priced.estimate.step_s, *(self._without(key_order[:n]) for n in range(1, len(key_order) + 1))]
        return {key: before_s - after_s for key, (before_s, after_s) in zip(key_order, pairwise(steps_s), strict=True)}

    def _without(self, free: Collection[tuple[str, AxisGroup]]) -> float:
        """Returns the seconds of the step if the ``free`` collectives take no time."""
        step_seconds = self._seconds(lambda cost: _without_links(cost) if (cost.step.op, cost.group) in free else cost)
        return float(step_seconds.step_s)

    # -- the parts of a measured step -------------------------------------------------------------------

    @cached_property
    def partition(self) -> Partition:
        """The step in the five parts into which a measured step is divided.

        A local step counts as compute if its FLOPs take longer than its bytes, else as memory-bound. Launches are
        overhead and the pipeline's bubble is idle. The rest of the step is exposed communication, at most all
        communication; what then remains is overhead of the host and of stragglers.
        """
        priced_step = self.priced
        seconds_by_part = {"compute": 0.0, "memory": 0.0, "launch": 0.0}
        network_s = float(priced_step.estimate.terms.get("pipeline", 0.0)) + priced_step.exchange_s
        for cost in priced_step.costs.all:
            bound_by = "compute" if float(cost.math_s) > float(cost.hbm_s) else "memory"
            seconds_by_part[bound_by] += float(cost.local_s - cost.launch_s) * float(cost.here)
            seconds_by_part["launch"] += float(cost.launch_s) * float(cost.here)
            network_s += float(cost.network_s) * float(cost.here)
        idle_s = float(priced_step.estimate.terms.get("bubble", 0.0))
        exposed_s = max(0.0, self.step_s - sum(seconds_by_part.values()) - idle_s)
        excess_s = exposed_s - network_s if exposed_s - network_s > ROUNDING * self.step_s else 0.0
        return Partition(
            compute_s=seconds_by_part["compute"],
            memory_s=seconds_by_part["memory"],
            exposed_s=exposed_s - excess_s,
            overhead_s=seconds_by_part["launch"] + excess_s,
            idle_s=idle_s,
        )


def _without_links(cost: StepCost) -> StepCost:
    """Returns the cost with communication that takes no time."""
    return replace(cost, network_s=0.0, latency_s=0.0)


def _free(cost: StepCost) -> StepCost:
    """Returns the cost with no time for compute, memory, launches or communication."""
    return replace(_without_links(cost), math_s=0.0, hbm_s=0.0, launch_s=0.0, num_kernels=0)
