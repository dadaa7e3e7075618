"""Memory of one chip in a step, itemised, from the declared shardings and the derived steps."""

import functools
from collections import Counter
from typing import Any

import msgspec
import numpy as np

from meshwright.algebra.derived import BlockSteps, Derived
from meshwright.algebra.notation import ShardedArray, product
from meshwright.algebra.ops import kind_of, op_kind
from meshwright.algebra.rewrites.split_backward import gradient_arrays, weights_of
from meshwright.algebra.sizes import Number, OpSizes, master_bytes, moment_bytes
from meshwright.algebra.steps import Step
from meshwright.algebra.transformer import MAX_WRITTEN_OUT, spans
from meshwright.core.dims import DTYPE_BYTES
from meshwright.core.errors import InputError
from meshwright.cost.arrays import largest, total
from meshwright.cost.generation_memory import (
    cache_bytes,
    copied_bytes,
    moves,
    scratch_bytes,
    stored_bytes,
    widened_results,
)
from meshwright.cost.pipeline import ONE_STAGE, PipelineCost
from meshwright.spec.calibration import Calibration, datasheet_calibration, memory_bytes
from meshwright.spec.cluster import Cluster, Topology
from meshwright.spec.strategy import STATE_BYTES

BUFFERED_REPEATS = 2
"""Repeats whose offloaded arrays are on the device: the running one and the one in transfer."""

MEMORY_MARGINS: dict[Topology, float] = {"torus": 0.05, "switched": 0.05, "host": 0.0}
"""Share of a chip's memory that listed plans leave free, on TPUs, GPUs and this machine: by so much compiled steps may
need more than is predicted. `benchmarks/verify.py` says how often they do (docs/proof.md)."""

