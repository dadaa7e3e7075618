"""What every derived step costs one device: FLOPs, bytes through memory and over links, seconds by itself."""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from meshwright.algebra.derive import Derived
from meshwright.algebra.steps import Step, sent_element_bytes
from meshwright.cost.ops import OpSizes, Scores, is_attention, op_flops, op_hbm_bytes
from meshwright.cost.step_rates import Group, StepRates
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.strategy import Strategy

Number = Any
"""A float, or a NumPy array with one entry per candidate."""


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """One execution of one derived step on one device, and how many times a training step executes it.

    ``network_bytes`` are those of the full array of a collective, ``latency_s`` the part of ``network_s`` that
    the bytes do not explain. ``hides`` says that nothing waits for it inside its pass.
    """

    step: Step
    count: Number
    flops: Number = 0.0
    hbm_bytes: Number = 0.0
    math_s: Number = 0.0
    hbm_s: Number = 0.0
    network_bytes: Number = 0.0
    network_s: Number = 0.0
    latency_s: Number = 0.0
    level: Any = ""

    @property
    def local_s(self) -> Number:
        """Seconds on the device: compute and memory overlap."""
        return np.maximum(self.math_s, self.hbm_s)

    @property
    def time_s(self) -> Number:
        """Seconds of one execution by itself."""
        return self.local_s + self.network_s

    @property
    def hides(self) -> bool:
        return self.step.is_collective and not self.step.critical and self.step.phase != "update"

    @property
    def group(self) -> Group:
        """The mesh axes of a collective."""
        return frozenset(self.step.axes)


def op_sizes(
    model: Model,
    *,
    seq_len: int,
    microbatch_seqs: Number,
    mesh: Mapping[str, Number],
    state: str,
    scores: Scores = "on_chip",
) -> OpSizes:
    """Sizes of one microbatch; its sequences and the mesh sizes may be arrays, one entry per candidate."""
    dims = {name: float(size) for name, size in model.dims.items()} | {"B": microbatch_seqs, "T": float(seq_len)}
    return OpSizes(dims=dims, mesh=mesh, state=state, scores=scores)


def strategy_sizes(model: Model, job: Job, strategy: Strategy, *, scores: Scores = "on_chip") -> OpSizes:
    """Sizes of one microbatch of a job under one strategy."""
    return op_sizes(
        model,
        seq_len=job.seq_len,
        microbatch_seqs=job.batch_seqs / strategy.num_microbatches,
        mesh=strategy.mesh,
        state=strategy.state,
        scores=scores,
    )


def collective_groups(derived: Derived) -> tuple[Group, ...]:
    """Every group of mesh axes that some collective of the steps runs over."""
    return tuple(dict.fromkeys(frozenset(step.axes) for step, _ in derived.steps() if step.is_collective))


def price_steps(derived: Derived, sizes: OpSizes, rates: StepRates, *, num_microbatches: Number) -> list[StepCost]:
    """The cost of every step in order: forward and backward of each block, then the update."""
    return [
        price_step(step, count, sizes, rates, num_microbatches=num_microbatches)
        for step, count in derived.steps(num_microbatches)
    ]


def price_step(step: Step, count: Number, sizes: OpSizes, rates: StepRates, *, num_microbatches: Number) -> StepCost:
    """One execution of one step."""
    if step.is_collective:
        return _price_collective(step, count, sizes, rates, num_microbatches)
    flops, moved = op_flops(step, sizes), op_hbm_bytes(step, sizes)
    return StepCost(
        step=step,
        count=count,
        flops=flops,
        hbm_bytes=moved,
        math_s=flops / (rates.attention_flops_per_s if is_attention(step) else rates.matmul_flops_per_s),
        hbm_s=moved / rates.hbm_bytes_per_s,
    )


def _price_collective(
    step: Step, count: Number, sizes: OpSizes, rates: StepRates, num_microbatches: Number
) -> StepCost:
    group = rates.groups[frozenset(step.axes)]
    element = sent_element_bytes(step, width=sizes.width, num_microbatches=num_microbatches)
    sent = sizes.elements(step.full) * element
    rate = group[step.op]
    seconds = rate.time(sent)
    return StepCost(
        step=step,
        count=count,
        network_bytes=sent,
        network_s=seconds,
        latency_s=seconds - sent * rate.seconds_per_byte,
        level=group.level,
    )
