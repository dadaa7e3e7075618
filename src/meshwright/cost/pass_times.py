"""Seconds of the passes over each block, and of the training step that they make on a pipeline's busiest device."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from meshwright.algebra.derived import BlockSteps, Derived
from meshwright.algebra.ops.dispatch import exchanges_slots, is_at_experts
from meshwright.algebra.rewrites.reruns import Rerun
from meshwright.algebra.rewrites.split_backward import weights_of
from meshwright.algebra.sizes import Number
from meshwright.cost.arrays import largest, total
from meshwright.cost.offload import NOTHING, Transfers
from meshwright.cost.pipeline import PipelineCost
from meshwright.cost.step_costs import Priced, blocks_of_weights
from meshwright.cost.step_rates import StepRates
from meshwright.cost.work.kernels import LONGEST_DRAFT, AxisGroup, StepCost, partly_hidden
from meshwright.cost.work.slots import SlotSizes


class StepSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """Expected seconds of one training step, and the pipeline bubble (the schedule's idle seconds) among them."""

    step_s: Number
    bubble_s: Number


class LayerPasses(NamedTuple):
    """Seconds of one microbatch in the layers of one device, forward and backward, and the bubble of a step."""

    forward_s: Number
    backward_s: Number
    bubble_s: Number


class BlockSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one repeat of a block for one microbatch; ``update`` is the optimizer.

    ``backward`` leaves out collectives that run once per step; ``last`` is what they add to the last microbatch.
    ``inputs`` and ``weight`` replace ``backward`` if a pipeline splits that pass; together they may take longer.
    ``again`` is one forward rerun of a layer: ``rerun`` counts them, and they come before the backward pass.
    """

    repeat: int
    forward: Number
    backward: Number
    again: Number = 0.0
    rerun: Rerun | None = None
    inputs: Number
    weight: Number
    last: Number
    update: Number


class BlockTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of layers, of the ``ends`` (embedding and head) and of the rest of a step, for every schedule.

    ``send_s`` is for one microbatch over one boundary of stages, both directions together, ``exposed_send_s`` the part
    that passes do not hide. ``exchange_parts_s`` is for `Priced.exchanges`: (seconds by bytes of all layers, latency).
    ``after_s`` is the part of the update that belongs to no block. The host adds ``microbatch_s`` to each microbatch;
    it starts the kernels of a prefill one by one in ``starts_s``, which passes hide in part. ``overlap`` is the
    exponent by which passes hide sends (None: sends add up with passes). Stragglers multiply a training step by
    ``slowdown`` and add ``straggler_s``.
    """

    num_layers: int
    layers: tuple[BlockSeconds, ...]
    ends: tuple[BlockSeconds, ...]
    send_s: Number
    after_s: Number
    exposed_send_s: Number = 0.0
    exchange_parts_s: tuple[Number, Number] = (0.0, 0.0)
    microbatch_s: Number = 0.0
    overlap: Number | None = None
    slowdown: Number = 1.0
    straggler_s: Number = 0.0
    starts_s: Number = 0.0

    def layers_s(self, part: str, share: Number, at_least: Number = 0.0) -> Number:
        """Returns the seconds of a `BlockSeconds` field in a share of the layers, at least ``at_least`` per repeat."""
        return total(np.maximum(getattr(layer, part), at_least) * layer.repeat * share for layer in self.layers)

    def reruns_s(self, pipeline: PipelineCost) -> Number:
        """Returns the seconds in which a device reruns layers forward for one microbatch, for their backward passes."""
        layer_share = pipeline.share(self.num_layers)
        reruns = ((layer.again, layer.rerun.times(layer.repeat, pipeline.runs)) for layer in self.layers if layer.rerun)
        return total(rerun_s * num_reruns * layer_share for rerun_s, num_reruns in reruns)

    def ends_s(self, *parts: str) -> list[Number]:
        """Returns, for embedding and head, the sum of their seconds in some fields of `BlockSeconds`."""
        return [total(getattr(end, part) for part in parts) for end in self.ends]

    def once_s(self, pipeline: PipelineCost) -> Number:
        """Returns the seconds of a device's work once per step: sums of gradients, optimizer, `exchange_s`."""
        share = pipeline.share(self.num_layers) * pipeline.sums
        ends_s = pipeline.ends_held(self.ends_s("last", "update"))
        return self.layers_s("last", share) + self.layers_s("update", share) + ends_s + self.exchange_s(pipeline)

    def exchange_s(self, pipeline: PipelineCost) -> Number:
        """Returns the seconds of `Priced.exchanges` in a step; 0 unless one program runs two copies of the weights."""
        bytes_s, latency_s = self.exchange_parts_s
        has_exchanges = pipeline.in_lockstep & (pipeline.weight_copies > 1)
        return has_exchanges * (pipeline.share(self.num_layers) * bytes_s + latency_s)

    def sends_s(self, pipeline: PipelineCost) -> Number:
        """Returns the seconds that a step waits for sends of the stream and of its cotangents."""
        return pipeline.num_sends * self.send_s / 2

    def pairs_s(self, pipeline: PipelineCost) -> Number:
        """Returns the extra seconds of a step if one of every two layers of a device ran forward once more."""
        layers_per_run = pipeline.layers_held(self.num_layers) / np.asarray(pipeline.chunks)
        repeated_share = pipeline.share(self.num_layers) * np.floor(layers_per_run / 2) / layers_per_run
        return pipeline.microbatches * self.layers_s("forward", repeated_share)

    def layer_passes(self, pipeline: PipelineCost, at_least: Number = 0.0) -> LayerPasses:
        """Returns the seconds of one microbatch's passes over the layers of a device, and the bubble of the schedule.

        If only some microbatches split their backward pass, the bubble counts all as split.
        """
        share, split = pipeline.share(self.num_layers), pipeline.split_share
        fwd_s, rerun_s = self.layers_s("forward", share, at_least), self.reruns_s(pipeline)
        bwd_s = self.layers_s("backward", share, at_least) + rerun_s
        if not np.any(split > 0):
            return LayerPasses(fwd_s, bwd_s, pipeline.bubble_s(fwd_s, bwd_s, 0.0))
        inputs_s, weight_s = self.layers_s("inputs", share, at_least) + rerun_s, self.layers_s("weight", share)
        idle_s = pipeline.bubble_s(fwd_s, np.where(split > 0, inputs_s, bwd_s), np.where(split > 0, weight_s, 0.0))
        return LayerPasses(fwd_s, bwd_s + split * (inputs_s + weight_s - bwd_s), idle_s)

    def step_s(self, pipeline: PipelineCost, offload: Transfers = NOTHING) -> StepSeconds:
        """Returns the seconds of a step on the busiest device (all microbatches, `once_s`, the rest), and its bubble.

        A pass takes at least as long as the transfer of its offloaded results.
        """
        forward_s, backward_s, idle_s = self.layer_passes(pipeline, offload.activations_s)
        ends_s = pipeline.ends_computed(self.ends_s("forward", "backward"))
        layer_s = (forward_s + backward_s) / pipeline.layers_held(self.num_layers)
        ends_s = np.maximum(ends_s - pipeline.layers_beside_head(self.num_layers) * layer_s, 0.0)
        microbatch_s = forward_s + backward_s + ends_s + self.microbatch_s
        passes_s, exposed_s = pipeline.microbatches * microbatch_s, pipeline.num_sends * self.exposed_send_s / 2
        sends_s = self.sends_s(pipeline) - exposed_s
        passes_s = passes_s + sends_s if self.overlap is None else partly_hidden(passes_s, sends_s, self.overlap)
        busy_s = passes_s + exposed_s + self.once_s(pipeline) + self.after_s + offload.optimizer_s
        return StepSeconds(step_s=(busy_s + idle_s) * self.slowdown + self.straggler_s, bubble_s=idle_s * self.slowdown)


def block_times(derived: Derived, priced: Priced, sizes: SlotSizes, rates: StepRates) -> BlockTimes:
    """Returns the seconds of all passes over one repeat of every block; ``last`` has the gradient sums of scope "step".

    On a host with measured rates, passes include the copies of the loop over layers.
    """
    fit = rates.chip.efficiency
    is_training = any(block.backward for block in priced.blocks)
    # engines capture graphs only of steps without parts of prompts
    is_eager = rates.chip.software.is_engine & (np.asarray(sizes.rows_each) > LONGEST_DRAFT)
    # the block whose backward pass sums a gradient: of several (tied embeddings) the first
    owner_by_weight = {weight: block_names[0] for weight, block_names in blocks_of_weights(derived).items()}
    layer_seconds, end_seconds = list[BlockSeconds](), list[BlockSeconds]()
    for block in priced.blocks:
        copy_s: Number = 0.0
        copy_back_s: Number = 0.0
        if rates.chip.host is not None and block.is_layer:
            copy_s, copy_back_s = (size * rates.chip.host.loop_byte for size in loop_bytes(block.steps, derived, sizes))
        forward_s = _pass_s(block.forward, rates) + copy_s
        if np.any(is_eager):
            eager_s = partly_hidden(forward_s, _starts_s(block.forward, rates), fit.overlap)
            forward_s = np.where(is_eager, eager_s, forward_s)
        # forward reruns for later layers are separate loops
        num_rerun_steps = len(block.again)
        backward_costs = block.backward[num_rerun_steps:]
        backward_s = _pass_s([cost for cost in backward_costs if cost.step.scope != "step"], rates) + copy_back_s
        once_costs = [cost for cost in priced.once if owner_by_weight.get(cost.step.result.name) == block.name]
        split_indices = block.steps.split
        inputs_s, weight_s = (
            _pass_s([block.backward[index] for index in indices if index >= num_rerun_steps], rates)
            for indices in ((split_indices.inputs, split_indices.weights) if split_indices else ((), ()))
        )
        block_seconds = BlockSeconds(
            repeat=block.steps.repeat,
            forward=forward_s,
            backward=backward_s,
            again=_pass_s(block.again, rates) + copy_s * bool(num_rerun_steps),
            rerun=block.steps.rerun,
            inputs=inputs_s + copy_back_s,
            weight=weight_s,
            last=_pass_s(backward_costs, rates) + copy_back_s - backward_s,
            update=_update_s(once_costs, block.forward, forward_s, rates),
        )
        (layer_seconds if block.is_layer else end_seconds).append(block_seconds)
    return BlockTimes(
        num_layers=derived.num_layers,
        layers=tuple(layer_seconds),
        ends=tuple(end_seconds),
        send_s=total(cost.time_s for cost in priced.boundary),
        exposed_send_s=total(cost.exposed_s for cost in priced.boundary),
        after_s=total(c.time_s * c.count for c in priced.once if c.step.result.name not in owner_by_weight),
        exchange_parts_s=(
            total(cost.count * (cost.network_s + cost.exposed_s - cost.latency_s) for cost in priced.exchanges),
            total(cost.latency_s for cost in priced.exchanges),
        ),
        microbatch_s=fit.host_microbatch_s * rates.chip.software.starts_kernels + fit.engine_s.get(rates.engine, 0.0),
        overlap=fit.overlap if rates.overlaps and not rates.chip.software.in_turn else None,
        slowdown=1 + is_training * fit.straggler * np.log2(rates.num_hosts),
        straggler_s=is_training * fit.straggler_s * np.log2(rates.num_hosts),
        starts_s=total(block.steps.repeat * _starts_s(block.forward, rates) for block in priced.blocks) * is_eager,
    )


def _pass_s(costs: Sequence[StepCost], rates: StepRates) -> Number:
    """Returns the seconds of one pass over one repeat of a block: compute, exposed collectives, and hidden ones.

    By the data sheet, compute and exposed collectives add up, and all other collectives are hidden unless the busiest
    links take longer. Blocks of a collective matmul are hidden by its own products; the remainder is exposed. A fitted
    exponent says how complete overlap is: see `partly_hidden`. With eager dispatch, a pass is no shorter than the
    starts of its kernels. Libraries add exchanges of tokens, which nothing hides.
    """
    if rates.overlaps and rates.chip.software.starts_kernels:
        return np.maximum(_device_s(costs, rates), _starts_s(costs, rates))
    return _device_s(costs, rates)


def _device_s(costs: Sequence[StepCost], rates: StepRates) -> Number:
    """Returns the seconds of one pass on the device, without the host's starts of kernels: see `_pass_s`."""
    if not rates.overlaps:
        return total(cost.time_s for cost in costs)
    fit = rates.chip.efficiency
    compute_s = total(cost.local_s for cost in costs) / rates.compute_share
    exposed_s = total(cost.exposed_s for cost in costs)
    if rates.chip.software.in_turn:
        return compute_s + exposed_s + total(cost.network_s for cost in costs if cost.step.is_collective)
    hide_flags = [cost.hides or (rates.hides_exchanges and exchanges_slots(cost.step)) for cost in costs]
    awaited_costs = [c for c, hidden in zip(costs, hide_flags, strict=True) if c.step.is_collective and not hidden]
    if not rates.chip.software.is_compiled:
        # libraries overlap weights, gradients and tensor parallelism, but tokens wait for their exchange
        exposed_s = exposed_s + total(cost.network_s for cost in awaited_costs if exchanges_slots(cost.step))
        awaited_costs = [cost for cost in awaited_costs if not exchanges_slots(cost.step)]
    round_costs = [cost for cost in costs if cost.in_ring_loop]
    waiting_s = total(cost.network_s for cost in awaited_costs) + total(_left_of_rounds(costs, rates))
    total_s = compute_s + waiting_s if fit.overlap is None else partly_hidden(compute_s, waiting_s, fit.overlap)
    hidden_costs = [cost for cost, hidden in zip(costs, hide_flags, strict=True) if hidden and not cost.in_ring_loop]
    links_s = _links_s([*awaited_costs, *round_costs, *hidden_costs], rates)
    gather_costs = [cost for cost in hidden_costs if cost.hides and cost.step.scope != "step"]
    total_s = partly_hidden(total_s, _links_s(gather_costs, rates), fit.hiding)
    other_costs = [cost for cost in hidden_costs if not cost.hides or cost.step.scope == "step"]
    return np.maximum(partly_hidden(total_s, _links_s(other_costs, rates), fit.overlap), links_s) + exposed_s


def _starts_s(costs: Sequence[StepCost], rates: StepRates) -> Number:
    """Returns the seconds in which a host starts the kernels of a pass one by one."""
    return rates.chip.efficiency.host_kernel_s * total(_host_starts(cost, rates) for cost in costs)


def _host_starts(cost: StepCost, rates: StepRates) -> Number:
    """Returns the kernels of a step that the host starts: none in a CUDA graph, and no collective that is hidden, as
    libraries move the weights and gradients of many matrices at once."""
    is_in_graph = rates.chip.software.captures_layers and not is_at_experts(cost.step)
    is_sent = cost.step.is_collective and not cost.hides and np.asarray(rates.groups[cost.group].size) > 1
    return 0 if is_in_graph else cost.num_kernels + is_sent


def loop_bytes(block: BlockSteps, derived: Derived, sizes: SlotSizes) -> tuple[Number, Number]:
    """Returns the bytes that one iteration of a loop over layers moves besides its steps, forward and backward.

    Forward, weights are copied out of their stack (read, written) and kept results into a stack that was cleared
    (written, then read and written). Backward, both are copied out, and gradients are copied into cleared stacks.
    """
    results = {array for step in block.forward for array in step.results}
    read_names = set(weights_of(derived, block))
    weight_names = {variable.name for variable in derived.program.of_role("weight", "vector")}
    w_bytes = total(sizes.bytes(derived.declared[name]) for name in read_names)
    act_bytes = total(sizes.bytes(array) for array in block.kept if array.name not in weight_names or array in results)
    # gradients after one microbatch, before sums once per step
    grads = {
        array.name: array
        for step in block.backward
        if step.scope != "step"
        for array in step.results
        if array.name.startswith("d") and array.name[1:] in read_names
    }
    return 2 * w_bytes + 3 * act_bytes, 2 * w_bytes + 2 * act_bytes + 3 * total(sizes.bytes(a) for a in grads.values())


def _left_of_rounds(costs: Sequence[StepCost], rates: StepRates) -> list[Number]:
    """Returns the exposed seconds of the moves of each collective matmul.

    Of n blocks, one is computed before the first arrives or after the last has left: n - 1 products hide n - 1 moves.
    """
    exposed_s = []
    for index, cost in enumerate(costs):
        if cost.in_ring_loop:
            product_cost = costs[index + (1 if cost.step.details.ring == "past" else -1)]
            group_size = rates.groups[cost.group].size
            product_s = product_cost.local_s * (group_size - 1) / group_size
            total_s = partly_hidden(product_s, cost.network_s, rates.chip.efficiency.overlap)
            exposed_s.append(np.maximum(total_s - product_s, 0.0))  # rounding may leave less than nothing
    return exposed_s


def _update_s(costs: Sequence[StepCost], forward: Sequence[StepCost], forward_s: Number, rates: StepRates) -> Number:
    """Returns the seconds of the optimizer on one repeat of a block, and of the exposed part of gathering updated
    weights.

    The gather (ZeRO-1 and 2) overlaps with the next forward pass, and shares links with its collectives."""
    local_s = total(cost.local_s + cost.exposed_s for cost in costs)
    if not rates.overlaps or rates.chip.software.in_turn:
        return total(cost.time_s for cost in costs)
    overlapped_s = partly_hidden(forward_s, _links_s(costs, rates), rates.chip.efficiency.overlap)
    return local_s + np.maximum(overlapped_s, _links_s([*forward, *costs], rates)) - forward_s


def link_seconds(
    costs: Iterable[StepCost], rates: StepRates, *, field: str = "network_s", once: bool = False
) -> list[Number]:
    """Returns, for each physical axis, the sum of a ``field`` (seconds) over the collectives that keep it busy.

    Each collective counts as often as it runs on the busiest device or, with ``once``, once.
    """
    seconds_by_key: dict[tuple[AxisGroup, str], Number] = {}
    for cost in costs:
        if cost.step.is_collective:
            spent_s = getattr(cost, field) * (1 if once else cost.here)
            key = cost.group, cost.step.op
            seconds_by_key[key] = seconds_by_key.get(key, 0.0) + spent_s
    return [
        total(spent_s * rates.uses[key][axis_index] for key, spent_s in seconds_by_key.items())
        for axis_index in range(len(rates.link_levels))
    ]


def _links_s(costs: Sequence[StepCost], rates: StepRates) -> Number:
    """Returns the busy seconds of the busiest physical axis in the collectives of one pass."""
    return largest(link_seconds(costs, rates, once=True))