STORED_ROWS = 8
"""Rows of the tiles in which TPUs store weights of 16 bits."""

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
        held = share * self.repeat
        return np.sqrt(held) if self.segment == "sqrt" else np.minimum(int(self.segment or 1), held)


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
        return total(one.elements[part] for one in self.layers) * share + pipeline.ends_held(
            [one.elements[part] for one in self.ends]
        )

    def optimizer_bytes(self, pipeline: PipelineCost) -> Number:
        """Returns the bytes of optimizer state that one chip updates: moments and, if there are any, master weights."""
        masters = self.elements("optimizer", pipeline) * master_bytes(self.state)
        return masters + self.elements("moments", pipeline) * moment_bytes(self.state)

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
        state, several = STATE_BYTES[self.state], np.asarray(pipeline.microbatches) > 1
        narrow = state["gradients"] < DTYPE_BYTES["fp32"]
        in_stages = pipeline.in_lockstep & ~pipeline.is_one
        accumulated = DTYPE_BYTES["fp32"] * (several | in_stages) * narrow
        # the first of two is no loop, and its gradients become the sum, if they are not scattered in every microbatch
        unscattered = self.elements("gradients", pipeline) > self.elements("optimizer", pipeline)
        of_two = pipeline.in_lockstep & pipeline.is_one & (np.asarray(pipeline.microbatches) == 2) & unscattered
        single = np.where((in_stages | of_two) & (accumulated > 0), 0.0, state["gradients"])
        share, stash, chunks = pipeline.share(self.num_layers), pipeline.stash, np.asarray(pipeline.chunks)
        optimizer = self.optimizer_bytes(pipeline)
        at_once = pipeline.in_lockstep & pipeline.is_one & ~several
        gradients = np.where(at_once, self.elements("optimizer", pipeline), self.elements("gradients", pipeline))
        saved, running = (
            total(layer.saved_bytes(share, count, chunks) for layer in self.layers)
            for count in (stash, pipeline.running_stash)
        )
        if "activations" in offload:
            saved = np.minimum(saved, BUFFERED_REPEATS * self.moved_bytes(pipeline))
        if "optimizer" in offload:
            optimizer = np.minimum(1.0, BUFFERED_REPEATS / pipeline.layers_held(self.num_layers)) * optimizer
        waiting = total(pipeline.pending_stash * share * layer.pending_bytes for layer in self.layers)
        ends = self.shared_bytes + total(end.kept_bytes for end in self.ends)
        streams = largest(layer.stream_bytes for layer in self.layers)
        messages = zip(pipeline.messages, (*self.boundary_bytes, streams), strict=True)
        gradients = gradients * (single + accumulated)
        retiled = total(layer.retiled_bytes for layer in self.layers) * share
        kept, again = saved + waiting + ends, total(layer.segment_bytes(share / chunks) for layer in self.layers)
        logits = pipeline.ends_held([one.logits_bytes for one in (*self.layers, *self.ends)]) + self.chunk_bytes
        alone = pipeline.in_lockstep & pipeline.is_one
        none, head, embed = 0.0 * logits, _most(self.ends[1:]), _most(self.ends[:1])
        whole = gradients + np.where(alone, self.tied_bytes, 0.0)
        # activations, gradients, logits, gathered weights and temporary results while the head, layers or embedding run
        of_head = (kept, np.where(at_once, 0.0, gradients), logits, *head)
        gathered, working = _most(self.layers)
        of_layers = (kept + again + running, whole, none, gathered, working + self._chunk_copies(pipeline))
        of_embedding = (np.where(alone, ends, kept), whole, none, *embed)
        phases = [of_head, of_layers, of_embedding]
        if self.on_cpus:
            # a microbatch adds its gradients to a wide sum when it has all; sums over replicas take memory of their own
            wide = alone * several * (not narrow) * self.elements("gradients", pipeline) * DTYPE_BYTES["fp32"]
            phases[1:] = [(held, more + wide, *rest) for held, more, *rest in phases[1:]]
            sums = self.elements("optimizer", pipeline) * state["gradients"] * pipeline.sums_last
            phases += [(none, gradients + sums, none, none, none)]
        activations, gradients, logits, gathered, workspace = functools.reduce(_fuller, phases)
        return {
            "weights": self.elements("weights", pipeline) * state["weights"],
            "gradients": gradients,
            "optimizer": optimizer,
            "activations": activations,
            "logits": logits,
            "kv_cache": self.cache_bytes * share * np.asarray(pipeline.microbatches) + 0.0 * workspace,
            "communication": sum((count * size for count, size in messages), start=gathered),
            "workspace": workspace + retiled,
        }

    def _chunk_copies(self, pipeline: PipelineCost) -> Number:
        """Returns the bytes of a run's weights, where a device has several, and of its gradients before they are added.
        One program of all stages holds them besides the whole arrays."""
        chunks, width = np.asarray(pipeline.chunks), STATE_BYTES[self.state]["weights"]
        parts = {part: total(one.elements[part] for one in self.layers) for part in ("weights", "gradients")}
        copies = parts["weights"] * (chunks > 1) + parts["gradients"]
        share = pipeline.share(self.num_layers) / chunks
        return np.where(pipeline.is_one | (not pipeline.in_lockstep), 0.0, copies * share * width)


def _fuller(one: tuple[Number, ...], other: tuple[Number, ...]) -> tuple[Number, ...]:
    """Returns the figures with the larger sum."""
    more = sum(other) > sum(one)
    return tuple(np.where(more, theirs, ours) for ours, theirs in zip(one, other, strict=True))


def _most(blocks: tuple[BlockMemory, ...]) -> tuple[Number, Number]:
    """Returns the bytes of (gathered weights, temporary results) of the block where their sum is largest."""
    gathered: Number = 0.0
    working: Number = 0.0
    for one in blocks:
        larger = one.gathered_bytes + one.working_bytes > gathered + working
        gathered = np.where(larger, one.gathered_bytes, gathered)
        working = np.where(larger, one.working_bytes, working)
    return gathered, working


