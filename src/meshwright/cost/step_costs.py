"""The costs of every derived step on one device: FLOPs, bytes in memory and over links, seconds without overlap."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace

from meshwright.algebra.derived import BlockSteps, Derived
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.ops import kind_of
from meshwright.algebra.ops.dispatch import ROOM, exchanges_slots, has_slots
from meshwright.algebra.ops.muon import padding_factor
from meshwright.algebra.rewrites.rings import Round, num_moves
from meshwright.algebra.rewrites.split_backward import counts_of, gradient_arrays, meetings, weights_of
from meshwright.algebra.sizes import Number, Scores
from meshwright.algebra.steps import Step
from meshwright.algebra.transformer import layer_dims
from meshwright.core.dims import DTYPE_BYTES
from meshwright.cost.arrays import largest, total
from meshwright.cost.network.collectives import GroupRates
from meshwright.cost.pipeline import PipelineCost
from meshwright.cost.step_rates import StepRates
from meshwright.cost.work.kernel_times import KernelRates, collective_s, small_reduce_s
from meshwright.cost.work.kernels import AxisGroup, StepCost, local_cost
from meshwright.cost.work.slots import SlotSizes, expert_slots, places_of_token, slot_sizes
from meshwright.spec.assumptions import AS_RUN, Assumptions
from meshwright.spec.model import Model
from meshwright.spec.strategy import STATE_BYTES, Strategy, held_dims

Costs = TypeVar("Costs", bound=msgspec.Struct)


class PricedBlock(msgspec.Struct, frozen=True, kw_only=True):
    """The derived steps of one block, and the cost of each step of its two passes."""

    steps: BlockSteps
    forward: tuple[StepCost, ...]
    backward: tuple[StepCost, ...]

    @property
    def name(self) -> str:
        return self.steps.name

    @property
    def is_layer(self) -> bool:
        """True for a block of layers, which are distributed over pipeline stages; False for embedding and head."""
        return self.steps.is_layer

    @property
    def again(self) -> tuple[StepCost, ...]:
        """The costs of one forward rerun of a layer for a later one, which begin ``backward``; () without reruns."""
        return self.backward[: self.steps.num_again] if self.steps.rerun is not None else ()


class Priced(msgspec.Struct, frozen=True, kw_only=True):
    """The costs of a training step, in the shape of its derivation.

    ``update`` is the loss, the gradient norm and the optimizer. ``ends`` are the sums over stages of the gradients of
    embedding and head, empty unless one program runs on all stages. ``boundary`` are the sends of one microbatch over
    one boundary of stages. ``exchanges`` send weights and gradients between two devices that run the same two stages.
    The schedule says how often ``boundary`` and ``exchanges`` run, so ``all`` leaves them out.
    """

    blocks: tuple[PricedBlock, ...]
    update: tuple[StepCost, ...]
    ends: tuple[StepCost, ...] = ()
    boundary: tuple[StepCost, ...] = ()
    exchanges: tuple[StepCost, ...] = ()

    @property
    def layers(self) -> tuple[PricedBlock, ...]:
        """The blocks of layers."""
        return tuple(block for block in self.blocks if block.is_layer)

    @property
    def once(self) -> tuple[StepCost, ...]:
        """Costs of steps after the last microbatch, outside all passes: `update` and `ends`."""
        return (*self.update, *self.ends)

    @property
    def all(self) -> tuple[StepCost, ...]:
        """Every cost in order: forward and backward of each block, then `once`."""
        return (*(cost for block in self.blocks for cost in (*block.forward, *block.backward)), *self.once)

    def changed(self, change: Callable[[StepCost], StepCost]) -> "Priced":
        """Returns the priced steps with ``change`` applied to every cost."""

        def every(costs: Costs, *fields: str) -> Costs:
            return replace(costs, **{name: tuple(map(change, getattr(costs, name))) for name in fields})

        changed_blocks = tuple(every(block, "forward", "backward") for block in self.blocks)
        return every(replace(self, blocks=changed_blocks), "update", "ends", "boundary", "exchanges")


def op_sizes(
    model: Model,
    *,
    seq_len: int,
    microbatch_seqs: Number,
    mesh: Mapping[str, Number],
    strategy: Strategy,
    scores: Scores = "on_chip",
    grouped: bool = False,
    on_gpus: bool = False,
    assumptions: Assumptions = AS_RUN,
) -> SlotSizes:
    """Returns the sizes of one microbatch; its sequences and the mesh sizes may be arrays, one entry per candidate.

    The strategy gives the training state and the bound on the slots of experts; `SlotSizes` has ``grouped`` and
    ``on_gpus``. With ``scores`` on chip, attention also skips masked keys.
    """
    size_of = held_dims(model.dims | layer_dims(model), mesh)
    size_by_dim = {name: size * 1.0 for name, size in size_of.items()} | {"B": microbatch_seqs, "T": float(seq_len)}
    # a slot for every token is the most that an expert can need
    max_factor = model.num_experts / model.experts_per_token if model.num_experts else 1.0
    slot_factor, load_factor = min(strategy.capacity_factor, max_factor), min(assumptions.imbalance, max_factor)
    size_by_dim |= expert_slots(model, num_tokens=microbatch_seqs * seq_len, factor=slot_factor or 1.0)
    holds_empty_slots = assumptions.holds_empty_slots
    return SlotSizes(
        dims=size_by_dim,
        mesh=mesh,
        state=strategy.state,
        scores=scores,
        causal=scores == "on_chip",
        spare_slots=max_factor if holds_empty_slots and not slot_factor else 1.0,
        load=1.0 if slot_factor else load_factor,
        room=1.0 if slot_factor else min(max_factor, ROOM) if holds_empty_slots else load_factor,
        groups=(model.expert_groups, model.groups_per_token),
        grouped=grouped,
        on_gpus=on_gpus,
        by_device=assumptions.dispatch in ("devices", "nodes"),
        # fp8, with a float32 scale for every 128 numbers
        sent_bytes=1 + 4 / 128
        if assumptions.dispatch == "nodes" and strategy.matmul_dtype == "fp8"
        else STATE_BYTES[strategy.state]["weights"],
    )


def _reduced_by_engine(step: Step, nbytes: Number, sizes: SlotSizes, group: GroupRates, rates: KernelRates) -> StepCost:
    """Prices an AllReduce of a serving engine: in a domain by a kernel that reads peers' memory or by NCCL, whichever
    is faster. Results of a token's experts are summed before it."""
    if has_slots(step.full):
        nbytes = nbytes / sizes.dims["Ea"]
    kernel_shape = {"n": np.maximum(group.size, 2), "bytes": nbytes, "op": "all_reduce"}
    domain_s = np.minimum(small_reduce_s(kernel_shape, rates), collective_s(kernel_shape, rates))
    rate = group["all_reduce"]
    sum_s = np.where(np.asarray(rate.level) == "nvlink", domain_s, rate.time(nbytes)) * (np.asarray(group.size) > 1)
    return StepCost(step=step, network_bytes=nbytes, network_s=sum_s, level=rate.level)


