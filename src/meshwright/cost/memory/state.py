"""What a chip stores in a step, and what each block keeps, read off the declared shardings and the derived steps."""

from collections import Counter

import msgspec

from meshwright.algebra.derived import BlockSteps, Derived
from meshwright.algebra.ops import kind_of
from meshwright.algebra.program import WEIGHTS
from meshwright.algebra.rewrites.split_backward import gradient_arrays, state_of_layer, weight_updates, weights_of
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.cost.arrays import total
from meshwright.cost.memory.chip import STATE_PARTS, BlockMemory, MemoryParts
from meshwright.cost.memory.copies import (
    copied_experts,
    copied_gathers,
    copied_weights,
    is_weight,
    trains_in,
    transposed_operands,
    widening,
    written_out,
)
from meshwright.cost.memory.generation import cache_bytes, copied_bytes, moves, stored_bytes
from meshwright.cost.memory.working_set import working_set


def memory_parts(derived: Derived, sizes: OpSizes) -> MemoryParts:
    """Returns the parts of a chip's memory, for any schedule."""
    # TPUs store arrays in whole tiles; the bytes in the old cache have no padding
    sizes = msgspec.structs.replace(sizes, padded=sizes.tile_rows > 0, cache={})
    elements_of = _state_elements(derived, sizes)
    memories = [(block, _block_memory(block, derived, sizes, elements_of[block.name])) for block in derived.blocks]
    local_steps = (step for block in derived.blocks for step in block.forward if not step.is_collective)
    return MemoryParts(
        state=sizes.state,
        num_layers=derived.num_layers,
        layers=tuple(memory for block, memory in memories if block.is_layer),
        ends=tuple(memory for block, memory in memories if not block.is_layer),
        shared_bytes=total(sizes.total(result.given, result.cotangent) for result in derived.shared.values()),
        chunk_bytes=sum(kind_of(step).chunk_bytes(step, sizes) for step in local_steps),
        tied_bytes=_tied_bytes(derived, sizes),
        boundary_bytes=tuple(
            total(sizes.bytes(s.result) for s in derived.boundary if s.op == "permute" and s.phase == phase)
            for phase in ("forward", "backward")
        ),
        cache_bytes=cache_bytes(derived, sizes),
        on_cpus=sizes.on_cpus,
    )


def _state_elements(derived: Derived, sizes: OpSizes) -> dict[str, dict[str, Number]]:
    """Maps a block to the elements per chip of each of `STATE_PARTS`.

    A weight of several blocks (tied embeddings) belongs to the last one. A frozen weight has only elements of weights:
    its bytes over the width of the state, as its dtype may differ.
    """
    block_by_weight = {name: block for block in derived.blocks for name in weights_of(derived, block)}
    elems_of: dict[str, dict[str, Number]] = {block.name: dict.fromkeys(STATE_PARTS, 0.0) for block in derived.blocks}
    # a gradient is stored in the sharding before the collectives that run once per step
    grad_of, update_of = gradient_arrays(derived), weight_updates(derived)
    for name, block in block_by_weight.items():
        full_array = derived.declared[name]
        if weight := derived.weights.get(name):
            arrays = ((full_array,), (grad_of[name],), (weight.shard,), state_of_layer(weight, update_of[name].update))
            part_elements = [sum(sizes.elements(array) for array in part_arrays) for part_arrays in arrays]
        else:
            part_elements = [stored_bytes(full_array, sizes) / sizes.width]
        elements_by_part = elems_of[block.name]
        for part, num_elements in zip(STATE_PARTS, part_elements, strict=False):
            elements_by_part[part] = elements_by_part[part] + block.repeat * num_elements
    repeat_of = {name: block.repeat for block in derived.beside for name in block.reads}
    weight_names = (variable.name for variable in derived.program.of_role(*WEIGHTS))
    for name in (name for name in weight_names if name in repeat_of and name not in block_by_weight):
        # the last block is the head, whose weights no pipeline divides
        last_elements = elems_of[derived.blocks[-1].name]
        num_elements = stored_bytes(derived.declared[name], sizes) / sizes.width
        last_elements["weights"] = last_elements["weights"] + repeat_of[name] * num_elements
    return elems_of