def memory_parts(derived: Derived, sizes: OpSizes) -> MemoryParts:
    """Returns the parts of a chip's memory that do not depend on the schedule."""
    sizes = msgspec.structs.replace(sizes, padded=sizes.tile_rows > 0, cache={})
    elements = _state_elements(derived, sizes)
    blocks = [(block, _block_memory(block, derived, sizes, elements[block.name])) for block in derived.blocks]
    shared = (derived.shared[name] for name in dict.fromkeys(n for one in derived.program.stacks for n in one.inputs))
    local = (step for block in derived.blocks for step in block.forward if not step.is_collective)
    return MemoryParts(
        state=sizes.state,
        num_layers=derived.num_layers,
        layers=tuple(found for block, found in blocks if block.is_layer),
        ends=tuple(found for block, found in blocks if not block.is_layer),
        shared_bytes=total(sizes.total(one.given, one.cotangent) for one in shared),
        chunk_bytes=sum(kind_of(step).chunk_bytes(step, sizes) for step in local),
        tied_bytes=_tied_bytes(derived, sizes),
        boundary_bytes=tuple(
            total(sizes.bytes(s.result) for s in derived.boundary if s.op == "permute" and s.phase == phase)
            for phase in ("forward", "backward")
        ),
        cache_bytes=cache_bytes(derived, sizes),
        on_cpus=sizes.on_cpus,
    )


def total_bytes(items: dict[str, Number]) -> Number:
    """Returns the sum of the items of `MemoryParts.items`."""
    return sum(items.values())


def memory_limit(cluster: Cluster, calibration: Calibration | None = None) -> float:
    """Returns the bytes that a program may fill on one chip; infinity for this machine if its memory is not known."""
    measured = calibration or datasheet_calibration(cluster.chip)
    try:
        return memory_bytes(cluster.chip, measured)
    except InputError:
        if cluster.kind == "host":
            return float("inf")
        raise


def _trains(derived: Derived) -> bool:
    """True if there is a backward pass; steps that generate have none."""
    return any(block.backward for block in derived.blocks)


def _state_elements(derived: Derived, sizes: OpSizes) -> dict[str, dict[str, Number]]:
    """Maps a block to the elements per chip of each of `STATE_PARTS`.

    A weight of several blocks (tied embeddings) belongs to the last one. A frozen weight counts as weights alone: its
    bytes over the width of the state, as its dtype may differ.
    """
    owners = {name: block for block in derived.blocks for name in weights_of(derived, block)}
    found: dict[str, dict[str, Number]] = {block.name: dict.fromkeys(STATE_PARTS, 0.0) for block in derived.blocks}
    # a gradient is stored as it enters the collectives that run once per step, not scattered yet
    gradients, moments = gradient_arrays(derived), op_kind(derived.optimizer).moments
    for name, block in owners.items():
        declared = derived.declared[name]
        if weight := derived.weights.get(name):
            assert moments is not None
            arrays = ((declared,), (gradients[name],), (weight.shard,), moments(weight))
            counts = [sum(sizes.elements(array) for array in some) for some in arrays]
        else:
            counts = [stored_bytes(declared, sizes) / sizes.width]
        of_block = found[block.name]
        for part, count in zip(STATE_PARTS, counts, strict=False):
            of_block[part] = of_block[part] + block.repeat * count
    return found


def _tied_bytes(derived: Derived, sizes: OpSizes) -> Number:
    ends = (block for block in derived.blocks if not block.is_layer)
    used = Counter(name for block in ends for name in weights_of(derived, block) if name in derived.weights)
    gradients = gradient_arrays(derived)
    tied = [name for name, count in used.items() if count > 1]
    # which CPUs shard, or add to other gradients, only then
    later = total(sizes.elements(derived.weights[name].shard) for name in tied) if sizes.on_cpus else 0.0
    return (total(sizes.elements(gradients[name]) for name in tied) - later) * sizes.width


