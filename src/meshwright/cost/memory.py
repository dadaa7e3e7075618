"""Memory of one chip in a step, itemised, from the declared shardings and the derived steps."""

from typing import Any

import msgspec
import numpy as np

from meshwright.algebra.derived import BlockSteps, Derived
from meshwright.algebra.notation import ShardedArray, product
from meshwright.algebra.ops import kind_of, op_kind
from meshwright.algebra.ops.cached_attention import slots_kept
from meshwright.algebra.rewrites.split_backward import gradient_arrays
from meshwright.algebra.sizes import OpSizes, master_bytes, moment_bytes
from meshwright.algebra.steps import Phase, Step
from meshwright.core.dims import DTYPE_BYTES
from meshwright.core.errors import InputError
from meshwright.cost.pipeline import ONE_STAGE, Pipeline
from meshwright.cost.work.slots import slots_move, with_room
from meshwright.spec.calibration import Calibration, datasheet_calibration, memory_bytes
from meshwright.spec.cluster import Cluster
from meshwright.spec.strategy import STATE_BYTES

Number = Any
"""A float, or a NumPy array with one entry per candidate."""

BUFFERED_REPEATS = 2
"""Repeats whose part of what is offloaded is on the device: the one at work and the one on its way."""

ITEMS = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "kv_cache",
    "communication",
    "workspace",
)


def training_memory(
    derived: Derived, sizes: OpSizes, *, num_microbatches: Number, pipeline: Pipeline = ONE_STAGE, offload: Any = ()
) -> dict[str, Number]:
    """Bytes per chip of each item; their sum is what must fit. See `MemoryParts.items`."""
    return memory_parts(derived, sizes).items(num_microbatches=num_microbatches, pipeline=pipeline, offload=offload)


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """Results that all repeats of one block of layers keep for one microbatch, and the stream that enters a repeat.

    ``handed_bytes`` is what the gradients of weights wait for where they have a pass of their own.
    """

    kept_bytes: Number
    handed_bytes: Number
    stream_bytes: Number
    repeat: int
    segment: int | str | None

    def saved_bytes(self, share: Number, stash: Number) -> Number:
        """Bytes from the forward pass to the backward, on a device with a share of the repeats, for ``stash``
        microbatches in flight: the results of every repeat or, where segments are run again, what enters each."""
        return stash * share * self.repeat * self.moved_bytes(share)

    def waiting_bytes(self, share: Number, handed: Number) -> Number:
        """Bytes from a backward pass to the pass of its weights' gradients, for ``handed`` microbatches that wait."""
        return handed * share * self.handed_bytes

    def moved_bytes(self, share: Number) -> Number:
        """The same of one repeat and one microbatch."""
        return (
            self.kept_bytes / self.repeat if self.segment is None else self.stream_bytes / self.segment_repeats(share)
        )

    def segment_bytes(self, share: Number) -> Number:
        """All results of the segment that is run again, while its backward pass lasts."""
        return 0.0 if self.segment is None else self.kept_bytes / self.repeat * self.segment_repeats(share)

    def segment_repeats(self, share: Number) -> Number:
        """Repeats from one kept input to the next, of those that a device holds."""
        held = share * self.repeat
        return np.sqrt(held) if self.segment == "sqrt" else np.minimum(int(self.segment or 1), held)


class Passing(msgspec.Struct, frozen=True, kw_only=True):
    """What one block needs while it runs and no longer: whole weights of a repeat, and results on their way."""

    is_layer: bool
    gathered_bytes: Number
    working_bytes: Number