def collective_groups(*derived: Derived) -> tuple[AxisGroup, ...]:
    """Returns every group of mesh axes that some collective of the steps runs over."""
    steps = (step for form in derived for step in (*(step for step, _ in form.steps()), *form.boundary))
    return tuple(dict.fromkeys(frozenset(step.axes) for step in steps if step.is_collective))


def price_steps(
    derived: Derived,
    sizes: SlotSizes,
    rates: StepRates,
    pipeline: PipelineCost,
    known: dict[object, StepCost] | None = None,
) -> Priced:
    """Returns the costs of all steps of a derivation. ``known`` caches costs at the same sizes and rates."""
    known = {} if known is None else known
    num_microbatches = pipeline.microbatches
    # one program of all stages sums gradients in float32, even of one microbatch
    num_summands = np.where(pipeline.in_lockstep & ~pipeline.is_one, np.maximum(num_microbatches, 2), num_microbatches)
    share_of, blocks_of, kept_of = block_shares(derived, pipeline), blocks_of_weights(derived), kept_results(derived)
    # gradients of weights as each microbatch leaves them, to be added to the sum of earlier microbatches
    gradient_by_name = {array.name: array for array in gradient_arrays(derived).values()}

    def priced(step: Step, count: Number) -> StepCost:
        owner = step.block if step.block in share_of else blocks_of.get(step.result.name.removeprefix("d"), ("",))[-1]
        run_share = share_of.get(owner, 1.0)
        if step.block == "stage":
            run_share = 1.0
        elif owner and step.scope == "step":
            run_share = run_share * pipeline.sums
        kept_arrays = kept_of.get((step.block, step.phase), frozenset())
        key = step, kept_arrays if rates.chip.host else ()
        if key not in known:
            known[key] = price_step(step, sizes, rates, num_microbatches=num_summands, kept=kept_arrays)
        cost = known[key]
        for sub_step in (step, *step.parts):
            if sub_step.result.name in gradient_by_name and not sub_step.is_collective and kind_of(sub_step).is_einsum:
                cost = _with_sum(cost, sizes.elements(gradient_by_name[sub_step.result.name]), rates, num_microbatches)
        return replace(cost, count=count, here=count * run_share)

    def alone(step: Step, count: Number = 1) -> StepCost:
        if (step, "alone") not in known:
            known[step, "alone"] = price_step(step, sizes, rates, num_microbatches=num_microbatches)
        return replace(known[step, "alone"], count=count)

    def together(costs: Iterable[StepCost]) -> tuple[StepCost, ...]:
        return tuple(costs) if rates.chip.software.is_compiled else _in_buckets(tuple(costs), blocks_of)

    counted_steps = iter(derived.steps(num_microbatches, pipeline.runs))
    return Priced(
        blocks=tuple(
            PricedBlock(
                steps=block,
                forward=together(priced(*next(counted_steps)) for _ in block.forward),
                backward=together(priced(*next(counted_steps)) for _ in block.backward),
            )
            for block in derived.blocks
        ),
        update=together(priced(step, count) for step, count in counted_steps),
        ends=tuple(priced(step, 1) for step in derived.ends) if pipeline.in_lockstep else (),
        boundary=tuple(map(alone, derived.boundary)),
        exchanges=tuple(alone(step, count) for step, count in _exchanges(derived)),
    )