def _block_memory(block: BlockSteps, derived: Derived, sizes: OpSizes, elements: dict[str, Number]) -> BlockMemory:
    is_layer, trains = block.is_layer, _trains(derived)
    kept, logits = _kept_bytes(block, derived, sizes)
    retiled, sliced = _copied_weights(block, derived, sizes)
    if is_layer and trains and sizes.on_cpus:
        kept = kept + block.repeat * _turned_operands(block, derived, sizes) * _written_out(derived, sizes)
    # a pass gathers all weights of a repeat, without waiting until one is used
    gathers = {
        step.result: step for step in block.forward if step.op == "all_gather" and _is_weight(step.result, derived)
    }
    wide = _widening(sizes)
    gathered = {array: sizes.bytes(array) * moves(step, sizes) * wide for array, step in gathers.items() if trains}
    return BlockMemory(
        repeat=block.repeat,
        segment=block.segment,
        reruns=block.rerun is not None,
        elements=elements,
        kept_bytes=kept if trains or not is_layer else 0.0,
        logits_bytes=logits,
        pending_bytes=_pending_bytes(block, sizes) if trains else 0.0,
        stream_bytes=sizes.bytes(derived.declared[block.block.carry]) if trains and is_layer else 0.0,
        gathered_bytes=total(gathered.values()) + _turned_bytes(gathers, gathered, sizes),
        working_bytes=_working_set(block, derived, sizes)
        + sliced
        + (_copied_experts(block, derived, sizes) if trains else copied_bytes(block, derived, sizes)),
        retiled_bytes=retiled,
    )


def _copied_weights(block: BlockSteps, derived: Derived, sizes: OpSizes) -> tuple[Number, Number]:
    """Returns the bytes of second copies of a block's weights: (of all repeats, of one while it runs).

    TPUs whose tiles are larger than stored ones copy those of all repeats. CPUs copy a layer's out of the arrays of all
    layers, which without a loop are there from the forward to the backward pass, and of all layers in 16 bits before
    the loop, widened, unless each is gathered in it.
    """
    if sizes.tile_rows > STORED_ROWS:
        return block.repeat * _retiled_bytes(block, derived, sizes), 0.0
    if not (sizes.on_cpus and block.is_layer and _trains(derived)):
        return 0.0, 0.0
    alone, own = _written_out(derived, sizes), _retiled_bytes(block, derived, sizes)
    if sizes.width < DTYPE_BYTES["fp32"]:
        return block.repeat * own * _widening(sizes), 0.0
    return block.repeat * own * alone, own * (1 - alone)


def _widening(sizes: OpSizes) -> float:
    """Returns how much wider CPUs, which multiply in float32, hold gathered weights and temporary results."""
    return DTYPE_BYTES["fp32"] / sizes.width if sizes.on_cpus else 1


def _written_out(derived: Derived, sizes: OpSizes) -> Any:
    """1 where a CPU runs its layers without a loop (`parallel.passes`), else 0."""
    again = any(step.phase == "recompute" for block in derived.blocks if block.is_layer for step in block.backward)
    few = all(span.repeats <= MAX_WRITTEN_OUT for stack in derived.program.stacks for span in spans(stack.layers))
    loops = any(block.segment is not None for block in derived.blocks)
    return np.where(product(sizes.mesh.values()) == 1, 1.0, 0.0) * (few and not again and not loops)


def _turned_operands(block: BlockSteps, derived: Derived, sizes: OpSizes) -> Number:
    """Returns the bytes of a layer's kept operands of products for weight gradients, which CPUs transpose."""
    made = {array.name for array in gradient_arrays(derived).values()}
    products = (step for step in block.backward if not step.is_collective and step.result.name in made)
    read = dict.fromkeys(array for step in products for array in step.inputs if array in block.kept)
    return total(sizes.bytes(array) for array in read)


