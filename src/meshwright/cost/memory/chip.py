"""Memory of one chip, itemised, from the parts of a step and a pipeline schedule."""

import functools

import msgspec
import numpy as np

from meshwright.algebra.sizes import Number, master_bytes, moment_bytes
from meshwright.core.dims import DTYPE_BYTES
from meshwright.core.errors import InputError
from meshwright.cost.arrays import largest, total
from meshwright.cost.pipeline import ONE_STAGE, PipelineCost
from meshwright.spec.calibration import Calibration, datasheet_calibration, memory_bytes
from meshwright.spec.cluster import Cluster, Topology
from meshwright.spec.strategy import STATE_BYTES

BUFFERED_REPEATS = 2
"""Repeats whose offloaded arrays are on the device: the running one and the one in transfer."""

MEMORY_MARGINS: dict[Topology, float] = {"torus": 0.05, "switched": 0.05, "host": 0.0}
"""Share of a chip's memory that listed plans leave free, on TPUs, GPUs and this machine: by so much compiled steps may
need more than is predicted. `benchmarks/verify.py` says how often they do (docs/proof.md)."""

STATE_PARTS = ("weights", "gradients", "optimizer", "moments")


class BlockMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one block on a chip, for any schedule.

    Five fields count all repeats: ``elements`` of each of `STATE_PARTS`, ``kept_bytes`` and ``logits_bytes`` of results
    kept for the backward pass of one microbatch, ``pending_bytes`` that a separate pass for weight gradients reads, and
    ``retiled_bytes`` of second copies of weights.
    The others are of one repeat: ``stream_bytes`` enter it; ``gathered_bytes`` of whole weights and ``working_bytes``
    of temporary results are alive only while it runs. ``segment`` is that of `BlockSteps`; one that ``reruns`` its
    layers for each of them keeps a repeat's results while it is being run again, else those of all its repeats.
    """

    repeat: int
    segment: int | str | None
    reruns: bool = False
    elements: dict[str, Number]
    kept_bytes: Number
    logits_bytes: Number
    pending_bytes: Number
    stream_bytes: Number
    gathered_bytes: Number
    working_bytes: Number
    retiled_bytes: Number

    def saved_bytes(self, share: Number, stash: Number, chunks: Number) -> Number:
        """Returns the bytes kept from forward to backward pass on a device with a share of the repeats in ``chunks``
        runs, for ``stash`` microbatches in flight: the results of every repeat or, where segments are run again, their
        inputs."""
        return stash * share * self.repeat * self.moved_bytes(share / chunks)

    def moved_bytes(self, share: Number) -> Number:
        """Returns the saved bytes of one repeat and one microbatch, in a run of a share of the repeats."""
        return (
            self.kept_bytes / self.repeat if self.segment is None else self.stream_bytes / self.segment_repeats(share)
        )

    def segment_bytes(self, share: Number) -> Number:
        """Returns the bytes of the results of the one segment that is being run again."""
        repeats = 1 if self.reruns else self.segment_repeats(share)
        return 0.0 if self.segment is None else self.kept_bytes / self.repeat * repeats

    def segment_repeats(self, share: Number) -> Number:
        """Returns the repeats from one kept input to the next in a run of a share of the repeats."""
        held_repeats = share * self.repeat
        return np.sqrt(held_repeats) if self.segment == "sqrt" else np.minimum(int(self.segment or 1), held_repeats)


class MemoryParts(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one chip before pipeline stages divide the layers: computed once, for any schedule.

    ``ends`` are embedding and head. ``shared_bytes`` are results of earlier stacks that layers read, with their
    cotangents. ``chunk_bytes`` are the logits of one chunk of a chunked loss head, with their cotangent. ``tied_bytes``
    are gradients of weights that several ends use, whole until the last of these has run.
    ``boundary_bytes`` are sent from stage to stage for one microbatch: (forward, backward). ``cache_bytes`` are keys
    and values of all layers, in a step that generates. ``on_cpus`` as in `OpSizes`.
    """

    state: str
    num_layers: int
    layers: tuple[BlockMemory, ...]
    ends: tuple[BlockMemory, ...]
    shared_bytes: Number
    chunk_bytes: Number
    tied_bytes: Number
    boundary_bytes: tuple[Number, ...]
    cache_bytes: Number
    on_cpus: bool = False

    def moved_bytes(self, pipeline: PipelineCost) -> Number:
        """Returns the bytes that one repeat keeps for the backward pass of one microbatch: the most of any block."""
        share = pipeline.share(self.num_layers) / np.asarray(pipeline.chunks)
        return largest(layer.moved_bytes(share) for layer in self.layers)

    def elements(self, part: str, pipeline: PipelineCost) -> Number:
        """Returns the elements of one of `STATE_PARTS` on the fullest device."""
        share = pipeline.share(self.num_layers) * pipeline.copies(part)
        return total(layer.elements[part] for layer in self.layers) * share + pipeline.ends_held(
            [end.elements[part] for end in self.ends]
        )

    def optimizer_bytes(self, pipeline: PipelineCost) -> Number:
        """Returns the bytes of optimizer state that one chip updates: moments and, if there are any, master weights."""
        master_state_bytes = self.elements("optimizer", pipeline) * master_bytes(self.state)
        return master_state_bytes + self.elements("moments", pipeline) * moment_bytes(self.state)

    def items(self, pipeline: PipelineCost = ONE_STAGE, offload: tuple[str, ...] = ()) -> dict[str, Number]:
        """Returns the bytes per chip of each item; their sum must fit.

        weights, gradients, optimizer: bytes per parameter of the state. With several microbatches the sum of the
        gradients is a further float32 copy, unless gradients are that wide already; in pipeline stages of one program
        it is the only copy, to which every stage adds at once. One program without stages scatters the gradients of its
        only microbatch to the optimizer's shards layer by layer, and stores the shards. activations: results kept for
        the backward pass of every microbatch in flight. kv_cache: keys and values. The other items are those of the
        block, layer or end, that needs the most while it runs. logits: those kept, or one chunk with its cotangent;
        none while a layer runs. communication: the gathered weights of one repeat, and the buffers between stages.
        workspace: the largest set of temporary results alive at once in one repeat. The fullest device of a pipeline is
        taken to have the most layers, the most microbatches in flight and the ends of `PipelineCost.ends_held`.
        Offloading leaves the buffers of two repeats on the chip.
        """
        state, one_stage = STATE_BYTES[self.state], pipeline.in_lockstep & pipeline.is_one
        has_several = np.asarray(pipeline.microbatches) > 1
        in_stages = pipeline.in_lockstep & ~pipeline.is_one
        accumulated = DTYPE_BYTES["fp32"] * (has_several | in_stages) * (state["gradients"] < DTYPE_BYTES["fp32"])
        # the first of two is no loop, and its gradients become the sum, if they are not scattered in every microbatch
        unscattered = self.elements("gradients", pipeline) > self.elements("optimizer", pipeline)
        is_first_of_two = one_stage & (np.asarray(pipeline.microbatches) == 2) & unscattered
        single = np.where((in_stages | is_first_of_two) & (accumulated > 0), 0.0, state["gradients"])
        share, optimizer = pipeline.share(self.num_layers), self.optimizer_bytes(pipeline)
        gradients = np.where(
            one_stage & ~has_several, self.elements("optimizer", pipeline), self.elements("gradients", pipeline)
        )
        chunks = np.asarray(pipeline.chunks)
        saved = total(layer.saved_bytes(share, pipeline.stash, chunks) for layer in self.layers)
        if "activations" in offload:
            saved = np.minimum(saved, BUFFERED_REPEATS * self.moved_bytes(pipeline))
        if "optimizer" in offload:
            optimizer = np.minimum(1.0, BUFFERED_REPEATS / pipeline.layers_held(self.num_layers)) * optimizer
        streams = largest(layer.stream_bytes for layer in self.layers)
        messages = zip(pipeline.messages, (*self.boundary_bytes, streams), strict=True)
        activations, gradients, logits, gathered, workspace = self._fullest_moment(
            pipeline, gradients * (single + accumulated), saved
        )
        return {
            "weights": self.elements("weights", pipeline) * state["weights"],
            "gradients": gradients,
            "optimizer": optimizer,
            "activations": activations,
            "logits": logits,
            "kv_cache": self.cache_bytes * share * np.asarray(pipeline.microbatches) + 0.0 * workspace,
            "communication": sum((count * size for count, size in messages), start=gathered),
            "workspace": workspace + total(layer.retiled_bytes for layer in self.layers) * share,
        }

    def _fullest_moment(self, pipeline: PipelineCost, gradients: Number, saved: Number) -> tuple[Number, ...]:
        """Returns the bytes of activations, gradients, logits, gathered weights and temporary results when they are
        most together: while the head, the layers or the embedding run, or after all."""
        state, one_stage = STATE_BYTES[self.state], pipeline.in_lockstep & pipeline.is_one
        has_several = np.asarray(pipeline.microbatches) > 1
        share, chunks = pipeline.share(self.num_layers), np.asarray(pipeline.chunks)
        pending = total(pipeline.pending_stash * share * layer.pending_bytes for layer in self.layers)
        running = total(layer.saved_bytes(share, pipeline.running_stash, chunks) for layer in self.layers)
        ends = self.shared_bytes + total(end.kept_bytes for end in self.ends)
        activations, rerun = saved + pending + ends, total(layer.segment_bytes(share / chunks) for layer in self.layers)
        logits = pipeline.ends_held([block.logits_bytes for block in (*self.layers, *self.ends)]) + self.chunk_bytes
        zero, head_bytes, embed_bytes = 0.0 * logits, _most(self.ends[1:]), _most(self.ends[:1])
        all_grads = gradients + np.where(one_stage, self.tied_bytes, 0.0)
        # one microbatch makes its gradients behind the head, and scatters each at once
        of_head = (activations, np.where(one_stage & ~has_several, 0.0, gradients), logits, *head_bytes)
        gathered, working = _most(self.layers)
        # the logits are gone before the layers run backward, and what these kept before the embedding does
        of_layers = (activations + rerun + running, all_grads, zero, gathered, working + self._chunk_copies(pipeline))
        of_embedding = (np.where(one_stage, ends, activations), all_grads, zero, *embed_bytes)
        moments = [of_head, of_layers, of_embedding]
        if self.on_cpus:
            # a microbatch adds its gradients to a wide sum when it has all; sums over replicas take memory of their own
            is_wide = state["gradients"] >= DTYPE_BYTES["fp32"]
            wide_sums = one_stage * has_several * is_wide * self.elements("gradients", pipeline) * DTYPE_BYTES["fp32"]
            moments[1:] = [(kept_bytes, gradient + wide_sums, *rest) for kept_bytes, gradient, *rest in moments[1:]]
            sum_bytes = self.elements("optimizer", pipeline) * state["gradients"] * pipeline.sums_last
            moments += [(zero, gradients + sum_bytes, zero, zero, zero)]
        return functools.reduce(_fuller, moments)

    def _chunk_copies(self, pipeline: PipelineCost) -> Number:
        """Returns the bytes of a run's weights, where a device has several, and of its gradients before they are added.
        One program of all stages holds them besides the whole arrays."""
        chunks, width = np.asarray(pipeline.chunks), STATE_BYTES[self.state]["weights"]
        elements_of = {part: total(layer.elements[part] for layer in self.layers) for part in ("weights", "gradients")}
        num_elements = elements_of["weights"] * (chunks > 1) + elements_of["gradients"]
        share = pipeline.share(self.num_layers) / chunks
        return np.where(pipeline.is_one | (not pipeline.in_lockstep), 0.0, num_elements * share * width)


