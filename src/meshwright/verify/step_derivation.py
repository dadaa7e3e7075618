"""What the algebra says of the step of a request: its collectives, and the bytes that a device holds."""

from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property

import numpy as np

from meshwright.algebra.derived import Derived
from meshwright.algebra.generation import cache_sizes, derive_job, job_strategy
from meshwright.algebra.ops.route import ROUTING_ROWS
from meshwright.algebra.schedules.ticks import TickTables, tick_tables
from meshwright.algebra.sizes import OpSizes
from meshwright.algebra.steps import Step
from meshwright.algebra.transformer import layer_dims
from meshwright.core.dims import DTYPE_BYTES
from meshwright.core.labels import StepLabel
from meshwright.cost.memory import memory_parts
from meshwright.cost.work.ops import op_flops
from meshwright.cost.work.slots import slots_move
from meshwright.nn.experts.slots import expert_capacity
from meshwright.parallel.pipeline.stages import strategy_schedule
from meshwright.spec.strategy import Strategy
from meshwright.verify.expected import Expected, expected_collectives, expected_of_pipeline, runs_in_text
from meshwright.verify.request import Request


class StepDerivation:
    """The derived step of a request, counted."""

    def __init__(self, request: Request) -> None:
        self.request, self.setting, self.job = request, request.setting, request.setting.job

    @cached_property
    def strategy(self) -> Strategy:
        """The strategy as the step runs it."""
        return job_strategy(self.job, self.request.strategy)

    @cached_property
    def derived(self) -> Derived:
        """The steps of the program."""
        model, storage, options = self.setting.model, self.setting.storage, self.request.options
        return derive_job(model, self.job, self.strategy, storage=storage, options=options)

    @cached_property
    def dims(self) -> dict[str, int]:
        """Sizes of all dims for the whole batch; the slots of an expert are those that are made: one for each token, or
        as many as a bound leaves."""
        model, job = self.setting.model, self.job
        sizes = {**model.dims, **layer_dims(model), "B": job.batch_seqs, "T": job.step_len}
        if not job.trains:
            sizes |= cache_sizes(batch_seqs=job.batch_seqs, max_len=job.seq_len)
        if model.num_experts:
            slots = self._slots(job.tokens_per_step // self.strategy.num_microbatches)
            sizes |= {"C": slots, "Er": len(ROUTING_ROWS)}
        return sizes

    def _slots(self, num_tokens: int) -> int:
        """Slots of one expert over all devices, each with its share; where slots stay, those that are filled."""
        model, bound = self.setting.model, self.request.options.capacity_factor
        if not bound and not slots_move(self.derived, self.strategy.mesh):
            return num_tokens * model.experts_per_token // model.num_experts
        return expert_capacity(model, num_tokens, bound)

    def expected(self) -> list[Expected]:
        """Collectives of one step. Those of a pipeline are as its text has them: of every branch, in every tick."""
        strategy, mesh = self.strategy, self.strategy.mesh
        width = int(DTYPE_BYTES[strategy.state_dtype])
        if self._tables is not None:
            return list(expected_of_pipeline(self.derived, self._tables, self.dims, mesh, width=width))
        count, overlapped = strategy.num_microbatches, strategy.gradient_sync == "overlapped"
        found = expected_collectives(
            self.derived, self.dims, mesh, num_microbatches=count, width=width, layer_by_layer=overlapped
        )
        return list(found)

    def products(self) -> dict[StepLabel, float]:
        """FLOPs of the matrix products of each step on one device; of a pipeline in every tick, as in its text."""
        found: dict[StepLabel, float] = defaultdict(float)
        for step, times in self._local_steps():
            flops = float(np.asarray(op_flops(step, self._sizes)))
            if flops:
                found[step.label] += flops * times
        return dict(found)

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
        if not self.job.trains or self.strategy.mesh.get("pipeline", 1) == 1:
            return None
        return tick_tables(strategy_schedule(self.strategy))

    @cached_property
    def _sizes(self) -> OpSizes:
        """Sizes of one microbatch, every slot of an expert counted; attention over every key."""
        dims = {**self.dims, "B": self.job.batch_seqs / self.strategy.num_microbatches}
        return OpSizes(dims=dims, mesh=self.strategy.mesh, state=self.strategy.state)

    def memory(self) -> dict[str, float]:
        """Bytes on one device by item, as `cost` predicts them."""
        setting, strategy = self.setting, self.strategy
        items = memory_parts(self.derived, setting.sizes(strategy)).items(
            num_microbatches=strategy.num_microbatches,
            pipeline=setting.pipeline(strategy),
            offload=strategy.offload,
        )
        return {name: float(np.asarray(value)) for name, value in items.items()}
