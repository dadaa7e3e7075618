"""What the algebra says of the step of a request: its collectives, and the bytes that a device holds."""

from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
from msgspec.structs import replace

from meshwright.algebra.derive import derive, derive_forward
from meshwright.algebra.derived import Derived
from meshwright.algebra.generation import CacheDtype, cache_table, generate_program, one_position, prefill_program
from meshwright.algebra.notation import ShardedArray, local_elements
from meshwright.algebra.ops.route import ROUTING_ROWS
from meshwright.algebra.schedules.fused import fused
from meshwright.algebra.schedules.ticks import TickTables, tick_tables
from meshwright.algebra.sizes import OpSizes
from meshwright.algebra.steps import Step
from meshwright.algebra.transformer import layer_dims, transformer
from meshwright.core.dims import DTYPE_BYTES
from meshwright.core.labels import StepLabel
from meshwright.cost.memory import training_memory
from meshwright.cost.pipeline import strategy_pipeline
from meshwright.cost.step_costs import strategy_sizes
from meshwright.cost.step_rates import attention_scores
from meshwright.cost.work.ops import op_flops
from meshwright.cost.work.slots import slots_move
from meshwright.nn.experts.rows import expert_capacity
from meshwright.parallel.pipeline.stages import strategy_schedule
from meshwright.spec.job import Job
from meshwright.verify.expected import Expected, expected_collectives, expected_of_pipeline, runs_in_text
from meshwright.verify.request import Request


class StepDerivation:
    """The derived step of a request, counted."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.trains = request.step == "train"

    @cached_property
    def strategy(self) -> Any:
        """The strategy as it is derived; generation has keys gathered over context."""
        given = self.request.strategy
        return given if self.trains else replace(given, context_attention="gather")

    @cached_property
    def derived(self) -> Derived:
        """The steps of the program."""
        model, cache_dtype = self.request.model, self._cache_dtype
        quantised = self.request.weights == "int8"
        if self.trains:
            return derive(transformer(model, self.request.options), self.strategy, optimizer=self.request.optimizer)
        if self.request.step == "prefill":
            return derive_forward(prefill_program(model, cache_dtype=cache_dtype, quantised=quantised), self.strategy)
        program = generate_program(model, cache_dtype=cache_dtype, quantised=quantised)
        return derive_forward(program, one_position(self.strategy))

    @property
    def _cache_dtype(self) -> CacheDtype:
        return self.request.cache_dtype  # type: ignore[return-value]

    @cached_property
    def dims(self) -> dict[str, int]:
        """Sizes of all dims for the whole batch; the slots of an expert are those that are made: one for each token, or
        as many as a bound leaves."""
        request = self.request
        count = request.strategy.num_microbatches if self.trains else 1
        length = 1 if request.step == "generate" else request.seq_len
        sizes = {
            **request.model.dims,
            **layer_dims(request.model),
            "B": request.batch_seqs,
            "T": length,
            "S": request.seq_len,
        }
        if request.model.num_experts:
            sizes |= {"C": self._slots(request.batch_seqs * length // count), "Er": len(ROUTING_ROWS)}
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
                num_microbatches=strategy.num_microbatches if self.trains else 1,
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
            count = self.strategy.num_microbatches if self.trains else 1
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
        count = self.strategy.num_microbatches if self.trains else 1
        dims = {**self.dims, "B": self.request.batch_seqs / count}
        return OpSizes(dims=dims, mesh=self.strategy.mesh, state=self.strategy.state)

    def memory(self) -> dict[str, float]:
        """Bytes on one device by item, as `cost` predicts them."""
        return self._training_memory() if self.trains else self._generation_memory()

    def _training_memory(self) -> dict[str, float]:
        request = self.request
        job = Job(batch_seqs=request.batch_seqs, seq_len=request.seq_len)
        scores = attention_scores(request.cluster, request.strategy.software)
        sizes = strategy_sizes(request.model, job, request.strategy, scores=scores)
        items = training_memory(
            self.derived,
            sizes,
            num_microbatches=request.strategy.num_microbatches,
            pipeline=strategy_pipeline(request.strategy),
            offload=request.strategy.offload,
        )
        return {name: float(np.asarray(value)) for name, value in items.items()}

    def _generation_memory(self) -> dict[str, float]:
        """Weights and cache where they lie, and the largest results of one step of the program with what it reads."""
        request, program = self.request, self.derived.program
        found = dict.fromkeys(("weights", "kv_cache", "workspace"), 0.0)
        layers = {name: block.repeat for block in self.derived.blocks for op in block.block.ops for name in op.inputs}
        rows = {
            row.name: row.num_layers
            for row in cache_table(
                request.model, batch_seqs=request.batch_seqs, max_len=request.seq_len, dtype=self._cache_dtype
            )
        }
        for name, variable in program.variables.items():
            if variable.role in ("weight", "vector"):
                found["weights"] += layers.get(name, 1) * self._bytes(self.derived.declared[name])
            elif name in rows:
                found["kv_cache"] += rows[name] * self._bytes(self.derived.declared[name])
        found["workspace"] = max(
            (self._made(step.result, *step.more) for block in self.derived.blocks for step in block.forward),
            default=0.0,
        )
        return found

    def _made(self, *results: ShardedArray) -> float:
        return sum(self._bytes(array) for array in results if not array.name.startswith("cache"))

    def _bytes(self, array: ShardedArray) -> float:
        width = DTYPE_BYTES[array.dtype] if array.dtype else DTYPE_BYTES[self.strategy.state_dtype]
        return float(local_elements(array, self.dims, self.strategy.mesh)) * float(width)
