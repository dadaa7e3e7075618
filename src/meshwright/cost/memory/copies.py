"""What compilers copy: weights in other tiles or widths, operands that are turned, arrays that TPUs scatter."""

import numpy as np

from meshwright.algebra.derived import BlockSteps, Derived
from meshwright.algebra.notation import ShardedArray, product
from meshwright.algebra.ops import kind_of
from meshwright.algebra.rewrites.split_backward import gradient_arrays, weights_of
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.steps import Step
from meshwright.algebra.transformer import MAX_WRITTEN_OUT, spans
from meshwright.core.dims import DTYPE_BYTES
from meshwright.cost.arrays import largest, total
from meshwright.cost.memory.generation import moves

STORED_ROWS = 8
"""Rows of the tiles in which TPUs store weights of 16 bits."""


def trains_in(derived: Derived) -> bool:
    """True if there is a backward pass; steps that generate have none."""
    return any(block.backward for block in derived.blocks)


def is_weight(array: ShardedArray, derived: Derived) -> bool:
    """True for weights and vectors."""
    return role_of(array, derived) in ("weight", "vector")


def role_of(array: ShardedArray, derived: Derived) -> str:
    """Returns what the program uses an array for, "" if it has none of that name."""
    variable = derived.program.variables.get(array.name)
    return variable.role if variable else ""


def copied_weights(block: BlockSteps, derived: Derived, sizes: OpSizes) -> tuple[Number, Number]:
    """Returns the bytes of second copies of a block's weights: (of all repeats, of one while it runs).

    TPUs whose tiles are larger than stored ones copy those of all repeats. CPUs copy a layer's out of the arrays of all
    layers, which without a loop are there from the forward to the backward pass, and of all layers in 16 bits before
    the loop, widened, unless each is gathered in it.
    """
    # on a tpu7x products take numbers of 16 bits from tiles of 16 rows
    if sizes.tile_rows > STORED_ROWS:
        return block.repeat * _retiled_bytes(block, derived, sizes), 0.0
    if not (sizes.on_cpus and block.is_layer and trains_in(derived)):
        return 0.0, 0.0
    is_written_out, layer_bytes = written_out(derived, sizes), _retiled_bytes(block, derived, sizes)
    # CPUs multiply in float32, so XLA widens the weights of all layers before their loop
    if sizes.width < DTYPE_BYTES["fp32"]:
        return block.repeat * layer_bytes * widening(sizes), 0.0
    return block.repeat * layer_bytes * is_written_out, layer_bytes * (1 - is_written_out)


def widening(sizes: OpSizes) -> float:
    """Returns how much wider CPUs, which multiply in float32, hold gathered weights and temporary results."""
    return DTYPE_BYTES["fp32"] / sizes.width if sizes.on_cpus else 1


def written_out(derived: Derived, sizes: OpSizes) -> Number:
    """1 where a CPU runs its layers without a loop (`parallel.passes`), else 0."""
    has_reruns = any(step.phase == "recompute" for block in derived.blocks if block.is_layer for step in block.backward)
    has_few = all(span.repeats <= MAX_WRITTEN_OUT for stack in derived.program.stacks for span in spans(stack.layers))
    has_loops = any(block.segment is not None for block in derived.blocks)
    return np.where(product(sizes.mesh.values()) == 1, 1.0, 0.0) * (has_few and not has_reruns and not has_loops)


def turned_operands(block: BlockSteps, derived: Derived, sizes: OpSizes) -> Number:
    """Returns the bytes of a layer's kept operands of products for weight gradients, which CPUs transpose."""
    gradient_names = {array.name for array in gradient_arrays(derived).values()}
    product_steps = (step for step in block.backward if not step.is_collective and step.result.name in gradient_names)
    operands = dict.fromkeys(array for step in product_steps for array in step.inputs if array in block.kept)
    return total(sizes.bytes(array) for array in operands)


