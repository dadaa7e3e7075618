"""Seconds of one step of a job from its derived steps: bounds, the expected value between them, and what binds.

Local ops take the larger of their FLOPs at the matmul rate and their bytes at the memory rate. Within one pass
over a block, collectives on weights and weight gradients hide behind compute and behind collectives on other
links; collectives on activations are waited for. Lower bound: the busiest resource, all others hidden behind it.
Upper bound: compute, memory and every collective one after the other.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from meshwright.algebra.derived import Derived
from meshwright.algebra.generation import job_strategy
from meshwright.algebra.notation import product
from meshwright.algebra.sizes import OpSizes
from meshwright.cost.memory import MemoryParts, memory_parts, total_bytes
from meshwright.cost.network.collectives import Placement
from meshwright.cost.offload import Offload, offloaded
from meshwright.cost.pass_times import BlockTimes, block_times, largest, link_seconds, seconds_by_group, total
from meshwright.cost.pipeline import Pipeline
from meshwright.cost.setting import Setting
from meshwright.cost.step_costs import (
    Priced,
    StepCost,
    collective_groups,
    meeting_seconds,
    price_steps,
)
from meshwright.cost.step_rates import StepRates, step_rates, strategy_placements
from meshwright.cost.work.ops import is_attention, model_flops, op_flops
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.plan_file import Prediction
from meshwright.spec.strategy import Strategy

Number = Any
"""A float, or a NumPy array with one entry per candidate."""


Estimate = Prediction[Any]
"""A prediction whose numbers may be arrays."""


class PricedParts(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of all steps, the times of the blocks and the parts of memory: what every schedule has in common."""

    costs: Priced
    times: BlockTimes
    memory: MemoryParts


class PricedStrategy(msgspec.Struct, frozen=True, kw_only=True):
    """One strategy with the placement, what its steps cost, and the prediction, in plain numbers.

    ``derived`` has the axes of several devices only: its steps are those that run.
    """

    strategy: Strategy
    derived: Derived
    sizes: OpSizes
    rates: StepRates
    pipeline: Pipeline
    placement: Placement
    parts: PricedParts
    estimate: Estimate

    @property
    def costs(self) -> Priced:
        """The cost of every step."""
        return self.parts.costs


def price_strategy(setting: Setting, strategy: Strategy) -> PricedStrategy:
    """A step of the job priced in a setting, on the placement that its texts describe or else the best one.

    ``storage`` is of prefill and decode steps, which have no backward pass, update, gradients or optimizer.
    Raises InputError or CannotRunError where the strategy cannot be derived or placed.
    """
    cluster, job = setting.cluster, setting.job
    strategy = job_strategy(job, strategy)
    derived = setting.derived(strategy)
    placements = strategy_placements(cluster, strategy)
    groups = collective_groups(derived)
    every = step_rates(
        cluster,
        placements,
        groups,
        dtype=strategy.matmul_dtype,
        state_dtype=strategy.state_dtype,
        assumptions=setting.assumptions,
        calibration=setting.calibration,
    )
    sizes, pipeline = setting.sizes(strategy), setting.pipeline(strategy)
    tried = price_parts(derived, sizes, every, pipeline=pipeline)
    moved = offloaded(tried.memory, every.pcie_bytes_per_s, pipeline, strategy.offload)
    seconds = np.broadcast_to(tried.times.step_s(pipeline, moved).step_s, len(placements))
    best = int(np.argmin(seconds))
    rates = every.take(best)
    return PricedStrategy(
        strategy=strategy,
        derived=derived,
        sizes=sizes,
        rates=rates,
        pipeline=pipeline,
        placement=placements[best],
        parts=price_parts(derived, sizes, rates, pipeline=pipeline, memory=tried.memory),
        estimate=at_candidate(
            estimate_many(
                setting.model,
                derived,
                sizes,
                rates,
                batch_seqs=float(job.batch_seqs),
                seq_len=job.seq_len,
                pipeline=pipeline,
                offload=strategy.offload,
                memory=tried.memory,
                kind=job.kind,
            ),
            0,
        ),
    )


def estimate_step(setting: Setting, strategy: Strategy) -> Estimate:
    """The prediction alone."""
    return price_strategy(setting, strategy).estimate


def estimate_many(
    model: Model,
    derived: Derived,
    sizes: OpSizes,
    rates: StepRates,
    *,
    batch_seqs: Number,
    seq_len: int,
    pipeline: Pipeline,
    offload: tuple[str, ...] = (),
    memory: MemoryParts | None = None,
    kind: str = "train",
) -> Estimate:
    """The prediction for every candidate at once: arrays of sizes, of placements' rates and of microbatches.

    ``memory`` is what `memory_parts` gives, where it is known already; ``kind`` is the job's.
    """
    priced = price_parts(derived, sizes, rates, pipeline=pipeline, memory=memory)
    costs, parts = priced.costs.all, priced.memory
    moved = offloaded(parts, rates.pcie_bytes_per_s, pipeline, offload)
    seconds = priced.times.step_s(pipeline, moved)
    expected, bubble = seconds.step_s, seconds.bubble_s
    busy = _busy_s(costs, rates)
    items = parts.items(num_microbatches=pipeline.microbatches, pipeline=pipeline, offload=offload)
    num_chips = product(sizes.mesh.values())
    low, high = rates.chip.efficiency.interval(has_experts=model.num_experts > 0)
    share = num_chips / sizes.mesh.get("pipeline", 1)
    flops = total(cost.flops * cost.count for cost in costs) * share
    counted = flops + _masked_flops(costs, sizes) * share
    needed = model_flops(model, Job(kind=kind, batch_seqs=1, seq_len=seq_len)) * batch_seqs
    available = rates.peak_flops_per_s * num_chips * expected
    serial = total((cost.math_s + cost.hbm_s + cost.launch_s + cost.network_s) * cost.here for cost in costs)
    serial = serial + bubble + moved.serial_s + priced.times.sends_s(pipeline) + priced.times.meet_s(pipeline)
    return Estimate(
        step_s=expected,
        step_s_lower=largest(busy),
        step_s_p10=None if low is None else expected * low,
        step_s_p90=None if high is None else expected * high,
        step_s_upper=np.maximum(serial, expected),
        mfu=needed / available,
        hfu=counted / available,
        bound_by=_bound_by(costs, rates, busy, bubble),
        memory=items,
        hbm_bytes_per_chip=total_bytes(items),
        flops=flops,
        terms=_with_pipeline(_terms(costs), priced.times, pipeline, moved, bubble),
    )


