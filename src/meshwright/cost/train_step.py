"""Seconds of one step of a job from its derived steps: bounds, the expected value between them, and what binds.

By the data sheet a local op takes the longer of its FLOPs and its bytes; fitted numbers let them overlap in part.
Within one pass over a block, collectives on weights and weight gradients are hidden by compute and by collectives on
other links; collectives on activations are exposed. The lower bound is the time of the busiest resource, which hides
all other work. The upper bound is compute, memory and every collective without overlap.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from meshwright.algebra.derived import Derived
from meshwright.algebra.generation.derive import job_strategy
from meshwright.algebra.notation import product
from meshwright.algebra.sizes import Number
from meshwright.cost.arrays import as_python, largest, select, total
from meshwright.cost.memory.chip import MemoryParts, total_bytes
from meshwright.cost.memory.state import memory_parts
from meshwright.cost.network.placement import Placement
from meshwright.cost.offload import NOTHING, Transfers, offloaded
from meshwright.cost.outer import OuterExchange, outer_exchange, with_exchange
from meshwright.cost.pass_times import BlockTimes, StepSeconds, block_times, link_seconds
from meshwright.cost.pipeline import PipelineCost
from meshwright.cost.setting import Setting
from meshwright.cost.step_costs import Priced, price_steps
from meshwright.cost.step_rates import StepRates, strategy_placements
from meshwright.cost.work.kernels import StepCost
from meshwright.cost.work.ops import LOCAL_TERMS, is_attention, model_flops, op_flops
from meshwright.cost.work.slots import SlotSizes
from meshwright.spec.job import Job
from meshwright.spec.prediction import Prediction
from meshwright.spec.strategy import Strategy

Estimate = Prediction[Any]
"""A prediction whose numbers may be arrays."""


class PricedStep(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Derived steps with the sizes, the rates and the pipeline that price them; these three may hold arrays.

    Every property is computed when it is first read, and kept.
    """

    derived: Derived
    sizes: SlotSizes
    rates: StepRates
    pipeline: PipelineCost
    offload: tuple[str, ...] = ()
    known: dict[object, StepCost] = {}

    @cached_property
    def costs(self) -> Priced:
        """The cost of every step."""
        return price_steps(self.derived, self.sizes, self.rates, self.pipeline, self.known)

    @cached_property
    def times(self) -> BlockTimes:
        """Seconds of the blocks, which do not depend on the schedule."""
        return block_times(self.derived, self.costs, self.sizes, self.rates)

    @cached_property
    def memory(self) -> MemoryParts:
        """The parts of a chip's memory, which do not depend on the schedule."""
        return memory_parts(self.derived, self.sizes)

    @cached_property
    def moved(self) -> Transfers:
        """The PCIe transfers of offloaded activations and optimizer state."""
        if not self.offload:
            return NOTHING
        return offloaded(self.memory, self.rates.pcie_bytes_per_s, self.pipeline, self.offload)

    @cached_property
    def seconds(self) -> StepSeconds:
        """Seconds of the whole step, and of its bubble."""
        return self.times.step_s(self.pipeline, self.moved)


class PricedStrategy(PricedStep, frozen=True, kw_only=True, dict=True):
    """One strategy with its placement, the costs of its steps and its prediction, in plain numbers.

    ``derived`` has only axes of several devices, so that its steps are exactly the steps that run. With islands, the
    setting and the strategy are of one island, and ``exchange`` is between islands.
    """

    setting: Setting
    strategy: Strategy
    placement: Placement
    exchange: OuterExchange | None = None

    @cached_property
    def estimate(self) -> Estimate:
        """The prediction, for all islands."""
        estimate = predict(self, self.setting, batch_seqs=float(self.setting.job.batch_seqs))
        return estimate if self.exchange is None else with_exchange(estimate, self.exchange)

    @property
    def exchange_s(self) -> float:
        """Seconds by which exchanges between islands lengthen the mean step."""
        return 0.0 if self.exchange is None else self.exchange.exposed_s


def price_strategy(setting: Setting, strategy: Strategy) -> PricedStrategy:
    """Prices a step of the job, on the placement that the strategy describes or else on the fastest one.

    Raises InputError or CannotRunError if the strategy cannot be derived or laid on the cluster.
    """
    if strategy.num_islands > 1:
        priced = price_strategy(setting.of_island(strategy), strategy.inner())
        derived, step_s = setting.derived(strategy), float(priced.estimate.step_s)
        exchange = outer_exchange(setting.cluster, strategy, derived, priced.sizes, inner_s=step_s)
        return msgspec.structs.replace(priced, derived=derived, exchange=exchange)
    strategy = job_strategy(setting.job, strategy)
    derived = setting.derived(strategy)
    placements = strategy_placements(setting.cluster, strategy)
    rates = setting.step_rates(strategy, placements, derived)
    priced_step = PricedStep(
        derived=derived,
        sizes=setting.sizes(strategy),
        rates=rates,
        pipeline=setting.pipeline(strategy),
        offload=strategy.offload,
    )
    best_index = int(np.argmin(np.broadcast_to(priced_step.seconds.step_s, len(placements))))
    return PricedStrategy(
        derived=derived,
        sizes=priced_step.sizes,
        rates=select(rates, best_index),
        pipeline=priced_step.pipeline,
        offload=strategy.offload,
        setting=setting,
        strategy=strategy,
        placement=placements[best_index],
    )


def estimate_step(setting: Setting, strategy: Strategy) -> Estimate:
    """Returns only the prediction of `price_strategy`."""
    return price_strategy(setting, strategy).estimate