def _exchanges(derived: Derived) -> Iterator[tuple[Step, int]]:
    """Yields the sends of `meetings` between mirrored stages, with how often each runs."""
    repeat_by_name = {
        name: block.repeat for block in derived.blocks for name in (*weights_of(derived, block), *counts_of(block))
    }
    for step in meetings(derived) if derived.boundary else ():
        name = step.result.name
        yield step, repeat_by_name[name if name in repeat_by_name else name.removeprefix("d")]


def _in_buckets(costs: tuple[StepCost, ...], blocks_by_weight: Mapping[str, list[str]]) -> tuple[StepCost, ...]:
    """Returns the costs with one latency for all weights, or all gradients, of a block that one collective sends.

    Libraries send them as flat buffers: FSDP one block at a time, Megatron and DDP in buckets of about that size.
    """
    indices_by_bucket: dict[tuple[str, str, str], list[int]] = {}
    for index, cost in enumerate(costs):
        if cost.step.is_collective and (cost.hides or cost.step.phase == "update"):
            block_name = blocks_by_weight.get(cost.step.result.name.removeprefix("d"), [""])[-1]
            indices_by_bucket.setdefault((cost.step.op, cost.step.scope, block_name), []).append(index)
    bucketed_costs = list(costs)
    for indices in indices_by_bucket.values():
        bytes_s = total(costs[index].network_s - costs[index].latency_s for index in indices)
        bucket_s = bytes_s + largest([costs[index].latency_s for index in indices])
        stretch = np.divide(bucket_s, bytes_s, out=np.ones_like(bucket_s), where=np.asarray(bytes_s) > 0)
        for index in indices:
            sent_s = costs[index].network_s - costs[index].latency_s
            bucketed_costs[index] = replace(costs[index], network_s=sent_s * stretch, latency_s=sent_s * (stretch - 1))
    return tuple(bucketed_costs)


def kept_results(derived: Derived) -> dict[tuple[str, str], frozenset[ShardedArray]]:
    """Maps (block, phase) of each block of layers to the results that a layer keeps for its backward pass."""
    return {(block.name, "forward"): frozenset(block.kept) for block in derived.blocks if block.is_layer}


def blocks_of_weights(derived: Derived) -> dict[str, list[str]]:
    """Maps a weight to the blocks that use it, in order: several for tied embeddings."""
    blocks_by_weight: dict[str, list[str]] = {}
    for block in derived.blocks:
        for name in weights_of(derived, block):
            blocks_by_weight.setdefault(name, []).append(block.name)
    return blocks_by_weight


def block_shares(derived: Derived, pipeline: PipelineCost) -> dict[str, Number]:
    """Maps a block to the share of its executions on the busiest device of a pipeline, which has the head."""
    layer_share, (emb_share, head_share) = pipeline.share(derived.num_layers), pipeline.end_shares
    head = derived.blocks[-1].name
    return {b.name: layer_share if b.is_layer else head_share if b.name == head else emb_share for b in derived.blocks}