def _retiled_bytes(block: BlockSteps, derived: Derived, sizes: OpSizes) -> Number:
    """Returns the bytes of a layer's weights that no device gathers: loops read them in other tiles than their own."""
    gathers = {s.result.name: s for s in block.forward if s.op == "all_gather" and _is_weight(s.result, derived)}
    names = (name for name in weights_of(derived, block) if _role(derived.declared[name], derived) == "weight")
    return total(
        sizes.bytes(derived.declared[name]) * (1 - moves(gathers[name], sizes) if name in gathers else 1)
        for name in names
    )


def _copied_experts(block: BlockSteps, derived: Derived, sizes: OpSizes) -> Number:
    """Returns the bytes of a layer's experts that GPUs and CPUs copy for their loops: matrices that no device gathers,
    and with an exchange the gradients, to which those of further rounds are added."""
    if not (sizes.on_gpus or sizes.on_cpus):
        return 0.0
    experts = [name for name in weights_of(derived, block) if derived.declared[name].dims[0] == "E"]
    moved = {s.result.name: moves(s, sizes) for s in block.forward if s.op == "all_gather"}
    exchanged = largest(moves(step, sizes) for step in block.forward if step.op == "all_to_all")
    gradients = gradient_arrays(derived)
    return total(
        sizes.bytes(derived.declared[name]) * (1 - moved.get(name, 0)) + sizes.bytes(gradients[name]) * exchanged
        for name in experts
        if name in gradients
    )


def _turned_bytes(gathers: dict[ShardedArray, Step], gathered: dict[ShardedArray, Number], sizes: OpSizes) -> Number:
    """Returns the bytes of the largest weight that exists twice after its gather: one of experts while GPUs transpose
    it, and on TPUs one whose shards end within a tile."""
    if sizes.tile_rows:
        return largest(
            size * _ends_within_tiles(gathers[array].inputs[0], gathers[array], sizes)
            for array, size in gathered.items()
        )
    turned = (size for array, size in gathered.items() if array.dims[0] == "E" != gathers[array].dim)
    return largest(turned) if sizes.on_gpus else 0.0


def _ends_within_tiles(shard: ShardedArray, step: Step, sizes: OpSizes) -> Any:
    """True if a shard along the dim of a collective is no whole number of a TPU's tiles."""
    return sizes.local(shard)[step.dim] % STORED_ROWS != 0


def _scratch_bytes(step: Step, sizes: OpSizes) -> Number:
    """Returns the bytes of temporary memory of a step: its own, or copies of an array that TPUs scatter in whole tiles.
    A sum of scope "step" has its operand besides, which no step holds until then."""
    if not step.is_collective:
        return kind_of(step).scratch_bytes(step, sizes)
    if step.op != "reduce_scatter" or not sizes.tile_rows:
        return 0.0
    copies = _copies_of_scattered(step, sizes)
    return sizes.bytes(step.inputs[0]) * moves(step, sizes) * (copies + (step.scope == "step") * (copies > 0))


def _copies_of_scattered(step: Step, sizes: OpSizes) -> Number:
    """Returns how many copies of an array exist while TPUs scatter it: one where rows are added to its shards, one
    where several mesh axes fill the chips and are put into the order of the links, and one for both where shards have
    fewer rows than a tile."""
    within = _ends_within_tiles(step.result, step, sizes)
    counts = [np.asarray(sizes.mesh[axis]) for axis in step.axes]
    several = sum(count > 1 for count in counts) > 1
    fills = product(counts) == product(sizes.mesh.values())
    return np.where(sizes.local(step.result)[step.dim] < STORED_ROWS, 1.0, 1.0 * within + several * fills)


