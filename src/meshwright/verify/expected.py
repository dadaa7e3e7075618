"""Predicts, from a request's derivation, what its compiled step contains: collectives, FLOPs, and memory."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property

import msgspec
import numpy as np
from msgspec.structs import replace

from meshwright.algebra.derived import BlockSteps, Derived
from meshwright.algebra.generation.derive import derive_job, derive_sources, job_strategy
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.ops.dispatch import ROOM, is_bounded
from meshwright.algebra.ops.muon import padding_factor
from meshwright.algebra.ops.route import ROUTING_ROWS
from meshwright.algebra.rewrites.pipeline import SplitBackward, stage_layers
from meshwright.algebra.rewrites.repeated_heads import strategy_of_heads
from meshwright.algebra.rewrites.rings import num_moves, num_ways
from meshwright.algebra.rewrites.split_backward import counts_of, meetings, weights_of
from meshwright.algebra.rewrites.torus import CrossedLeg, crossed_legs
from meshwright.algebra.schedules.ticks import TickTables, tick_tables
from meshwright.algebra.sizes import OpSizes
from meshwright.algebra.steps import Step
from meshwright.algebra.transformer import layer_dims
from meshwright.core.dims import DTYPE_BYTES
from meshwright.core.labels import StepLabel
from meshwright.cost.step_costs import sent_element_bytes
from meshwright.cost.work.ops import is_attention, op_flops
from meshwright.cost.work.slots import SlotSizes, slot_sizes
from meshwright.nn.experts.slots import expert_capacity
from meshwright.parallel.blocks import cut
from meshwright.parallel.pipeline.stages import strategy_schedule
from meshwright.spec.strategy import Strategy, held_dims
from meshwright.verify.request import Request


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """A derived collective over ``axes`` that moves ``num_arrays`` arrays in one step, ``full_bytes`` in total.

    ``full_bytes`` counts each array whole, not sharded over ``axes``, as in a `CompiledCollective`; ``element_bytes``
    is the size of one element. ``group_size`` is the number of devices of ``axes``, or of one leg if the collective
    crosses several physical axes."""

    label: StepLabel
    kind: str
    axes: tuple[str, ...]
    num_arrays: int
    full_bytes: int
    element_bytes: int
    group_size: int


def expected_collectives(
    derived: Derived,
    dims: Mapping[str, int],
    mesh: Mapping[str, int],
    *,
    num_microbatches: int,
    width: int,
    layer_by_layer: bool = True,
) -> Iterator[Expected]:
    """Yields the collectives of one step of training, prefill or generation.

    ``dims`` are sizes of the global batch (B counts all sequences); ``width`` is the bytes of an element whose array
    names no dtype. ``layer_by_layer``: gradients are summed over replicas layer by layer, else as stacked arrays.
    """
    op_sizes = _sizes(derived, dims, mesh, num_microbatches)
    pieces_of = _pieces(derived, op_sizes)

    def counted() -> Iterator[_Counted]:
        for step, times in derived.steps(num_microbatches):
            if step.is_collective and step.phase == "update":
                # weights are gathered in pieces; an optimizer's own collectives take all layers at once
                yield step, pieces_of.get(step.result.name, int(times)) if step.op == "all_gather" else 1, int(times)
            elif step.is_collective:
                num_runs = int(times) * (int(num_moves(step, op_sizes)) if step.op == "permute" else 1)
                is_stacked = step.scope == "step" and not layer_by_layer
                yield step, 1 if is_stacked else num_runs * int(num_ways(step, op_sizes)), num_runs

    return _expected(counted(), op_sizes, num_microbatches=num_microbatches, width=width)


def _pieces(derived: Derived, sizes: OpSizes) -> dict[str, int]:
    """Maps each weight outside the layers to the number of pieces in which it is all-gathered after an update."""
    end_weight_names = {name for block in derived.blocks if not block.is_layer for name in weights_of(derived, block)}

    def shape(array: ShardedArray) -> list[int]:
        return [int(sizes.local(array)[dim]) for dim in array.dims]

    return {
        name: cut(shape(weight.shard), shape(derived.declared[name]))[1]
        for name, weight in derived.weights.items()
        if name in end_weight_names
    }


_Counted = tuple[Step, int, int]
"""A step, the number of arrays that it moves, and how many times the step's bytes are moved."""