class MemoryParts(msgspec.Struct, frozen=True, kw_only=True):
    """What one chip holds, before layers are shared out over a pipeline: computed once, for any schedule.

    ``layers`` and ``ends`` are elements of weights, gradients and optimizer in the layers, and in embedding and head.
    ``cache_bytes`` are keys and values of all layers, in a step that generates.
    """

    state: str
    num_layers: int
    layers: dict[str, Number]
    ends: dict[str, list[Number]]
    kept: tuple[Kept, ...]
    kept_ends_bytes: Number
    logits_bytes: list[Number]
    chunk_bytes: Number
    boundary_bytes: list[Number]
    passing: tuple[Passing, ...]
    cache_bytes: Number = 0.0

    def moved_bytes(self, pipeline: Pipeline) -> Number:
        """What one repeat of the layers leaves for the backward pass of one microbatch; the most where they differ."""
        return _largest(one.moved_bytes(pipeline.share(self.num_layers)) for one in self.kept)

    def elements(self, part: str, pipeline: Pipeline) -> Number:
        """Elements of weights, gradients or optimizer on the fullest device."""
        share = pipeline.share(self.num_layers) * pipeline.copies(part)
        return self.layers[part] * share + pipeline.ends(self.ends[part])

    def optimizer_bytes(self, pipeline: Pipeline) -> Number:
        """Optimizer state that one chip updates: master weights, where the state has them, and moments."""
        moment = moment_bytes(self.state)
        master = master_bytes(self.state)
        return self.elements("optimizer", pipeline) * master + self.elements("moments", pipeline) * moment

    def items(
        self, *, num_microbatches: Number, pipeline: Pipeline = ONE_STAGE, offload: Any = ()
    ) -> dict[str, Number]:
        """Bytes per chip of each item.

        weights, gradients, optimizer: bytes per parameter of the state; with several microbatches the sum of the
        gradients is a further float32 copy unless they are that wide already, and in stages of one program the only
        one: what a stage leaves is added to it at once. One program without stages brings the gradients of its only
        microbatch to the optimizer's shards layer by layer, and holds those. activations: results kept for the
        backward pass of every microbatch in flight. The others are of the block that needs the most while it runs, a
        layer or an end. logits: those kept, or one chunk of them with its cotangent; none while a layer runs.
        communication: the gathered weights of one repeat, and the buffers between stages. workspace: the largest set of
        passing results alive at once in the backward pass of one repeat.
        Of a pipeline the fullest device is taken to have the longest run of layers, the most microbatches in flight
        and what `Pipeline.ends` says of embedding and head. What is offloaded leaves the buffers of two repeats behind.
        """
        state = STATE_BYTES[self.state]
        narrow = state["gradients"] < DTYPE_BYTES["fp32"]
        accumulated = DTYPE_BYTES["fp32"] * (np.asarray(num_microbatches) > 1) * narrow
        single = np.where(pipeline.in_lockstep & ~pipeline.is_one & (accumulated > 0), 0.0, state["gradients"])
        share, stash = pipeline.share(self.num_layers), pipeline.stash + pipeline.in_hand
        optimizer = self.optimizer_bytes(pipeline)
        at_once = pipeline.in_lockstep & pipeline.is_one & (np.asarray(num_microbatches) == 1)
        elements = np.where(at_once, self.elements("optimizer", pipeline), self.elements("gradients", pipeline))
        saved = sum(one.saved_bytes(share, stash) for one in self.kept)
        if "activations" in offload:
            saved = np.minimum(saved, BUFFERED_REPEATS * self.moved_bytes(pipeline))
        if "optimizer" in offload:
            optimizer = np.minimum(1.0, BUFFERED_REPEATS / pipeline.layers_held(self.num_layers)) * optimizer
        waiting = sum(one.waiting_bytes(share, pipeline.handed) for one in self.kept)
        streams = _largest(one.stream_bytes for one in self.kept)
        messages = zip(pipeline.messages, (*self.boundary_bytes, streams), strict=True)
        at_peak = self.at_peak(pipeline)
        return {
            "weights": self.elements("weights", pipeline) * state["weights"],
            "gradients": elements * (single + accumulated),
            "optimizer": optimizer,
            "activations": sum(
                (one.segment_bytes(share) for one in self.kept), start=saved + waiting + self.kept_ends_bytes
            ),
            "logits": at_peak["logits"],
            "kv_cache": self.cache_bytes + 0.0 * at_peak["workspace"],
            "communication": sum((count * size for count, size in messages), start=at_peak["gathered"]),
            "workspace": at_peak["workspace"],
        }

    def at_peak(self, pipeline: Pipeline) -> dict[str, Number]:
        """Logits, gathered weights and passing results of the block that needs the most of them while it runs."""
        logits = pipeline.ends(self.logits_bytes) + self.chunk_bytes
        layer, end = (_most([one for one in self.passing if one.is_layer is of_layer]) for of_layer in (True, False))
        in_end = logits + sum(end) > sum(layer)
        return {
            "logits": np.where(in_end, logits, 0.0 * logits),
            "gathered": np.where(in_end, end[0], layer[0]),
            "workspace": np.where(in_end, end[1], layer[1]),
        }


