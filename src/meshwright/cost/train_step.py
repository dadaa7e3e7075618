"""Seconds of one training step from its derived steps: bounds, the expected value between them, and what binds.

Local ops take the larger of their FLOPs at the matmul rate and their bytes at the memory rate. Within one pass
over a block, collectives on weights and weight gradients hide behind compute and behind collectives on other
links; collectives on activations are waited for. Lower bound: the busiest resource, all others hidden behind it.
Upper bound: compute, memory and every collective one after the other.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from meshwright.algebra.derive import Derived, derive
from meshwright.algebra.notation import product
from meshwright.algebra.transformer import transformer
from meshwright.cost.memory import total_bytes, training_memory
from meshwright.cost.network import Placement
from meshwright.cost.ops import OpSizes, model_flops, op_term
from meshwright.cost.step_costs import StepCost, collective_groups, price_steps, strategy_sizes
from meshwright.cost.step_rates import (
    Group,
    StepRates,
    attention_scores,
    matmul_dtype,
    step_rates,
    strategy_placements,
)
from meshwright.spec.calibration import Calibration
from meshwright.spec.cluster import Cluster
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.strategy import Strategy

Number = Any
"""A float, or a NumPy array with one entry per candidate."""


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """One training step predicted; every number may be an array with one entry per candidate.

    ``flops`` are those that all devices execute. ``terms`` are seconds of each kind of work by itself, before
    any overlap: matmul, attention, elementwise, loss_head, optimizer, a collective per mesh-axis group, latency.
    """

    step_s: Number
    step_s_lower: Number
    step_s_upper: Number
    mfu: Number
    hfu: Number
    bound_by: Any
    memory: dict[str, Number]
    hbm_bytes_per_chip: Number
    flops: Number
    terms: dict[str, Number]

    def at(self, index: int) -> "Estimate":
        """The estimate of one candidate, in plain numbers."""
        return Estimate(**{name: _at(getattr(self, name), index) for name in self.__struct_fields__})


class PricedStrategy(msgspec.Struct, frozen=True, kw_only=True):
    """One strategy with the placement, the cost of every step in order, and the prediction, in plain numbers.

    ``derived`` has the axes of several devices only: its steps are those that run.
    """

    derived: Derived
    sizes: OpSizes
    rates: StepRates
    placement: Placement
    costs: tuple[StepCost, ...]
    estimate: Estimate


def price_strategy(
    model: Model, cluster: Cluster, job: Job, strategy: Strategy, *, calibration: Calibration | None = None
) -> PricedStrategy:
    """A strategy priced on a cluster, on the placement that its texts describe or else the best one.

    Raises InputError or CannotRunError where the strategy cannot be derived or placed.
    """
    derived = derive(transformer(model), strategy)
    placements = strategy_placements(cluster, strategy)
    groups, dtype = collective_groups(derived), matmul_dtype(strategy.state)
    every = step_rates(cluster, placements, groups, dtype=dtype, calibration=calibration)
    sizes = strategy_sizes(model, job, strategy, scores=attention_scores(cluster))
    count = strategy.num_microbatches
    costs = price_steps(derived, sizes, every, num_microbatches=count)
    seconds = np.broadcast_to(_expected_s(derived, costs, every, count), len(placements))
    best = int(np.argmin(seconds))
    rates = every.take(best)
    return PricedStrategy(
        derived=derived,
        sizes=sizes,
        rates=rates,
        placement=placements[best],
        costs=tuple(price_steps(derived, sizes, rates, num_microbatches=count)),
        estimate=estimate_many(
            model,
            derived,
            sizes,
            rates,
            batch_seqs=float(job.batch_seqs),
            seq_len=job.seq_len,
            num_microbatches=count,
        ).at(0),
    )


def estimate_step(
    model: Model, cluster: Cluster, job: Job, strategy: Strategy, *, calibration: Calibration | None = None
) -> Estimate:
    """The prediction alone."""
    return price_strategy(model, cluster, job, strategy, calibration=calibration).estimate


def estimate_many(
    model: Model,
    derived: Derived,
    sizes: OpSizes,
    rates: StepRates,
    *,
    batch_seqs: Number,
    seq_len: int,
    num_microbatches: Number,
    memory: dict[str, Number] | None = None,
) -> Estimate:
    """The prediction for every candidate at once: arrays of sizes, of placements' rates and of microbatches.

    ``memory`` is what `training_memory` gives, where it is known already.
    """
    costs = price_steps(derived, sizes, rates, num_microbatches=num_microbatches)
    expected = _expected_s(derived, costs, rates, num_microbatches)
    busy = _busy_s(costs, rates)
    items = training_memory(derived, sizes, num_microbatches=num_microbatches) if memory is None else memory
    num_chips = product(sizes.mesh.values())
    flops = _sum(cost.flops * cost.count for cost in costs) * num_chips
    needed = model_flops(model, Job(batch_seqs=1, seq_len=seq_len)) * batch_seqs
    available = rates.peak_flops_per_s * num_chips * expected
    return Estimate(
        step_s=expected,
        step_s_lower=_largest(busy),
        step_s_upper=_sum((cost.math_s + cost.hbm_s + cost.network_s) * cost.count for cost in costs),
        mfu=needed / available,
        hfu=flops / available,
        bound_by=_bound_by(costs, rates, busy),
        memory=items,
        hbm_bytes_per_chip=total_bytes(items),
        flops=flops,
        terms=_terms(costs),
    )


# -- the expected value ---------------------------------------------------------------------------------


def _expected_s(derived: Derived, costs: list[StepCost], rates: StepRates, num_microbatches: Number) -> Number:
    """All passes over all blocks for every microbatch, then the update.

    Gradient sums that run once per step stand beside the backward pass of the last microbatch.
    """
    total: Number = 0.0
    left = iter(costs)
    for block in derived.blocks:
        forward = [next(left) for _ in block.forward]
        backward = [next(left) for _ in block.backward]
        always = [cost for cost in backward if cost.step.scope != "step"]
        total = total + block.repeat * num_microbatches * _pass_s(forward, rates)
        total = total + block.repeat * (num_microbatches - 1) * _pass_s(always, rates)
        total = total + block.repeat * _pass_s(backward, rates)
    return total + _sum(cost.time_s * cost.count for cost in left)


def _pass_s(costs: list[StepCost], rates: StepRates) -> Number:
    """One pass over one repeat of a block: what is waited for in a row, or the busiest links if they take longer."""
    if not rates.overlaps:
        return _sum(cost.time_s for cost in costs)
    in_a_row = _sum(cost.local_s if not cost.step.is_collective else cost.network_s for cost in costs if not cost.hides)
    return np.maximum(in_a_row, _largest(_link_s(_by_group(costs, "network_s", 1), rates)))


def _by_group(costs: Iterable[StepCost], field: str, count: Number | None = None) -> dict[Group, Number]:
    """Seconds of the collectives of each group; each execution counted ``count`` times, or as often as it runs."""
    found: dict[Group, Number] = {}
    for cost in costs:
        if cost.step.is_collective:
            times = cost.count if count is None else count
            found[cost.group] = found.get(cost.group, 0.0) + getattr(cost, field) * times
    return found


def _link_s(seconds: Mapping[Group, Number], rates: StepRates) -> list[Number]:
    """Seconds that each physical axis is busy: with the collectives of every group that fills it."""
    return [
        _sum(spent * rates.uses[group][number] for group, spent in seconds.items())
        for number in range(len(rates.link_levels))
    ]


# -- bounds and what binds ------------------------------------------------------------------------------


def _busy_s(costs: list[StepCost], rates: StepRates) -> list[Number]:
    """Seconds that each resource works in one step: compute, memory, then every physical axis."""
    compute = _sum(cost.math_s * cost.count for cost in costs)
    memory = _sum(cost.hbm_s * cost.count for cost in costs)
    return [compute, memory, *_link_s(_by_group(costs, "network_s"), rates)]


def _bound_by(costs: list[StepCost], rates: StepRates, busy: Sequence[Number]) -> Any:
    """The busiest resource of each candidate: compute, hbm, a level of the network, or latency.

    A link is bound by latency when more than half of its time is not explained by bytes.
    """
    waiting = _link_s(_by_group(costs, "latency_s"), rates)
    seconds = np.stack(np.broadcast_arrays(*busy, *waiting))
    busy_s, waiting_s = seconds[: len(busy)], seconds[len(busy) :]
    best = np.argmax(busy_s, axis=0)
    words = np.array(["compute", "hbm", *rates.link_levels])[best]
    picked = np.maximum(best - 2, 0)[None]
    waits = np.take_along_axis(waiting_s, picked, axis=0)[0] if len(waiting) else 0.0
    return np.where((best >= 2) & (waits > np.max(busy_s, axis=0) / 2), "latency", words)


def _terms(costs: list[StepCost]) -> dict[str, Number]:
    """Seconds of each kind of work by itself; latency is what collectives take beyond their bytes."""
    terms: dict[str, Number] = dict.fromkeys(("matmul", "attention", "elementwise", "loss_head", "optimizer"), 0.0)
    for cost in costs:
        if cost.step.is_collective:
            name = ",".join(cost.step.axes)
            terms[name] = terms.get(name, 0.0) + (cost.network_s - cost.latency_s) * cost.count
        else:
            name = op_term(cost.step)
            terms[name] = terms[name] + cost.local_s * cost.count
    terms["latency"] = _sum(cost.latency_s * cost.count for cost in costs)
    return terms


def _sum(values: Iterable[Number]) -> Number:
    total: Number = 0.0
    for value in values:
        total = total + value
    return total


def _largest(values: Iterable[Number]) -> Number:
    result: Number = 0.0
    for value in values:
        result = np.maximum(result, value)
    return result


def _at(value: Any, index: int) -> Any:
    """One entry of an array, or the number itself, as plain Python; inside dicts too."""
    if isinstance(value, dict):
        return {name: _at(item, index) for name, item in value.items()}
    array = np.asarray(value)
    return (array[index] if array.ndim else array[()]).item()