def _with_sum(cost: StepCost, num_elements: Number, rates: StepRates, num_microbatches: Number) -> StepCost:
    """Adds to a product the traffic of accumulating its result in float32, if there are several microbatches.

    With eager dispatch the product itself adds; a compiled program adds in a separate pass over memory.
    """
    moved_bytes = 2 * DTYPE_BYTES["fp32"] * num_elements * (np.asarray(num_microbatches) > 1)
    field = "launch_s" if rates.chip.software.is_compiled else "hbm_s"
    added_fields: dict[str, Number] = {field: getattr(cost, field) + moved_bytes / rates.chip.hbm_bytes_per_s}
    return replace(cost, hbm_bytes=cost.hbm_bytes + moved_bytes, **added_fields)


def sent_element_bytes(step: Step, *, width: Number, num_microbatches: Number) -> Number:
    """Returns the bytes of one element of a collective; ``width`` is the bytes of an element of the state's weights.

    Gradients that are sent once per step have been summed in float32 if there is more than one microbatch.
    """
    if step.full.dtype:
        return DTYPE_BYTES[step.full.dtype]
    if step.scope != "step" or step.phase == "update":
        return width
    return np.where(np.asarray(num_microbatches) > 1, DTYPE_BYTES["fp32"], width)


def _sent_share(step: Step, sizes: SlotSizes, rates: StepRates) -> Number:
    """Returns the bytes that an exchange of slots sends, over the bytes of one row for each of a token's experts.

    Sending a token once to each node leaves the copies inside to faster links, which hide them. Inside one node it is
    sent once to each device.
    """
    if not sizes.by_device or "D" not in step.full.dims:
        return 1.0
    group = frozenset(step.axes)
    num_nodes = np.asarray(rates.num_nodes.get(group, 1))
    width_ratio = sizes.sent_bytes / sizes.width if step.to_dim == "E" else 1.0
    num_places = np.where(num_nodes > 1, num_nodes, rates.groups[group].size)
    return width_ratio * places_of_token(sizes, num_places) / sizes.dims["Ea"]


def price_step(
    step: Step,
    sizes: SlotSizes,
    rates: StepRates,
    *,
    num_microbatches: Number,
    kept: frozenset[ShardedArray] = frozenset(),
) -> StepCost:
    """Returns the cost of one execution of one step, whose block keeps the results ``kept`` for backward."""
    if not step.is_collective:
        return local_cost(step, sizes, rates.chip, kept=kept)
    group_rates, chip = rates.groups[frozenset(step.axes)], rates.chip
    element_bytes = sent_element_bytes(step, width=sizes.width, num_microbatches=num_microbatches)
    # programs of this package sum in float32; libraries in the dtype of their state's gradients
    if not chip.software.is_compiled and step.scope == "step" and step.phase != "update":
        element_bytes = np.minimum(element_bytes, STATE_BYTES[sizes.state]["gradients"])
    if rates.narrow_gathers and step.op == "all_gather" and (step.phase == "update" or not step.critical):
        element_bytes = 1.0
    sizes = slot_sizes(step, sizes)
    sent_bytes = sizes.elements(step.full) * element_bytes * padding_factor(step, sizes)
    if exchanges_slots(step):
        sent_bytes = sent_bytes * sizes.load * _sent_share(step, sizes, rates)
    if chip.kernels and step.op == "all_reduce":
        return _reduced_by_engine(step, sent_bytes, sizes, group_rates, chip.kernels)
    kind_rate = group_rates[step.op]
    num_sends = num_moves(step, sizes)
    # halves in opposite directions overlap if each direction has a link of its own
    is_two_way = isinstance(step.details, Round) and step.details.ways == 2
    direction_bytes = sent_bytes / group_rates.ring_links if is_two_way else sent_bytes
    network_s = num_sends * kind_rate.time(direction_bytes)
    latency_s = network_s - num_sends * direction_bytes * kind_rate.seconds_per_byte
    if chip.host is not None:  # devices that share cores wait for each other
        bytes_s, latency_s = chip.host.waits * (network_s - latency_s), chip.host.meets * latency_s
        network_s = bytes_s + latency_s
    # accumulation also reads the sum so far, as after a product
    added_bytes = sizes.bytes(step.result) if step.accumulates else 0.0
    added_bytes = added_bytes if chip.software.is_compiled else added_bytes * chip.efficiency.eager_traffic
    return StepCost(
        step=step,
        hbm_bytes=added_bytes,
        hbm_s=added_bytes / chip.hbm_bytes_per_s,
        network_bytes=sent_bytes,
        network_s=network_s,
        latency_s=latency_s,
        level=kind_rate.level,
    )