def _most(blocks: list[Passing]) -> tuple[Number, Number]:
    """(gathered weights, passing results) of the block where their sum is largest."""
    gathered: Number = 0.0
    working: Number = 0.0
    for one in blocks:
        larger = one.gathered_bytes + one.working_bytes > gathered + working
        gathered, working = (
            np.where(larger, one.gathered_bytes, gathered),
            np.where(larger, one.working_bytes, working),
        )
    return gathered, working


def memory_parts(derived: Derived, sizes: OpSizes) -> MemoryParts:
    """The parts of a chip's memory that do not depend on the schedule."""
    sizes = with_room(sizes, slots_move(derived, sizes.mesh))
    layers, ends = _state_elements(derived, sizes) if _trains(derived) else _given_elements(derived, sizes)
    blocks, zero = derived.blocks, _zero(sizes)
    kept = {block.block.name: _kept_bytes(block, derived, sizes, logits=False) for block in blocks}
    return MemoryParts(
        state=sizes.state,
        num_layers=derived.num_layers,
        layers=layers,
        ends=ends,
        kept=tuple(
            Kept(
                kept_bytes=kept[block.block.name],
                handed_bytes=_handed_bytes(block, derived, sizes),
                stream_bytes=sizes.bytes(derived.declared[block.block.carry]),
                repeat=block.repeat,
                segment=block.segment,
            )
            for block in blocks
            if block.block.carry and _trains(derived)
        ),
        kept_ends_bytes=sum(
            (kept[block.block.name] for block in blocks if not block.block.carry), start=_further_bytes(derived, sizes)
        ),
        logits_bytes=[_kept_bytes(block, derived, sizes, logits=True) for block in blocks],
        chunk_bytes=_chunk_bytes(derived, sizes),
        boundary_bytes=[_boundary_bytes(derived, sizes, phase) + zero for phase in ("forward", "backward")],
        passing=tuple(
            Passing(
                is_layer=bool(block.block.carry),
                gathered_bytes=_gathered_bytes(block, derived, sizes) + zero if _trains(derived) else zero,
                working_bytes=_working_set(block, derived, sizes) + zero,
            )
            for block in blocks
        ),
        cache_bytes=_cache_bytes(derived, sizes),
    )


def total_bytes(items: dict[str, Number]) -> Number:
    """The sum of the items."""
    return sum(items.values())


def memory_limit(cluster: Cluster, calibration: Calibration | None = None) -> float:
    """Bytes that a program may fill on one chip; infinity for a machine whose memory is not known."""
    measured = calibration or datasheet_calibration(cluster.chip)
    try:
        return memory_bytes(cluster.chip, measured)
    except InputError:
        if cluster.kind == "host":
            return float("inf")
        raise


def _state_elements(derived: Derived, sizes: OpSizes) -> tuple[dict[str, Number], dict[str, list[Number]]]:
    """Elements per chip of weights, their gradients and what the optimizer updates: in all layers, and in each end."""
    blocks = {name: block for block in derived.blocks for op in block.block.ops for name in op.inputs}
    # a gradient is held as it enters the collectives that run once per step, whole where they scatter it
    gradients = gradient_arrays(derived)
    layers: dict[str, Number] = dict.fromkeys(("weights", "gradients", "optimizer", "moments"), _zero(sizes))
    ends: dict[str, dict[str, Number]] = {part: {} for part in layers}
    moments = op_kind(derived.optimizer).moments
    assert moments is not None
    for name, weight in derived.weights.items():
        block = blocks[name]
        arrays = ((derived.declared[name],), (gradients[name],), (weight.shard,), moments(weight))
        for part, found in zip(layers, arrays, strict=True):
            size = block.repeat * sum(sizes.elements(array) for array in found)
            if block.block.carry:
                layers[part] = layers[part] + size
            else:
                ends[part][block.block.name] = ends[part].get(block.block.name, 0.0) + size
    return layers, {part: list(found.values()) for part, found in ends.items()}


def _trains(derived: Derived) -> bool:
    """Whether there is a backward pass; the programs of generation have none."""
    return any(block.backward for block in derived.blocks)