def _sizes(derived: Derived, dims: Mapping[str, int], mesh: Mapping[str, int], num_microbatches: int) -> SlotSizes:
    sizes = SlotSizes(dims={**dims, "B": dims["B"] // num_microbatches}, mesh=mesh, state="fp32")
    if is_bounded(step for block in derived.blocks for step in block.forward):
        return sizes
    return replace(sizes, spare_slots=dims["E"] / dims["Ea"], room=ROOM)


def _expected(
    counted_steps: Iterable[_Counted], sizes: SlotSizes, *, num_microbatches: int, width: int
) -> Iterator[Expected]:
    for step, num_arrays, num_times in counted_steps:
        if not num_times:
            continue
        step_sizes = slot_sizes(step, sizes)
        element_bytes = int(sent_element_bytes(step, width=width, num_microbatches=num_microbatches))
        full_bytes = round(float(step_sizes.elements(step.full) * element_bytes * padding_factor(step, sizes)))
        axes = active_axes(step.axes, sizes.mesh)
        one_leg = CrossedLeg(math.prod(sizes.mesh[axis] for axis in axes), axes, 1)
        for leg in crossed_legs(step, full_bytes * num_times // num_arrays) or (one_leg,):
            yield Expected(
                label=step.label,
                kind=step.op,
                axes=active_axes(leg.axes, sizes.mesh),
                num_arrays=num_arrays,
                full_bytes=num_times * full_bytes // leg.divided,
                element_bytes=element_bytes,
                group_size=leg.size,
            )


def active_axes(axes: Iterable[str], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the given axes that have more than one device, in mesh order."""
    named_axes = set(axes)
    return tuple(axis for axis in mesh if axis in named_axes and mesh[axis] > 1)


# -- pipelines ------------------------------------------------------------------------------------------


def expected_of_pipeline(
    derived: Derived, tables: TickTables, dims: Mapping[str, int], mesh: Mapping[str, int], *, width: int
) -> Iterator[Expected]:
    """Yields the collectives in a compiled pipeline's text: each branch counts once per tick, whether it runs or not.

    ``dims`` are sizes of the global batch (B all sequences, C slots of one microbatch). Split and whole backward passes
    both count where a schedule has both. Sends count as often as they run: once per direction and tick.
    """
    num_micro = tables.schedule.num_microbatches
    sizes = _sizes(derived, dims, mesh, num_micro)
    # stages sum gradients in float32, also those of one microbatch
    return _expected(_counted_in_text(derived, tables, sizes), sizes, num_microbatches=max(num_micro, 2), width=width)


def _counted_in_text(derived: Derived, tables: TickTables, sizes: SlotSizes) -> Iterator[_Counted]:
    pieces_by_name = _pieces(derived, sizes)
    block_weights = ((block, name) for block in derived.blocks for name in block.block.reads)
    block_counts = ((block, name) for block in derived.blocks for name in counts_of(block))
    num_rows_by_name = {name: _rows(derived, block, tables) for block, name in (*block_weights, *block_counts)}
    for block, step, num_runs in steps_in_text(derived, tables):
        if step.is_collective:
            num_times = num_runs * (int(num_moves(step, sizes)) if step.op == "permute" else 1)
            yield (step, 1, _rows(derived, block, tables)) if step.scope == "step" else (step, num_times, num_times)
    channels_by_phase = {"forward": tables.x_channels, "backward": tables.dx_channels}
    for step in derived.boundary:
        num_sends = sum(channel.offset != 0 for channel in channels_by_phase[step.phase]) if step.op == "permute" else 1
        num_times = tables.num_ticks * num_sends
        yield step, num_times, num_times
    if tables.schedule.weight_copies > 1:
        yield from ((step, 1, num_rows_by_name[step.result.name.removeprefix("d")]) for step in meetings(derived))
    for step in (*derived.ends, *derived.update):
        if step.is_collective:
            num_times = num_rows_by_name.get(step.result.name, 1)
            yield step, pieces_by_name.get(step.result.name, num_times) if step.op == "all_gather" else 1, num_times


def steps_in_text(derived: Derived, tables: TickTables) -> Iterator[tuple[BlockSteps, Step, int]]:
    """Yields each step of the blocks and how often a pipeline's text has it: once per tick and layer, or twice in
    backward passes if the schedule has both split and whole ones. Recomputed layers count once per run."""
    runs_twice, num_stages = tables.has_whole and tables.has_split, tables.schedule.num_virtual_stages
    for block in derived.blocks:
        num_layers = _layers(derived, block, tables)
        ends_stack = not block.block.carry and derived.program.block_role(block.name) == "last"
        num_layers_again = num_layers if block.rerun is None else round(block.rerun.times(num_layers, num_stages))
        for step in block.forward:
            num_runs = 1 + _times_read_again(derived, block, tables) if ends_stack else num_layers
            yield block, step, tables.num_ticks * num_runs
        for step_index, step in enumerate(block.backward):
            num_ticks = tables.num_ticks * (2 if runs_twice and (block.is_layer or ends_stack) else 1)
            yield block, step, num_ticks * (num_layers_again if step_index < block.num_again else num_layers)


def _times_read_again(derived: Derived, block: BlockSteps, tables: TickTables) -> int:
    """Returns how many kinds of backward pass read, and so recompute, the output of a stack's last block."""
    name = block.block.ops[-1].out
    readers = [b for b in derived.blocks if name in derived.program.shared_inputs(b.name)]

    def is_read(places_of: Callable[[SplitBackward], Iterable[int]]) -> bool:
        pairs = ((reader, place) for reader in readers if reader.split for place in places_of(reader.split))
        return any(derived.shared[name].given in reader.backward[place].inputs for reader, place in pairs)

    is_read_first, is_read_last = is_read(lambda split: split.inputs), is_read(lambda split: split.weights)
    return tables.has_whole * (is_read_first or is_read_last) + tables.has_split * (is_read_first + is_read_last)


def _layers(derived: Derived, block: BlockSteps, tables: TickTables) -> int:
    """Returns how many layers of a block a virtual stage runs, padding layers included; 1 for embedding or head."""
    names = tuple(name for stack in derived.program.stacks for name in stack.layers)
    pattern = stage_layers(names, tables.schedule.num_virtual_stages).pattern
    return pattern.count(block.block.name) if block.block.carry else 1


def _rows(derived: Derived, block: BlockSteps, tables: TickTables) -> int:
    """Returns the number of a block's layers that one device stores, over all its virtual stages."""
    schedule = tables.schedule
    stages_per_device = schedule.num_virtual_stages // schedule.num_devices if block.block.carry else 1
    return _layers(derived, block, tables) * stages_per_device


class StepDerivation:
    """The derivation of a request's step, and the collectives, FLOPs and bytes counted from it."""

    def __init__(self, request: Request) -> None:
        self.request, self.setting, self.job = request, request.setting, request.setting.job

    @cached_property
    def strategy(self) -> Strategy:
        """The request's strategy, adapted to generation if the job does not train."""
        return job_strategy(self.job, self.request.strategy)

    @cached_property
    def derived(self) -> Derived:
        """The derived steps of the request's job."""
        model, storage, options = self.setting.model, self.setting.step_storage, self.request.options
        if self.setting.reads_sources:  # the first row of each is a step of decode
            return derive_sources(model, strategy_of_heads(self.strategy, model.common_kv_heads), storage)
        return derive_job(model, self.job, self.strategy, storage=storage, options=options)

    @cached_property
    def dims(self) -> dict[str, int]:
        """Sizes of all dims for the whole batch. C is the slots of an expert: its capacity if the strategy has a
        capacity factor, else the mean number of filled slots."""
        model, job = self.setting.model, self.job
        size_by_dim = {
            **held_dims(model.dims, self.strategy.mesh),
            **layer_dims(model),
            **({"B": job.batch_seqs, "T": job.step_len} if job.trains else self.setting.row_dims),
        }
        if model.num_experts:
            num_tokens = job.tokens_per_step // self.strategy.num_microbatches
            capacity_factor = self.strategy.capacity_factor
            even_slots = num_tokens * model.experts_per_token // model.num_experts
            num_slots = expert_capacity(model, num_tokens, capacity_factor) if capacity_factor else even_slots
            size_by_dim |= {"C": num_slots, "Er": len(ROUTING_ROWS)}
        return size_by_dim

    def expected(self) -> list[Expected]:
        """Returns the collectives of one step; in a pipeline every branch of every tick counts, as in its text."""
        strategy, mesh = self.strategy, self.strategy.mesh
        width = int(DTYPE_BYTES[strategy.state_dtype])
        if self._tables is not None:
            return list(expected_of_pipeline(self.derived, self._tables, self.dims, mesh, width=width))
        num_microbatches, is_overlapped = strategy.num_microbatches, strategy.gradient_sync == "overlapped"
        expected_rows = expected_collectives(
            self.derived, self.dims, mesh, num_microbatches=num_microbatches, width=width, layer_by_layer=is_overlapped
        )
        return list(expected_rows)

    def products(self) -> dict[StepLabel, float]:
        """Returns the FLOPs of each step's products on a device; a pipeline's steps count in every tick."""
        # Sizes of one microbatch, and attention over all keys.
        op_sizes = _sizes(self.derived, self.dims, self.strategy.mesh, self.strategy.num_microbatches)
        flops_by_label: dict[StepLabel, float] = defaultdict(float)
        if self._tables is None:
            steps = [(step, int(num_times)) for step, num_times in self.derived.steps(self.strategy.num_microbatches)]
        else:
            steps = [(step, num_times) for _, step, num_times in steps_in_text(self.derived, self._tables)]
        for step, num_times in steps:
            is_product = not (step.is_collective or is_attention(step))
            flops = float(np.asarray(op_flops(step, slot_sizes(step, op_sizes)))) if is_product else 0.0
            if flops:
                flops_by_label[step.label] += flops * num_times
        return dict(flops_by_label)

    @cached_property
    def _tables(self) -> TickTables | None:
        """Tick tables of the pipeline's schedule; None without a pipeline."""
        if not self.job.trains or self.strategy.mesh.get("pipeline", 1) == 1:
            return None
        return tick_tables(strategy_schedule(self.strategy))

    def memory(self) -> dict[str, float]:
        """Returns the predicted bytes on one device by item."""
        setting, strategy = self.setting, self.strategy
        return {name: float(np.asarray(value)) for name, value in setting.memory(strategy, self.derived).items()}