def _tied_bytes(derived: Derived, sizes: OpSizes) -> Number:
    end_blocks = (block for block in derived.blocks if not block.is_layer)
    num_uses = Counter(name for block in end_blocks for name in weights_of(derived, block) if name in derived.weights)
    gradient_of = gradient_arrays(derived)
    tied_names = [name for name, n in num_uses.items() if n > 1]
    # CPUs shard these, or add them to other gradients, only at the last use
    num_deferred = total(sizes.elements(derived.weights[name].shard) for name in tied_names) if sizes.on_cpus else 0.0
    return (total(sizes.elements(gradient_of[name]) for name in tied_names) - num_deferred) * sizes.width


def _block_memory(block: BlockSteps, derived: Derived, sizes: OpSizes, elements_of: dict[str, Number]) -> BlockMemory:
    is_layer, trains = block.is_layer, trains_in(derived)
    act_bytes, logit_bytes = _kept_bytes(block, derived, sizes)
    retiled_bytes, sliced_bytes = copied_weights(block, derived, sizes)
    if is_layer and trains and sizes.on_cpus:
        # without a loop over layers XLA transposes them in the forward pass already
        act_bytes = act_bytes + block.repeat * transposed_operands(block, derived, sizes) * written_out(derived, sizes)
    # a pass gathers all weights of a repeat at its start
    gather_of = {
        step.result: step for step in block.forward if step.op == "all_gather" and is_weight(step.result, derived)
    }
    factor = widening(sizes)
    bytes_of = {array: sizes.bytes(array) * moves(step, sizes) * factor for array, step in gather_of.items() if trains}
    return BlockMemory(
        name=block.name,
        repeat=block.repeat,
        segment=block.segment,
        reruns=block.rerun is not None,
        elements=elements_of,
        kept_bytes=act_bytes if trains or not is_layer else 0.0,
        logits_bytes=logit_bytes,
        pending_bytes=_pending_bytes(block, sizes) if trains else 0.0,
        stream_bytes=sizes.bytes(derived.declared[block.block.carry]) if trains and is_layer else 0.0,
        gathered_bytes=total(bytes_of.values()) + copied_gathers(gather_of, bytes_of, sizes),
        working_bytes=working_set(block, derived, sizes)
        + sliced_bytes
        + (copied_experts(block, derived, sizes) if trains else copied_bytes(block, derived, sizes)),
        retiled_bytes=retiled_bytes,
    )


def _kept_bytes(block: BlockSteps, derived: Derived, sizes: OpSizes) -> tuple[Number, Number]:
    """Returns the bytes of kept results of all repeats: (all but logits, logits), without gathered weights.

    A gather or slice over one device returns its input, so its result counts only if there are several devices. Results
    that a backward step overwrites (the slopes of a fused head) count as its cotangents.
    """
    reused_arrays = {step.inputs[0] for step in block.backward if not step.is_collective and kind_of(step).in_place}
    step_of_array = {array: step for step in block.forward for array in step.results}
    bytes_by_is_logits: dict[bool, Number] = {False: 0.0, True: 0.0}
    for array in block.kept:
        is_logits = array.name == "logits"
        if is_weight(array, derived) or (array in reused_arrays and not is_logits):
            continue
        step, num_copies = step_of_array.get(array), 1
        # its input is kept too, or existed before the block ran
        if step and step.only_moves and (step.inputs[0] in block.kept or step.inputs[0] not in step_of_array):
            num_copies = moves(step, sizes)
        bytes_by_is_logits[is_logits] = bytes_by_is_logits[is_logits] + sizes.bytes(array) * num_copies
    return block.repeat * bytes_by_is_logits[False], block.repeat * bytes_by_is_logits[True]


def _pending_bytes(block: BlockSteps, sizes: OpSizes) -> Number:
    """Returns the bytes that all repeats keep from a pass of input gradients to a separate pass of weight gradients."""
    step_of_array = {array: step for step in (*block.forward, *block.backward) for array in step.results}
    pending_bytes, handed_arrays = 0.0, block.split.handed if block.split else ()
    for array in handed_arrays:
        step = step_of_array.get(array)
        num_copies = moves(step, sizes) if step and step.only_moves and step.inputs[0] in handed_arrays else 1
        pending_bytes = pending_bytes + sizes.bytes(array) * num_copies
    return block.repeat * pending_bytes
