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
"""Repeats whose offloaded arrays are on the device at a time: the running one and the one in transfer."""

MEMORY_MARGINS: dict[Topology, float] = {"torus": 0.05, "switched": 0.05, "host": 0.0}
"""Share of a chip's memory that listed plans leave free, on TPUs, GPUs and this machine: compiled steps may need that
much more than is predicted. `benchmarks/verify.py` says how often they do (docs/proof.md)."""

STATE_PARTS = ("weights", "gradients", "optimizer", "moments")


class BlockMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one block on a chip, for any schedule.

    Five fields count all repeats: ``elements`` of each of `STATE_PARTS`, ``kept_bytes`` and ``logits_bytes`` of results
    kept for the backward pass of one microbatch, ``pending_bytes`` that a separate pass for weight gradients reads, and
    ``retiled_bytes`` of second copies of weights. Other fields are of one repeat of the block ``name``:
    ``stream_bytes`` are its input; ``gathered_bytes`` of whole weights and ``working_bytes`` of temporary results exist
    only while it runs. ``segment`` is as in `BlockSteps`: while a segment is recomputed, the results of all its repeats
    exist, or with ``reruns`` of one repeat at a time.
    """

    name: str = ""
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
        """Returns the bytes kept from forward to backward pass on a device with a ``share`` of the repeats in
        ``chunks`` chunks, for ``stash`` microbatches in flight: results of every repeat or, with segments, inputs of
        segments."""
        return stash * share * self.repeat * self.moved_bytes(share / chunks)

    def moved_bytes(self, share: Number) -> Number:
        """Returns the saved bytes of one repeat and one microbatch, in a chunk with a ``share`` of the repeats."""
        return (
            self.kept_bytes / self.repeat if self.segment is None else self.stream_bytes / self.segment_repeats(share)
        )

    def segment_bytes(self, share: Number) -> Number:
        """Returns the bytes of the results of the one segment that is being recomputed; 0 without segments."""
        num_repeats = 1 if self.reruns else self.segment_repeats(share)
        return 0.0 if self.segment is None else self.kept_bytes / self.repeat * num_repeats

    def segment_repeats(self, share: Number) -> Number:
        """Returns the repeats of one segment in a chunk with a ``share`` of the repeats; for "sqrt" their root."""
        held_repeats = share * self.repeat
        return np.sqrt(held_repeats) if self.segment == "sqrt" else np.minimum(int(self.segment or 1), held_repeats)


class MemoryParts(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one chip before pipeline stages divide the layers: computed once, for any schedule.

    ``ends`` are embedding and head. ``shared_bytes`` are results that later layers read, with their cotangents.
    ``chunk_bytes`` are the logits of one chunk of a chunked loss head, with their cotangent. ``tied_bytes`` are
    gradients of weights that several ends use, whole until all of these have run. ``boundary_bytes`` are sent from
    stage to stage for one microbatch: (forward, backward). ``cache_bytes`` are keys and values of all layers, in a step
    that generates. ``on_cpus`` as in `OpSizes`.
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
        """Returns the bytes that one repeat keeps for the backward pass of one microbatch: the largest of any block."""
        num_chunks = np.asarray(pipeline.chunks)
        return largest(layer.moved_bytes(share / num_chunks) for layer, share in self._shares(pipeline))

    def _shares(self, pipeline: PipelineCost) -> list[tuple[BlockMemory, Number]]:
        """Returns each block of layers with the share of its repeats on the fullest device."""
        return [(layer, pipeline.share(self.num_layers, layer.name)) for layer in self.layers]

    def elements(self, part: str, pipeline: PipelineCost) -> Number:
        """Returns the elements of one of `STATE_PARTS` on the fullest device."""
        held_elements = total(layer.elements[part] * share for layer, share in self._shares(pipeline))
        return held_elements * pipeline.copies(part) + pipeline.ends_held(
            [end_block.elements[part] for end_block in self.ends]
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
        the backward pass of every microbatch in flight. kv_cache: keys and values. The next items are of the block,
        layer or end, that needs the most memory while it runs. logits: kept logits, or one chunk with its cotangent;
        none while a layer runs. communication: the gathered weights of one repeat, and the buffers between stages.
        workspace: the largest set of temporary results alive at once in one repeat. The fullest device of a pipeline is
        taken to have the most layers, the most microbatches in flight and the ends of `PipelineCost.ends_held`.
        Offloading leaves the buffers of two repeats on the chip.
        """
        width_of, is_one_stage = STATE_BYTES[self.state], pipeline.in_lockstep & pipeline.is_one
        has_several = np.asarray(pipeline.microbatches) > 1
        is_in_stages = pipeline.in_lockstep & ~pipeline.is_one
        sum_bytes = DTYPE_BYTES["fp32"] * (has_several | is_in_stages) * (width_of["gradients"] < DTYPE_BYTES["fp32"])
        # of two microbatches the first runs before the loop; its unscattered gradients become the sum
        is_unscattered = self.elements("gradients", pipeline) > self.elements("optimizer", pipeline)
        is_first_of_two = is_one_stage & (np.asarray(pipeline.microbatches) == 2) & is_unscattered
        gradient_bytes_each = np.where((is_in_stages | is_first_of_two) & (sum_bytes > 0), 0.0, width_of["gradients"])
        layer_share, opt_bytes = pipeline.share(self.num_layers), self.optimizer_bytes(pipeline)
        num_gradients = np.where(
            is_one_stage & ~has_several, self.elements("optimizer", pipeline), self.elements("gradients", pipeline)
        )
        num_chunks = np.asarray(pipeline.chunks)
        shares = self._shares(pipeline)
        saved_bytes = total(layer.saved_bytes(share, pipeline.stash, num_chunks) for layer, share in shares)
        if "activations" in offload:
            saved_bytes = np.minimum(saved_bytes, BUFFERED_REPEATS * self.moved_bytes(pipeline))
        if "optimizer" in offload:
            opt_bytes = np.minimum(1.0, BUFFERED_REPEATS / pipeline.layers_held(self.num_layers)) * opt_bytes
        stream_bytes = largest(layer.stream_bytes for layer in self.layers)
        messages = zip(pipeline.messages, (*self.boundary_bytes, stream_bytes), strict=True)
        activation_bytes, gradient_bytes, logit_bytes, gathered_bytes, workspace_bytes = self._fullest_moment(
            pipeline, num_gradients * (gradient_bytes_each + sum_bytes), saved_bytes
        )
        return {
            "weights": self.elements("weights", pipeline) * width_of["weights"],
            "gradients": gradient_bytes,
            "optimizer": opt_bytes,
            "activations": activation_bytes,
            "logits": logit_bytes,
            "kv_cache": self.cache_bytes * layer_share * np.asarray(pipeline.microbatches) + 0.0 * workspace_bytes,
            "communication": sum((num_slots * slot_bytes for num_slots, slot_bytes in messages), start=gathered_bytes),
            "workspace": workspace_bytes + total(layer.retiled_bytes * share for layer, share in shares),
        }

    def _fullest_moment(self, pipeline: PipelineCost, gradient_bytes: Number, saved: Number) -> tuple[Number, ...]:
        """Returns the bytes of activations, gradients, logits, gathered weights and temporary results at the moment of
        their largest sum: while the head, the layers or the embedding run, or after all."""
        bytes_by_part, one_stage = STATE_BYTES[self.state], pipeline.in_lockstep & pipeline.is_one
        has_several = np.asarray(pipeline.microbatches) > 1
        shares, chunks = self._shares(pipeline), np.asarray(pipeline.chunks)
        pending = total(pipeline.pending_stash * share * layer.pending_bytes for layer, share in shares)
        running = total(layer.saved_bytes(share, pipeline.running_stash, chunks) for layer, share in shares)
        ends = self.shared_bytes + total(end.kept_bytes for end in self.ends)
        act_bytes, rerun = saved + pending + ends, total(layer.segment_bytes(share / chunks) for layer, share in shares)
        logits = pipeline.ends_held([block.logits_bytes for block in (*self.layers, *self.ends)]) + self.chunk_bytes
        zero, head_bytes, embed_bytes = 0.0 * logits, _most(self.ends[1:]), _most(self.ends[:1])
        all_grads = gradient_bytes + np.where(one_stage, self.tied_bytes, 0.0)
        # with one microbatch gradients are made after the head, and each is scattered at once
        head_moment = (act_bytes, np.where(one_stage & ~has_several, 0.0, gradient_bytes), logits, *head_bytes)
        gathered, working = _most(self.layers)
        # logits are freed before the layers' backward pass, layers' kept results before the embedding's
        layers_moment = (act_bytes + rerun + running, all_grads, zero, gathered, working + self._chunk_copies(pipeline))
        embedding_moment = (np.where(one_stage, ends, act_bytes), all_grads, zero, *embed_bytes)
        moments = [head_moment, layers_moment, embedding_moment]
        if self.on_cpus:
            # a microbatch adds all its gradients to a wide sum at its end; sums over replicas need further memory
            is_wide = bytes_by_part["gradients"] >= DTYPE_BYTES["fp32"]
            wide_bytes = one_stage * has_several * is_wide * self.elements("gradients", pipeline) * DTYPE_BYTES["fp32"]
            moments[1:] = [(kept_bytes, gradient + wide_bytes, *rest) for kept_bytes, gradient, *rest in moments[1:]]
            sum_bytes = self.elements("optimizer", pipeline) * bytes_by_part["gradients"] * pipeline.sums_last
            moments += [(zero, gradient_bytes + sum_bytes, zero, zero, zero)]
        return functools.reduce(_fuller, moments)

    def _chunk_copies(self, pipeline: PipelineCost) -> Number:
        """Returns the bytes of copies that one program of all stages holds besides whole arrays: weights of the running
        chunk, if a device has several chunks, and the chunk's gradients before they are added."""
        num_chunks, element_bytes = np.asarray(pipeline.chunks), STATE_BYTES[self.state]["weights"]
        num_elements = total(
            (layer.elements["weights"] * (num_chunks > 1) + layer.elements["gradients"]) * share / num_chunks
            for layer, share in self._shares(pipeline)
        )
        return np.where(pipeline.is_one | (not pipeline.in_lockstep), 0.0, num_elements * element_bytes)