def _given_elements(derived: Derived, sizes: OpSizes) -> tuple[dict[str, Number], dict[str, list[Number]]]:
    """Elements of weights in a step without an optimizer; those of another width count by their bytes."""
    blocks = {name: block for block in derived.blocks for op in block.block.ops for name in op.inputs}
    layers, ends = _zero(sizes), dict[str, Number]()
    for name, block in blocks.items():
        if _is_weight(name, derived):
            size = block.repeat * sizes.bytes(derived.declared[name]) / sizes.width
            if block.block.carry:
                layers = layers + size
            else:
                ends[block.block.name] = ends.get(block.block.name, 0.0) + size
    absent = ("gradients", "optimizer", "moments")
    found = {"weights": list(ends.values()), **{part: list[Number]() for part in absent}}
    return {"weights": layers, **dict.fromkeys(absent, _zero(sizes))}, found


def _cache_bytes(derived: Derived, sizes: OpSizes) -> Number:
    """Keys and values of all layers; what a step writes takes the place of what it was given."""
    total = _zero(sizes)
    for block in derived.blocks:
        made = {op.out for op in block.block.ops}
        read = dict.fromkeys(name for op in block.block.ops for name in op.inputs if name not in made)
        caches = [derived.declared[name] for name in read if _has_role(name, derived, "cache")]
        windows = [int(value) for op in block.block.ops for name, value in op.attributes if name == "window"]
        ring = slots_kept(sizes.dims["S"], windows[0]) / sizes.dims["S"] if caches and windows else 1.0
        total = total + block.repeat * ring * sizes.total(*caches)
    return total


def _kept_bytes(block: BlockSteps, derived: Derived, sizes: OpSizes, *, logits: bool) -> Number:
    """Kept results of all repeats: the logits, or all the others. Gathered weights count as communication.

    What is gathered or sliced over one device is the array it came from, so it counts only where there are several.
    Of a head with joined passes, slopes become cotangents in place and count as those.
    """
    in_place = {step.inputs[0] for step in block.backward if not step.is_collective and kind_of(step).in_place}
    made = {array: step for step in block.forward for array in (step.result, *step.more)}
    total = _zero(sizes)
    for array in block.kept:
        if array.name != "logits" and array in in_place:
            continue
        if (array.name == "logits") == logits and not _is_weight(array.name, derived):
            step = made.get(array)
            if step and step.only_moves and _is_there(step.inputs[0], block, made):
                total = total + sizes.bytes(array) * _moves(step, sizes)
            else:
                total = total + sizes.bytes(array)
    return block.repeat * total


def _further_bytes(derived: Derived, sizes: OpSizes) -> Number:
    """What layers read of earlier stacks, once for all of them, and the sum of its cotangents."""
    names = dict.fromkeys(name for stack in derived.program.stacks for name in stack.inputs)
    shared = (derived.shared[name] for name in names)
    return sum((sizes.total(one.given, one.cotangent) for one in shared), start=_zero(sizes))


def _handed_bytes(block: BlockSteps, derived: Derived, sizes: OpSizes) -> Number:
    """What all repeats hand from the gradients of their inputs to those of their weights."""
    steps = {array: step for step in (*block.forward, *block.backward) for array in (step.result, *step.more)}
    total, handed = _zero(sizes), block.split.handed if block.split else ()
    for array in handed:
        step = steps.get(array)
        moved = step is not None and step.only_moves and step.inputs[0] in handed
        total = total + sizes.bytes(array) * (_moves(step, sizes) if step is not None and moved else 1)
    return block.repeat * total


def _boundary_bytes(derived: Derived, sizes: OpSizes, phase: Phase) -> Number:
    """What stages send each other one way, for one microbatch."""
    return sum(sizes.bytes(s.result) for s in derived.boundary if s.op == "permute" and s.phase == phase)


def _is_there(array: ShardedArray, block: BlockSteps, made: dict[ShardedArray, Step]) -> bool:
    """Whether an array is kept itself, or was there before the block ran."""
    return array in block.kept or array not in made


def _chunk_bytes(derived: Derived, sizes: OpSizes) -> Number:
    """Logits of one chunk and their cotangent, where the loss head is chunked; else 0."""
    steps = (step for block in derived.blocks for step in block.forward if not step.is_collective)
    return sum(kind_of(step).chunk_bytes(step, sizes) for step in steps)


def _is_weight(name: str, derived: Derived) -> bool:
    return _has_role(name, derived, "weight", "vector")


def _has_role(name: str, derived: Derived, *roles: str) -> bool:
    variable = derived.program.variables.get(name)
    return variable is not None and variable.role in roles