def predict(priced: PricedStep, setting: Setting, *, batch_seqs: Number) -> Estimate:
    """Returns the prediction of every candidate at once: sizes, rates and microbatches may be arrays."""
    costs, sizes, rates, pipeline, times = priced.costs.all, priced.sizes, priced.rates, priced.pipeline, priced.times
    model, job = setting.model, setting.job
    step_s, bubble_s = priced.seconds.step_s, priced.seconds.bubble_s
    busy_seconds = _busy_s(costs, rates)
    memory_items = priced.memory.items(pipeline, priced.offload)
    num_chips = product(sizes.mesh.values())
    low_factor, high_factor = rates.chip.efficiency.interval(has_experts=model.num_experts > 0)
    chips_per_stage = num_chips / sizes.mesh.get("pipeline", 1)
    step_flops = total(cost.flops * cost.count for cost in costs) * chips_per_stage
    hardware_flops = step_flops + _masked_flops(costs, sizes) * chips_per_stage
    seq_job = Job(kind=job.kind, batch_seqs=1, seq_len=job.seq_len)
    mfu_flops, causal_flops = (model_flops(model, seq_job, causal=causal) * batch_seqs for causal in (False, True))
    peak_flops = rates.peak_flops_per_s * num_chips * step_s
    serial_s = total((cost.math_s + cost.hbm_s + cost.launch_s + cost.network_s) * cost.here for cost in costs)
    serial_s = serial_s + bubble_s + priced.moved.serial_s + times.sends_s(pipeline) + times.exchange_s(pipeline)
    return as_python(
        Estimate(
            step_s=step_s,
            step_s_lower=largest(busy_seconds),
            step_s_p10=None if low_factor is None else step_s * low_factor,
            step_s_p90=None if high_factor is None else step_s * high_factor,
            step_s_upper=np.maximum(serial_s, step_s),
            mfu=mfu_flops / peak_flops,
            hfu=hardware_flops / peak_flops,
            mfu_causal=causal_flops / peak_flops,
            bound_by=_bound_by(costs, rates, busy_seconds, bubble_s),
            memory=memory_items,
            hbm_bytes_per_chip=total_bytes(memory_items),
            flops=step_flops,
            terms=_terms(priced, bubble_s),
        )
    )


def _masked_flops(costs: Sequence[StepCost], sizes: SlotSizes) -> Number:
    """Returns the FLOPs of masked blocks of attention, which are skipped but count in the HFU; else 0."""
    if not sizes.causal:
        return 0.0
    unmasked_sizes = msgspec.structs.replace(sizes, causal=False, cache={})
    attention_costs = (cost for cost in costs if not cost.step.is_collective and is_attention(cost.step))
    return total((op_flops(c.step, unmasked_sizes) - c.flops) * c.count for c in attention_costs)


# -- bounds and what binds ------------------------------------------------------------------------------


def _busy_s(costs: Sequence[StepCost], rates: StepRates) -> list[Number]:
    """Returns the busy seconds of each resource in one step: compute, memory, then every physical axis."""
    compute_s = total(cost.math_s * cost.here for cost in costs)
    memory_s = total(cost.hbm_s * cost.here for cost in costs)
    return [compute_s, memory_s, *link_seconds(costs, rates)]


def _bound_by(costs: Sequence[StepCost], rates: StepRates, busy_seconds: Sequence[Number], bubble_s: Number) -> Any:
    """Returns the busiest resource of each candidate: compute, hbm, a level of the network, latency, or the bubble.

    Latency binds if bytes explain less than half of the busiest link's time, the bubble if it is longer than every
    resource."""
    latency_s = link_seconds(costs, rates, field="latency_s")
    all_s = np.stack(np.broadcast_arrays(*busy_seconds, *latency_s))
    busy_rows, latency_rows = all_s[: len(busy_seconds)], all_s[len(busy_seconds) :]
    busiest_row = np.argmax(busy_rows, axis=0)
    resources = np.array(["compute", "hbm", *rates.link_levels])[busiest_row]
    link_index = np.maximum(busiest_row - 2, 0)[None]
    link_latency_s = np.take_along_axis(latency_rows, link_index, axis=0)[0] if len(latency_s) else 0.0
    bound_names = np.where((busiest_row >= 2) & (link_latency_s > np.max(busy_rows, axis=0) / 2), "latency", resources)
    return np.where(bubble_s > np.max(busy_rows, axis=0), "bubble", bound_names)


def _terms(priced: PricedStep, bubble_s: Number) -> dict[str, Number]:
    """Returns the seconds of each kind of work without overlap; "latency" is collectives' time that bytes do not
    explain.

    "pipeline" and "bubble" exist only with several stages, and "pcie" only with transfers to the host."""
    costs, times, pipeline, pcie_s = priced.costs.all, priced.times, priced.pipeline, priced.moved.serial_s
    seconds_by_term: dict[str, Number] = dict.fromkeys(LOCAL_TERMS, 0.0)
    for cost in costs:
        spent_s = cost.network_s - cost.latency_s if cost.step.is_collective else cost.local_s
        seconds_by_term[cost.term] = seconds_by_term.get(cost.term, 0.0) + spent_s * cost.here
    seconds_by_term["latency"] = total(cost.latency_s * cost.here for cost in costs)
    if np.any(np.asarray(pipeline.stages) > 1):
        stage_sends_s = times.sends_s(pipeline) + times.exchange_s(pipeline)
        seconds_by_term |= {"pipeline": seconds_by_term.get("pipeline", 0.0) + stage_sends_s, "bubble": bubble_s}
    else:
        seconds_by_term.pop("pipeline", None)
    return seconds_by_term | ({"pcie": pcie_s} if np.any(np.asarray(pcie_s) > 0) else {})