def _fuller(one: tuple[Number, ...], other: tuple[Number, ...]) -> tuple[Number, ...]:
    """Returns the figures with the larger sum."""
    is_larger = sum(other) > sum(one)
    return tuple(np.where(is_larger, theirs, ours) for ours, theirs in zip(one, other, strict=True))


def _most(blocks: tuple[BlockMemory, ...]) -> tuple[Number, Number]:
    """Returns the bytes of (gathered weights, temporary results) of the block where their sum is largest."""
    gathered: Number = 0.0
    working: Number = 0.0
    for block in blocks:
        is_larger = block.gathered_bytes + block.working_bytes > gathered + working
        gathered = np.where(is_larger, block.gathered_bytes, gathered)
        working = np.where(is_larger, block.working_bytes, working)
    return gathered, working


def total_bytes(items: dict[str, Number]) -> Number:
    """Returns the sum of the items of `MemoryParts.items`."""
    return sum(items.values())


def memory_limit(cluster: Cluster, calibration: Calibration | None = None) -> float:
    """Returns the bytes that a program may fill on one chip; infinity for this machine if its memory is not known."""
    rates = calibration or datasheet_calibration(cluster.chip)
    try:
        return memory_bytes(cluster.chip, rates)
    except InputError:
        if cluster.kind == "host":
            return float("inf")
        raise
