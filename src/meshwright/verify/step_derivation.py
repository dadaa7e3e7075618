"""What the algebra says of the step of a request: its collectives, and the bytes that a device holds."""

from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property

import numpy as np

from meshwright.algebra.derived import Derived
from meshwright.algebra.generation import cache_sizes, derive_job, job_strategy
from meshwright.algebra.ops.route import ROUTING_ROWS
from meshwright.algebra.schedules.fused import fused
from meshwright.algebra.schedules.ticks import TickTables, tick_tables
from meshwright.algebra.sizes import OpSizes
from meshwright.algebra.steps import Step
from meshwright.algebra.transformer import layer_dims
from meshwright.core.dims import DTYPE_BYTES
from meshwright.core.labels import StepLabel
from meshwright.cost.setting import Setting
from meshwright.cost.work.ops import op_flops
from meshwright.cost.work.slots import slots_move
from meshwright.nn.experts.rows import expert_capacity
from meshwright.parallel.pipeline.stages import strategy_schedule
from meshwright.spec.strategy import Strategy
from meshwright.verify.expected import Expected, expected_collectives, expected_of_pipeline, runs_in_text
from meshwright.verify.request import Request


class StepDerivation:
    """The derived step of a request, counted."""

    def __init__(self, request: Request) -> None:
        self.request, self.job = request, request.job
        self.trains = self.job.trains

    @cached_property
    def strategy(self) -> Strategy:
        """The strategy as the step runs it."""
        return job_strategy(self.job, self.request.strategy)

    @cached_property
    def derived(self) -> Derived:
        """The steps of the program."""
        request = self.request
        return derive_job(request.model, self.job, self.strategy, storage=request.storage, options=request.options)

    @cached_property
    def dims(self) -> dict[str, int]:
        """Sizes of all dims for the whole batch; the slots of an expert are those that are made: one for each token, or
        as many as a bound leaves."""
        request = self.request
        known = request.model.dims | layer_dims(request.model)
        sizes = {**known, "B": request.batch_seqs, "T": self.job.step_len}
        if not self.trains:
            sizes |= cache_sizes(batch_seqs=request.batch_seqs, max_len=request.seq_len)
        if request.model.num_experts:
            slots = self._slots(self.job.tokens_per_step // self.strategy.num_microbatches)
            sizes |= {"C": slots, "Er": len(ROUTING_ROWS)}
        return sizes

    def _slots(self, num_tokens: int) -> int:
        """Slots of one expert over all devices, each with its share; where slots stay, those that are filled."""
        model, bound = self.request.model, self.request.options.capacity_factor
        if not bound and not slots_move(self.derived, self.strategy.mesh):
            return num_tokens * model.experts_per_token // model.num_experts
        return expert_capacity(
            num_tokens,
            num_experts=model.num_experts,
            experts_per_token=model.experts_per_token,
            capacity_factor=bound,
        )

    def expected(self) -> list[Expected]:
        """Collectives of one step. Those of a pipeline are as its text has them: of every branch, in every tick."""
        strategy, mesh = self.strategy, self.strategy.mesh
        width = int(DTYPE_BYTES[strategy.state_dtype])
        if self._tables is not None:
            return list(expected_of_pipeline(self.derived, self._tables, self.dims, mesh, width=width))
        return list(
            expected_collectives(
                self.derived,
                self.dims,
                mesh,
                num_microbatches=strategy.num_microbatches,
                width=width,
                layer_by_layer=strategy.gradient_sync == "overlapped",
            )
        )

    def products(self) -> dict[StepLabel, float]:
        """FLOPs of the matrix products of each step on one device; of a pipeline in every tick, as in its text."""
        found: dict[StepLabel, float] = defaultdict(float)
        for step, times in self._local_steps():
            flops = self._flops(step)
            if flops:
                found[step.label] += flops * times
        return dict(found)

    def _flops(self, step: Step) -> float:
        """FLOPs of one run of a step."""
        return float(np.asarray(op_flops(step, self._sizes)))

    def _local_steps(self) -> Iterator[tuple[Step, int]]:
        """Steps that compute, and how often each runs."""
        if self._tables is None:
            count = self.strategy.num_microbatches
            yield from ((step, int(times)) for step, times in self.derived.steps(count) if not step.is_collective)
            return
        for block in self.derived.blocks:
            for step in (*block.forward, *block.backward):
                if not step.is_collective:
                    yield step, runs_in_text(step, block, self._tables)

    @cached_property
    def _tables(self) -> TickTables | None:
        """Ticks of a pipeline; None without one."""
        if not self.trains or self.strategy.mesh.get("pipeline", 1) == 1:
            return None
        return tick_tables(fused(strategy_schedule(self.strategy)))

    @cached_property
    def _sizes(self) -> OpSizes:
        """Sizes of one microbatch, every slot of an expert counted; attention over every key."""
        dims = {**self.dims, "B": self.request.batch_seqs / self.strategy.num_microbatches}
        return OpSizes(dims=dims, mesh=self.strategy.mesh, state=self.strategy.state)

    def memory(self) -> dict[str, float]:
        """Bytes on one device by item, as `cost` predicts them."""
        request, strategy = self.request, self.strategy
        setting = Setting(request.model, request.cluster, self.job, None, request.storage, request.assumptions)
        return {name: float(np.asarray(value)) for name, value in setting.memory(strategy, self.derived).items()}
