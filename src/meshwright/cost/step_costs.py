"""What every derived step costs one device: FLOPs, bytes through memory and over links, seconds by itself."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from meshwright.algebra.derived import BlockSteps, Derived
from meshwright.algebra.generation import AS_WRITTEN, Storage, cache_sizes
from meshwright.algebra.notation import ShardedArray, product
from meshwright.algebra.ops import kind_of
from meshwright.algebra.ops.muon import filled_share
from meshwright.algebra.rewrites.rings import Round, num_moves
from meshwright.algebra.rewrites.split_backward import counts_of, gradient_arrays, meetings, weights_of
from meshwright.algebra.sizes import OpSizes, Scores
from meshwright.algebra.steps import Step
from meshwright.algebra.transformer import layer_dims
from meshwright.core.dims import DTYPE_BYTES
from meshwright.cost.pipeline import ONE_STAGE, Pipeline
from meshwright.cost.step_rates import Group, StepRates
from meshwright.cost.work.kernels import local_work, partly_hidden
from meshwright.cost.work.ops import op_term
from meshwright.cost.work.sizes import expert_slots, spare_slots
from meshwright.cost.work.slots import slots_move, with_room
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.strategy import AS_RUN, Assumptions, Strategy

Number = Any
"""A float, or a NumPy array with one entry per candidate."""


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """One execution of one derived step on one device, and how many times a training step executes it.

    ``count`` is over all layers, ``here`` on the busiest device of a pipeline: its layers and the head.
    ``network_bytes`` are those of the full array of a collective, ``latency_s`` the part of ``network_s`` that
    the bytes do not explain. ``hides`` says that nothing waits for it inside its pass; ``overlap`` is the efficiency's.
    """

    step: Step
    count: Number
    here: Number = 1
    flops: Number = 0.0
    hbm_bytes: Number = 0.0
    math_s: Number = 0.0
    hbm_s: Number = 0.0
    launch_s: Number = 0.0
    num_kernels: Number = 0
    overlap: Number | None = None
    network_bytes: Number = 0.0
    network_s: Number = 0.0
    latency_s: Number = 0.0
    level: Any = ""

    @property
    def local_s(self) -> Number:
        """Seconds on the device: compute and memory overlap, the launch does not."""
        return partly_hidden(self.math_s, self.hbm_s, self.overlap) + self.launch_s

    @property
    def time_s(self) -> Number:
        """Seconds of one execution by itself."""
        return self.local_s + self.network_s

    @property
    def hides(self) -> bool:
        return self.step.is_collective and not self.step.critical and self.step.phase != "update"

    @property
    def goes_round(self) -> bool:
        """Whether it is a permute that passes behind the collective matmul beside it, and behind nothing else."""
        return isinstance(self.step.details, Round) and self.step.details.beside_products

    @property
    def gathers_weights(self) -> bool:
        """Whether it is a gather that needs nothing of its pass, so that it could run ahead of it."""
        return self.step.op == "all_gather" and self.hides

    @property
    def term(self) -> str:
        """The kind of local work, or the mesh axes of a collective: ``"matmul"``, ``"fsdp,context"``."""
        return ",".join(self.step.axes) if self.step.is_collective else op_term(self.step)

    @property
    def group(self) -> Group:
        """The mesh axes of a collective."""
        return frozenset(self.step.axes)


class PricedBlock(msgspec.Struct, frozen=True, kw_only=True):
    """The derived steps of one block and, step by step, what its two passes cost."""

    steps: BlockSteps
    forward: tuple[StepCost, ...]
    backward: tuple[StepCost, ...]

    @property
    def name(self) -> str:
        return self.steps.block.name

    @property
    def is_layer(self) -> bool:
        """Whether it is a block of layers, which pipeline stages share out; embedding and head are not."""
        return bool(self.steps.block.carry)


class Priced(msgspec.Struct, frozen=True, kw_only=True):
    """The costs of a training step, in the shape of its derivation.

    ``update`` is the loss, the gradient norm and the optimizer; ``ends`` the sums over the pipeline of what every
    stage holds, priced only where one program runs on all stages. ``boundary`` are the sends of one microbatch over
    one boundary of stages: how often they run is the schedule's matter, so they are not among ``all``.
    """

    blocks: tuple[PricedBlock, ...]
    update: tuple[StepCost, ...]
    ends: tuple[StepCost, ...] = ()
    boundary: tuple[StepCost, ...] = ()

    @property
    def layers(self) -> tuple[PricedBlock, ...]:
        """The blocks of layers."""
        return tuple(block for block in self.blocks if block.is_layer)

    @property
    def once(self) -> tuple[StepCost, ...]:
        """Everything after the last microbatch that belongs to no pass."""
        return (*self.update, *self.ends)

    @property
    def all(self) -> tuple[StepCost, ...]:
        """Every cost in order: forward and backward of each block, then what runs once."""
        return (*(cost for block in self.blocks for cost in (*block.forward, *block.backward)), *self.once)

    def changed(self, change: Callable[[StepCost], StepCost]) -> "Priced":
        """The same steps with other costs; the boundary keeps its own."""
        return Priced(
            blocks=tuple(
                msgspec.structs.replace(
                    block, forward=tuple(map(change, block.forward)), backward=tuple(map(change, block.backward))
                )
                for block in self.blocks
            ),
            update=tuple(map(change, self.update)),
            ends=tuple(map(change, self.ends)),
            boundary=self.boundary,
        )


def op_sizes(
    model: Model,
    *,
    seq_len: int,
    microbatch_seqs: Number,
    mesh: Mapping[str, Number],
    state: str,
    scores: Scores = "on_chip",
    assumptions: Assumptions = AS_RUN,
) -> OpSizes:
    """Sizes of one microbatch; its sequences and the mesh sizes may be arrays, one entry per candidate.

    A kernel that keeps its scores on chip also skips the keys that are masked.
    """
    known = model.dims | layer_dims(model)
    dims = {name: float(size) for name, size in known.items()} | {"B": microbatch_seqs, "T": float(seq_len)}
    dims |= expert_slots(model, num_tokens=microbatch_seqs * seq_len, imbalance=assumptions.imbalance)
    spare = spare_slots(model, imbalance=assumptions.imbalance) if assumptions.holds_empty_slots else 1.0
    return OpSizes(dims=dims, mesh=mesh, state=state, scores=scores, causal=scores == "on_chip", spare_slots=spare)


def strategy_sizes(
    model: Model,
    job: Job,
    strategy: Strategy,
    *,
    scores: Scores = "on_chip",
    storage: Storage = AS_WRITTEN,
    assumptions: Assumptions = AS_RUN,
) -> OpSizes:
    """Sizes of one microbatch of a job under one strategy; of caches too, in a job that generates.

    A query that meets a cache meets every slot of it: nothing is skipped.
    """
    found = op_sizes(
        model,
        seq_len=job.step_len,
        microbatch_seqs=job.batch_seqs / strategy.num_microbatches,
        mesh=strategy.mesh,
        state=strategy.state,
        scores=scores,
        assumptions=assumptions,
    )
    if job.trains:
        return found
    cache = cache_sizes(batch_seqs=job.batch_seqs, max_len=job.seq_len, storage=storage)
    causal = found.causal and job.kind != "decode"
    return msgspec.structs.replace(found, dims={**found.dims, **cache}, causal=causal)


def collective_groups(derived: Derived) -> tuple[Group, ...]:
    """Every group of mesh axes that some collective of the steps runs over."""
    steps = (*(step for step, _ in derived.steps()), *derived.boundary)
    return tuple(dict.fromkeys(frozenset(step.axes) for step in steps if step.is_collective))


def price_steps(
    derived: Derived, sizes: OpSizes, rates: StepRates, *, num_microbatches: Number, pipeline: Pipeline = ONE_STAGE
) -> Priced:
    """The cost of every step. Sums over the stages of what every stage holds run where one program runs on all."""
    plain = sizes
    sizes = msgspec.structs.replace(sizes, in_arrays=slots_move(derived, sizes.mesh), cache=dict(sizes.cache))
    shares = block_shares(derived, pipeline)
    kept = kept_results(derived)
    owners = block_of_weights(derived)
    summed = _summed_gradients(derived)

    def priced(step: Step, count: Number) -> StepCost:
        block = step.block if step.block in shares else owners.get(step.result.name.removeprefix("d"), "")
        share = shares.get(block, 1.0)
        if step.block == "stage":
            share = 1.0
        elif block and step.scope == "step":
            share = share * pipeline.sums
        held = kept.get((step.block, step.phase), frozenset())
        cost = price_step(step, count, sizes, rates, num_microbatches=num_microbatches, kept=held)
        for made in (step, *step.parts):
            if made.result.name in summed and not made.is_collective and kind_of(made).is_einsum:
                cost = _with_sum(cost, summed[made.result.name], sizes, rates, num_microbatches)
        return msgspec.structs.replace(cost, here=count * share)

    steps = iter(derived.steps(num_microbatches))
    blocks = tuple(
        PricedBlock(
            steps=block,
            forward=tuple(priced(*next(steps)) for _ in block.forward),
            backward=tuple(priced(*next(steps)) for _ in block.backward),
        )
        for block in derived.blocks
    )
    return Priced(
        blocks=blocks,
        update=tuple(priced(step, count) for step, count in steps),
        ends=tuple(priced(step, 1) for step in derived.ends) if pipeline.in_lockstep else (),
        boundary=tuple(
            price_step(step, 1, plain, rates, num_microbatches=num_microbatches) for step in derived.boundary
        ),
    )


def kept_results(derived: Derived) -> dict[tuple[str, str], frozenset[ShardedArray]]:
    """(block, phase) -> what a layer holds of the results of its steps."""
    return {(block.block.name, "forward"): frozenset(block.kept) for block in derived.blocks if block.block.carry}


def _summed_gradients(derived: Derived) -> dict[str, ShardedArray]:
    """Gradients of weights as each microbatch leaves them, scattered or not, to be added to the sum of those before."""
    return {array.name: array for array in gradient_arrays(derived).values()}


def _with_sum(
    cost: StepCost, summed: ShardedArray, sizes: OpSizes, rates: StepRates, num_microbatches: Number
) -> StepCost:
    """A product whose result is added to a float32 sum: read and written once more, where there is one.

    Libraries with eager dispatch let the product add; a compiled program adds in a pass of its own.
    """
    moved = 2 * DTYPE_BYTES["fp32"] * sizes.elements(summed) * (np.asarray(num_microbatches) > 1)
    seconds = moved / rates.chip.hbm_bytes_per_s
    if rates.software == "compiled":
        return msgspec.structs.replace(cost, hbm_bytes=cost.hbm_bytes + moved, launch_s=cost.launch_s + seconds)
    return msgspec.structs.replace(cost, hbm_bytes=cost.hbm_bytes + moved, hbm_s=cost.hbm_s + seconds)


def meeting_seconds(
    derived: Derived, sizes: OpSizes, rates: StepRates, *, num_microbatches: Number
) -> tuple[Number, Number]:
    """Seconds of the messages that `meetings` derives: those of all layers by their bytes, and what any number of
    layers waits besides. Priced as sends to a neighbour. Zeros without stages."""
    by_bytes: Number = 0.0
    besides: Number = 0.0
    repeats = {
        name: block.repeat for block in derived.blocks for name in (*weights_of(derived, block), *counts_of(block))
    }
    for step in meetings(derived) if derived.boundary else ():
        cost = price_step(step, 1, sizes, rates, num_microbatches=num_microbatches)
        name = step.result.name
        layers = repeats[name] if name in repeats else repeats[name.removeprefix("d")]
        by_bytes, besides = by_bytes + layers * (cost.network_s - cost.latency_s), besides + cost.latency_s
    return by_bytes, besides


def block_of_weights(derived: Derived) -> dict[str, str]:
    """Weight -> the block that it belongs to: of several (tied embeddings) the last."""
    weights = {variable.name for variable in derived.program.of_role("weight", "vector")}
    uses = ((name, block.block.name) for block in derived.blocks for op in block.block.ops for name in op.inputs)
    return {name: block for name, block in uses if name in weights}


def block_shares(derived: Derived, pipeline: Pipeline) -> dict[str, Number]:
    """Block -> share of its repeats that the busiest device of a pipeline runs: the last one, with the head."""
    layers, (first, last) = pipeline.share(derived.num_layers), pipeline.end_shares
    head = derived.blocks[-1].block.name
    return {
        block.block.name: layers if block.block.carry else last if block.block.name == head else first
        for block in derived.blocks
    }


def price_step(
    step: Step,
    count: Number,
    sizes: OpSizes,
    rates: StepRates,
    *,
    num_microbatches: Number,
    kept: frozenset[ShardedArray] = frozenset(),
) -> StepCost:
    """One execution of one step, of whose results its block holds ``kept``."""
    if step.is_collective:
        return _price_collective(step, count, sizes, rates, num_microbatches)
    work = local_work(step, sizes, rates.chip, kept=kept)
    return StepCost(
        step=step,
        count=count,
        flops=work.flops,
        hbm_bytes=work.hbm_bytes,
        math_s=work.math_s,
        hbm_s=work.hbm_s,
        launch_s=work.launch_s,
        num_kernels=work.num_kernels,
        overlap=rates.chip.efficiency.overlap,
    )


def sent_element_bytes(step: Step, *, width: Any, num_microbatches: Any) -> Any:
    """Bytes of one element of a collective; ``width`` is that of the state's weights. Microbatches may be an array.

    Gradients that go out once per step have been summed in float32 when there was more than one microbatch.
    """
    if step.full.dtype:
        return DTYPE_BYTES[step.full.dtype]
    if step.scope != "step" or step.phase == "update":
        return width
    return np.where(np.asarray(num_microbatches) > 1, DTYPE_BYTES["fp32"], width)


def _price_collective(
    step: Step, count: Number, sizes: OpSizes, rates: StepRates, num_microbatches: Number
) -> StepCost:
    group = rates.groups[frozenset(step.axes)]
    element = sent_element_bytes(step, width=sizes.width, num_microbatches=num_microbatches)
    if "C" in step.full.dims:
        sizes = with_room(sizes, product(sizes.mesh[axis] for axis in step.axes) > 1)
    sent = sizes.elements(step.full) * element * filled_share(step, dims=sizes.dims, mesh=sizes.mesh)
    rate = group[step.op]
    moves = num_moves(step, dims=sizes.dims, mesh=sizes.mesh)
    # halves that go opposite ways pass at the same time where each way has its link
    both_ways = isinstance(step.details, Round) and step.details.ways == 2
    one_way = sent / group.ring_links if both_ways else sent
    seconds = moves * rate.time(one_way)
    latency = seconds - moves * one_way * rate.seconds_per_byte
    if rates.chip.host is not None:  # devices that share cores wait for each other
        by_bytes, latency = rates.chip.host.waits * (seconds - latency), rates.chip.host.meets * latency
        seconds = by_bytes + latency
    # what is there already is read to be added to, as after a product
    adds = sizes.bytes(step.result) if step.accumulates else 0.0
    adds = adds * rates.chip.efficiency.eager_traffic if rates.chip.eager else adds
    return StepCost(
        step=step,
        count=count,
        hbm_bytes=adds,
        hbm_s=adds / rates.chip.hbm_bytes_per_s,
        network_bytes=sent,
        network_s=seconds,
        latency_s=latency,
        level=group.level,
    )