def _retiled_bytes(block: BlockSteps, derived: Derived, sizes: OpSizes) -> Number:
    """Returns the bytes of a layer's weights that no device gathers: loops read them in other tiles than their own."""
    gather_by_name = {s.result.name: s for s in block.forward if s.op == "all_gather" and is_weight(s.result, derived)}
    weight_names = (name for name in weights_of(derived, block) if role_of(derived.declared[name], derived) == "weight")
    return total(
        sizes.bytes(derived.declared[name]) * (1 - moves(gather_by_name[name], sizes) if name in gather_by_name else 1)
        for name in weight_names
    )


def copied_experts(block: BlockSteps, derived: Derived, sizes: OpSizes) -> Number:
    """Returns the bytes of a layer's experts that GPUs and CPUs copy for their loops: matrices that no device gathers,
    and with an exchange the gradients, to which those of further rounds are added."""
    if not (sizes.on_gpus or sizes.on_cpus):
        return 0.0
    expert_names = [name for name in weights_of(derived, block) if derived.declared[name].dims[:1] == ("E",)]
    is_gathered = {s.result.name: moves(s, sizes) for s in block.forward if s.op == "all_gather"}
    # rows without room go in further rounds, whose gradients are added up
    is_sent = largest(moves(step, sizes) for step in block.forward if step.op == "all_to_all")
    gradient_of = gradient_arrays(derived)
    return total(
        sizes.bytes(derived.declared[name]) * (1 - is_gathered.get(name, 0)) + sizes.bytes(gradient_of[name]) * is_sent
        for name in expert_names
        if name in gradient_of
    )


def turned_bytes(gathers: dict[ShardedArray, Step], gathered: dict[ShardedArray, Number], sizes: OpSizes) -> Number:
    """Returns the bytes of the largest weight that exists twice after its gather: one of experts while GPUs transpose
    it, and on TPUs one whose shards end within a tile."""
    if sizes.tile_rows:
        return largest(
            num_bytes * _ends_within_tiles(gathers[array].inputs[0], gathers[array], sizes)
            for array, num_bytes in gathered.items()
        )
    expert_bytes = (
        num_bytes for array, num_bytes in gathered.items() if array.dims[:1] == ("E",) and gathers[array].dim != "E"
    )
    return largest(expert_bytes) if sizes.on_gpus else 0.0


def _ends_within_tiles(shard: ShardedArray, step: Step, sizes: OpSizes) -> Number:
    """True if a shard along the dim of a collective is no whole number of a TPU's tiles."""
    return sizes.local(shard)[step.dim] % STORED_ROWS != 0


def training_scratch_bytes(step: Step, sizes: OpSizes) -> Number:
    """Returns the bytes of temporary memory of a step: its own, or copies of an array that TPUs scatter in whole tiles.
    A sum of scope "step" has its operand besides, which no step holds until then."""
    if not step.is_collective:
        return kind_of(step).scratch_bytes(step, sizes)
    if step.op != "reduce_scatter" or not sizes.tile_rows:
        return 0.0
    num_copies = _copies_of_scattered(step, sizes)
    return sizes.bytes(step.inputs[0]) * moves(step, sizes) * (num_copies + (step.scope == "step") * (num_copies > 0))


def _copies_of_scattered(step: Step, sizes: OpSizes) -> Number:
    """Returns how many copies of an array exist while TPUs scatter it: one where rows are added to its shards, one
    where several mesh axes fill the chips and are put into the order of the links, and one for both where shards have
    fewer rows than a tile."""
    is_in_tile = _ends_within_tiles(step.result, step, sizes)
    axis_sizes = [np.asarray(sizes.mesh[axis]) for axis in step.axes]
    has_several = sum(axis_size > 1 for axis_size in axis_sizes) > 1
    is_full = product(axis_sizes) == product(sizes.mesh.values())
    return np.where(sizes.local(step.result)[step.dim] < STORED_ROWS, 1.0, 1.0 * is_in_tile + has_several * is_full)