def _kept_bytes(block: BlockSteps, derived: Derived, sizes: OpSizes) -> tuple[Number, Number]:
    """Returns the bytes of kept results of all repeats: (all but logits, logits). Gathered weights do not count here.

    A gather or slice over one device returns its input, so its result counts only if there are several devices.
    Results that a backward step overwrites (the slopes of a fused head) count as its cotangents.
    """
    in_place = {step.inputs[0] for step in block.backward if not step.is_collective and kind_of(step).in_place}
    made = {array: step for step in block.forward for array in step.results}
    found: dict[bool, Number] = {False: 0.0, True: 0.0}
    for array in block.kept:
        is_logits = array.name == "logits"
        if _is_weight(array, derived) or (array in in_place and not is_logits):
            continue
        step, count = made.get(array), 1
        # its input is kept itself, or existed before the block ran
        if step and step.only_moves and (step.inputs[0] in block.kept or step.inputs[0] not in made):
            count = moves(step, sizes)
        found[is_logits] = found[is_logits] + sizes.bytes(array) * count
    return block.repeat * found[False], block.repeat * found[True]


def _pending_bytes(block: BlockSteps, sizes: OpSizes) -> Number:
    """Returns the bytes that all repeats keep from the pass for input gradients to the pass for weight gradients."""
    steps = {array: step for step in (*block.forward, *block.backward) for array in step.results}
    found, handed = 0.0, block.split.handed if block.split else ()
    for array in handed:
        step = steps.get(array)
        count = moves(step, sizes) if step and step.only_moves and step.inputs[0] in handed else 1
        found = found + sizes.bytes(array) * count
    return block.repeat * found


def _is_weight(array: ShardedArray, derived: Derived) -> bool:
    return _role(array, derived) in ("weight", "vector")


def _role(array: ShardedArray, derived: Derived) -> str:
    variable = derived.program.variables.get(array.name)
    return variable.role if variable else ""


class _Life(msgspec.Struct):
    """The steps between which a result is alive: made at ``start``, last used at ``end``.

    ``source`` is the collective or slice that made it; None for other steps.
    """

    start: int
    end: int
    source: Step | None = None


def _working_set(block: BlockSteps, derived: Derived, sizes: OpSizes) -> Number:
    """Returns the most bytes, at any step of the backward pass, of live results that no other item counts.

    Without a backward pass the forward pass counts. A result lives from the step that makes it to its last use. Scratch
    memory (attention's scores) counts at its step.
    """
    if block.rerun is not None:
        # layers that run again leave nothing but their stream
        parts = (block.backward[: block.num_again], block.backward[block.num_again :])
        alone = (msgspec.structs.replace(block, backward=steps, num_again=0, rerun=None) for steps in parts)
        return largest(_working_set(one, derived, sizes) for one in alone)
    steps = block.backward if _trains(derived) else block.forward
    changes: list[list[Number]] = [[] for _ in range(len(steps) + 1)]
    lives = _lives(steps, block, derived)
    if sizes.tile_rows:
        _until_rows_are_back(lives, steps, derived)
    if sizes.on_cpus and _trains(derived):
        _until_products_run(lives, steps, derived)
    logits = next(
        (s for s in steps if not s.is_collective and kind_of(s).in_place and s.inputs[0].name == "logits"), None
    )
    held = _held_cotangent(logits, sizes) if logits else 1
    widened = {} if _trains(derived) else widened_results(steps, sizes)
    wide = _widening(sizes) if _trains(derived) else 1
    for array, life in lives.items():
        # capped logits are made in float32, of which the cotangent is a part, wherever it is made
        share = held if logits and array == logits.result and not logits.details.softcap else 1
        share = share * widened.get(array, 1 if array.dtype else wide)
        for number, amount in _comes_and_goes(array, life, lives, sizes):
            changes[number].append(amount * share)
    if logits:
        # which another item counts; their cotangent takes their place
        changes[steps.index(logits) + 1].append(-sizes.bytes(logits.inputs[0]) * held)
    alive: Number = 0.0
    most: Number = 0.0
    for step, amounts in zip(steps, changes, strict=False):
        for amount in amounts:
            alive = alive + amount
        scratch = _scratch_bytes(step, sizes) if _trains(derived) else scratch_bytes(step, sizes)
        most = np.maximum(most, alive + scratch)
    return most