def _moves(step: Step, sizes: OpSizes) -> Any:
    """1 where the collective's group has several devices, else 0: then its result is its input."""
    return product(sizes.mesh[axis] for axis in step.axes) > 1


def _gathered_bytes(block: BlockSteps, derived: Derived, sizes: OpSizes) -> Number:
    """Whole weights of one repeat, all at once: a pass does not wait for one to be used before the next."""
    gathers = {
        step.result: step for step in block.forward if step.op == "all_gather" and _is_weight(step.result.name, derived)
    }
    return sum((sizes.bytes(array) * _moves(step, sizes) for array, step in gathers.items()), start=_zero(sizes))


class _Life(msgspec.Struct):
    """The steps between which a result is alive: made at ``start``, last used at ``end``.

    ``source`` is the step when a collective or slice made it.
    """

    start: int
    end: int
    source: Step | None = None


def _working_set(block: BlockSteps, derived: Derived, sizes: OpSizes) -> Number:
    """Largest sum, over the steps of the backward pass, of results alive that no other item counts.

    Of a step without one, over those of the forward pass. A result lives from the step that makes it to its last use;
    only the cotangent of the logits is taken to be made in place. What exists only while a step runs (attention's
    scores in memory) is counted in that step.
    """
    steps = block.backward if _trains(derived) else block.forward
    changes: list[list[Number]] = [[] for _ in range(len(steps) + 1)]
    lives = _lives(steps, block, derived)
    for step in steps:
        if not step.is_collective and kind_of(step).in_place and step.inputs[0].name == "logits":
            lives.pop(step.result)  # it takes the memory of the logits, which nothing reads afterwards
    for array, life in lives.items():
        for number, amount in _comes_and_goes(array, life, lives, sizes):
            changes[number].append(amount)
    alive, largest = _zero(sizes), _zero(sizes)
    for step, amounts in zip(steps, changes, strict=False):
        for amount in amounts:
            alive = alive + amount
        scratch = 0.0 if step.is_collective else kind_of(step).scratch_bytes(step, sizes)
        largest = np.maximum(largest, alive + scratch)
    return largest


def _comes_and_goes(
    array: ShardedArray, life: _Life, lives: dict[ShardedArray, _Life], sizes: OpSizes
) -> list[tuple[int, Number]]:
    """(step, bytes) before which a result begins and ceases to count.

    Moved over one device it is its source: it counts only from where the source would have gone.
    """
    size = sizes.bytes(array)
    if life.source is None:
        return [(life.start, size), (life.end + 1, -size)]
    moved = size * _moves(life.source, sizes)
    source = lives.get(life.source.inputs[0])
    if source is None or source.end >= life.end:
        return [(life.start, moved), (life.end + 1, -moved)]
    return [(life.start, moved), (source.end + 1, size - moved), (life.end + 1, -size)]


def _lives(steps: tuple[Step, ...], block: BlockSteps, derived: Derived) -> dict[ShardedArray, _Life]:
    """The passing results of a pass; weights, caches, kept results and sums of gradients count elsewhere.

    Training gathers the weights of a whole repeat ahead; a forward pass alone gathers each for its product.
    """
    shared = (derived.shared[name] for name in derived.program.further(block.block.name))
    held = {*block.kept, *(array for one in shared for array in (one.given, one.cotangent))}
    elsewhere = {*held, *(derived.declared.values() if _trains(derived) else ())}

    def is_state(array: ShardedArray) -> bool:
        given = _trains(derived) or array == derived.declared.get(array.name)
        return _has_role(array.name, derived, "cache") or (given and _is_weight(array.name, derived))

    lives: dict[ShardedArray, _Life] = {}
    for number, step in enumerate(steps):
        if step.scope == "step":
            continue
        for array in step.inputs:
            if array in lives:
                lives[array].end = number
            elif array not in elsewhere and not is_state(array):
                lives[array] = _Life(0, number)  # the cotangent or the stream that the block is given
        for array in (step.result, *step.more):
            if array not in lives and array not in held and not is_state(array):
                moves = step.only_moves
                lives[array] = _Life(number, number, step if moves else None)
    return lives


def _zero(sizes: OpSizes) -> Number:
    """Zero in the shape of the candidates."""
    return 0.0 * (sizes.dims["B"] + product(sizes.mesh.values()))


def _largest(values: Any) -> Number:
    result: Number = 0.0
    for value in values:
        result = np.maximum(result, value)
    return result