def _masked_flops(costs: Sequence[StepCost], sizes: OpSizes) -> Number:
    """FLOPs of attention's masked blocks, which are skipped, and which utilisation counts all the same."""
    if not sizes.causal:
        return 0.0
    whole = msgspec.structs.replace(sizes, causal=False, cache={})
    return total((op_flops(c.step, whole) - c.flops) * c.count for c in costs if _attends(c))


def _attends(cost: StepCost) -> bool:
    return not cost.step.is_collective and is_attention(cost.step)


def price_parts(
    derived: Derived, sizes: OpSizes, rates: StepRates, *, pipeline: Pipeline, memory: MemoryParts | None = None
) -> PricedParts:
    """Everything priced; of the pipeline only the number of microbatches and the shares in ``costs`` matter."""
    count = pipeline.microbatches
    costs = price_steps(derived, sizes, rates, num_microbatches=count, pipeline=pipeline)
    meet = meeting_seconds(derived, sizes, rates, num_microbatches=count)
    times = block_times(derived, costs, rates, meetings_s=meet, sizes=sizes)
    return PricedParts(costs=costs, times=times, memory=memory or memory_parts(derived, sizes))


# -- bounds and what binds ------------------------------------------------------------------------------


def _busy_s(costs: Sequence[StepCost], rates: StepRates) -> list[Number]:
    """Seconds that each resource works in one step: compute, memory, then every physical axis."""
    compute = total(cost.math_s * cost.here for cost in costs)
    memory = total(cost.hbm_s * cost.here for cost in costs)
    return [compute, memory, *link_seconds(seconds_by_group(costs, "network_s"), rates)]


def _bound_by(costs: Sequence[StepCost], rates: StepRates, busy: Sequence[Number], bubble: Number) -> Any:
    """The busiest resource of each candidate: compute, hbm, a level of the network, latency, or the bubble.

    A link is bound by latency when more than half of its time is not explained by bytes. The bubble binds when
    it is longer than any resource works.
    """
    waiting = link_seconds(seconds_by_group(costs, "latency_s"), rates)
    seconds = np.stack(np.broadcast_arrays(*busy, *waiting))
    busy_s, waiting_s = seconds[: len(busy)], seconds[len(busy) :]
    best = np.argmax(busy_s, axis=0)
    words = np.array(["compute", "hbm", *rates.link_levels])[best]
    picked = np.maximum(best - 2, 0)[None]
    waits = np.take_along_axis(waiting_s, picked, axis=0)[0] if len(waiting) else 0.0
    found = np.where((best >= 2) & (waits > np.max(busy_s, axis=0) / 2), "latency", words)
    return np.where(bubble > np.max(busy_s, axis=0), "bubble", found)


def _terms(costs: Sequence[StepCost]) -> dict[str, Number]:
    """Seconds of each kind of work by itself on the busiest device; latency is what collectives take beyond bytes."""
    terms: dict[str, Number] = dict.fromkeys(("matmul", "attention", "elementwise", "loss_head", "optimizer"), 0.0)
    for cost in costs:
        spent = cost.network_s - cost.latency_s if cost.step.is_collective else cost.local_s
        terms[cost.term] = terms.get(cost.term, 0.0) + spent * cost.here
    terms["latency"] = total(cost.latency_s * cost.here for cost in costs)
    return terms


def _with_pipeline(
    terms: dict[str, Number], times: BlockTimes, pipeline: Pipeline, moved: Offload, bubble: Number
) -> dict[str, Number]:
    """The same with what a pipeline and offloading add. Without stages there is nothing to sum over them."""
    if np.any(np.asarray(pipeline.stages) > 1):
        between = times.sends_s(pipeline) + times.meet_s(pipeline)
        terms = terms | {"pipeline": terms.get("pipeline", 0.0) + between, "bubble": bubble}
    else:
        terms.pop("pipeline", None)
    return terms | ({"pcie": moved.serial_s} if np.any(np.asarray(moved.serial_s) > 0) else {})


def at_candidate(found: Estimate, index: int) -> Estimate:
    """The prediction of one candidate, in plain numbers."""
    return Prediction(**{name: _at(getattr(found, name), index) for name in found.__struct_fields__})


def _at(value: Any, index: int) -> Any:
    """One entry of an array, or the number itself, as plain Python; inside dicts too."""
    if value is None:
        return None
    if isinstance(value, dict):
        return {name: _at(item, index) for name, item in value.items()}
    array = np.asarray(value)
    return (array[index] if array.ndim else array[()]).item()