def _until_rows_are_back(lives: dict[ShardedArray, "_Life"], steps: tuple[Step, ...], derived: Derived) -> None:
    """Extends the lives of what experts' gradients are computed from to the last exchange of rows, which TPUs run
    first."""
    exchanges = [number for number, step in enumerate(steps) if step.op == "all_to_all"]
    gradients = {array.name for array in gradient_arrays(derived).values()}
    for step in steps[: exchanges[-1]] if exchanges else ():
        if step.result.name in gradients and not step.is_collective:
            for array in step.inputs:
                if array in lives:
                    lives[array].end = max(lives[array].end, exchanges[-1])


def _until_products_run(lives: dict[ShardedArray, "_Life"], steps: tuple[Step, ...], derived: Derived) -> None:
    """Extends the lives of operands of products for weight gradients to the next step that is no product: CPUs run
    first what more steps wait for."""
    gradients = {array.name for array in gradient_arrays(derived).values()}
    until = len(steps) - 1
    for number, step in reversed([(number, step) for number, step in enumerate(steps) if not step.is_collective]):
        if not kind_of(step).is_einsum:
            until = number
        elif step.result.name in gradients:
            for array in lives.keys() & {*step.inputs}:
                lives[array].end = max(lives[array].end, until)


def _held_cotangent(step: Step, sizes: OpSizes) -> Number:
    """Returns 1 where the cotangent of the logits is held beside them, else 0.

    As wide as they are, it takes their memory, but on CPUs. TPUs make it inside the products that read it, but where a
    device has only one sequence.
    """
    if sizes.on_cpus:
        return 1.0
    if sizes.width == DTYPE_BYTES["fp32"]:
        return 0.0
    return np.where(sizes.local(step.inputs[0])["B"] > 1, 0.0, 1.0) if sizes.tile_rows else 1.0


def _comes_and_goes(
    array: ShardedArray, life: _Life, lives: dict[ShardedArray, _Life], sizes: OpSizes
) -> list[tuple[int, Number]]:
    """Returns (step number, change of bytes): from that step on a result counts, or no longer counts.

    A collective or slice over one device is an alias: its result counts only after the last use of its input.
    """
    size = sizes.bytes(array)
    if life.source is None:
        return [(life.start, size), (life.end + 1, -size)]
    moved = size * moves(life.source, sizes)
    source = lives.get(life.source.inputs[0])
    if source is None or source.end >= life.end:
        return [(life.start, moved), (life.end + 1, -moved)]
    return [(life.start, moved), (source.end + 1, size - moved), (life.end + 1, -size)]


def _lives(steps: tuple[Step, ...], block: BlockSteps, derived: Derived) -> dict[ShardedArray, _Life]:
    """Returns the temporary results of a pass; weights, caches, kept results and sums of gradients count elsewhere.

    Training gathers the weights of a whole repeat ahead, which `BlockMemory.gathered_bytes` counts; a forward pass
    alone gathers each weight for its product, which counts here.
    """
    shared = (derived.shared[name] for name in derived.program.inputs_from_earlier_stacks(block.name))
    held = {*block.kept, *(array for one in shared for array in (one.given, one.cotangent))}
    elsewhere = {*held, *(derived.declared.values() if _trains(derived) else ())}

    def is_state(array: ShardedArray) -> bool:
        given = _trains(derived) or array == derived.declared.get(array.name)
        return _role(array, derived) == "cache" or (given and _is_weight(array, derived))

    lives: dict[ShardedArray, _Life] = {}
    for number, step in enumerate(steps):
        if step.scope == "step":
            continue
        for array in step.inputs:
            if array in lives:
                lives[array].end = number
            elif array not in elsewhere and not is_state(array):
                lives[array] = _Life(0, number)  # the cotangent or the stream that enters the block
        for array in step.results:
            if array not in lives and array not in held and not is_state(array):
                moves = step.only_moves
                lives[array] = _Life(number, number, step if moves else None)
    return lives