def _fuller(figures: tuple[Number, ...], other_figures: tuple[Number, ...]) -> tuple[Number, ...]:
    """Returns, for each candidate, the tuple of figures with the larger sum."""
    is_larger = sum(other_figures) > sum(figures)
    return tuple(np.where(is_larger, theirs, figure) for figure, theirs in zip(figures, other_figures, strict=True))


def _most(blocks: tuple[BlockMemory, ...]) -> tuple[Number, Number]:
    """Returns the bytes of (gathered weights, temporary results) of the block with the largest sum of both."""
    gathered_bytes: Number = 0.0
    working_bytes: Number = 0.0
    for block in blocks:
        is_larger = block.gathered_bytes + block.working_bytes > gathered_bytes + working_bytes
        gathered_bytes = np.where(is_larger, block.gathered_bytes, gathered_bytes)
        working_bytes = np.where(is_larger, block.working_bytes, working_bytes)
    return gathered_bytes, working_bytes


def total_bytes(items: dict[str, Number]) -> Number:
    """Returns the sum of the items of `MemoryParts.items`."""
    return sum(items.values())


def memory_limit(cluster: Cluster, calibration: Calibration | None = None) -> float:
    """Returns the bytes that a program may fill on one chip; infinity for this machine if its memory is not known.
    Raises InputError for any other chip of unknown memory."""
    chip_calibration = calibration or datasheet_calibration(cluster.chip)
    try:
        return memory_bytes(cluster.chip, chip_calibration)
    except InputError:
        if cluster.kind == "host":
            return float("inf")
        raise
