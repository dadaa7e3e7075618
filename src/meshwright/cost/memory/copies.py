"""What compilers copy: weights in other tiles or widths, transposed operands, arrays that TPUs scatter."""

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
    """True if the derivation has a backward pass; generation has none."""
    return any(block.backward for block in derived.blocks)


def is_weight(array: ShardedArray, derived: Derived) -> bool:
    """True for arrays that the program uses as a weight or vector."""
    return role_of(array, derived) in ("weight", "vector")


def role_of(array: ShardedArray, derived: Derived) -> str:
    """Returns the role of an array's variable in the program, "" if no variable has its name."""
    variable = derived.program.variables.get(array.name)
    return variable.role if variable else ""


def copied_weights(block: BlockSteps, derived: Derived, sizes: OpSizes) -> tuple[Number, Number]:
    """Returns the bytes of second copies of a block's weights: (of all repeats, of one while it runs).

    TPUs whose tiles have more rows than stored ones copy weights of all repeats. CPUs copy a layer's weights out of the
    arrays of all layers; without a loop the copies exist from forward to backward pass. For 16-bit states CPUs hold
    float32 copies of all layers, except of weights that are gathered in the loop.
    """
    # tpu7x multiplies 16-bit numbers from tiles of 16 rows
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
    """Returns how many times wider CPUs, which multiply in float32, hold gathered weights and results; 1 elsewhere."""
    return DTYPE_BYTES["fp32"] / sizes.width if sizes.on_cpus else 1


def written_out(derived: Derived, sizes: OpSizes) -> Number:
    """Returns 1 if a CPU runs its layers without a loop (`parallel.passes`), else 0."""
    has_reruns = any(step.phase == "recompute" for block in derived.blocks if block.is_layer for step in block.backward)
    has_few = all(span.repeats <= MAX_WRITTEN_OUT for stack in derived.program.stacks for span in spans(stack.layers))
    has_loops = any(block.segment is not None for block in derived.blocks)
    return np.where(product(sizes.mesh.values()) == 1, 1.0, 0.0) * (has_few and not has_reruns and not has_loops)


def transposed_operands(block: BlockSteps, derived: Derived, sizes: OpSizes) -> Number:
    """Returns the bytes of a layer's kept operands of weight-gradient products, which CPUs transpose."""
    gradient_names = {array.name for array in gradient_arrays(derived).values()}
    product_steps = (step for step in block.backward if not step.is_collective and step.result.name in gradient_names)
    operands = dict.fromkeys(array for step in product_steps for array in step.inputs if array in block.kept)
    return total(sizes.bytes(array) for array in operands)


def _retiled_bytes(block: BlockSteps, derived: Derived, sizes: OpSizes) -> Number:
    """Returns the bytes of a layer's weights that no device gathers, which loops copy to read them in other tiles."""
    gather_by_name = {s.result.name: s for s in block.forward if s.op == "all_gather" and is_weight(s.result, derived)}
    weight_names = (name for name in weights_of(derived, block) if role_of(derived.declared[name], derived) == "weight")
    return total(
        sizes.bytes(derived.declared[name]) * (1 - moves(gather_by_name[name], sizes) if name in gather_by_name else 1)
        for name in weight_names
    )


def copied_experts(block: BlockSteps, derived: Derived, sizes: OpSizes) -> Number:
    """Returns the bytes of a layer's experts that GPUs and CPUs copy for their loops: matrices that no device gathers,
    and with an exchange gradients, to which further rounds are added."""
    if not (sizes.on_gpus or sizes.on_cpus):
        return 0.0
    expert_names = [name for name in weights_of(derived, block) if derived.declared[name].dims[:1] == ("E",)]
    is_gathered = {s.result.name: moves(s, sizes) for s in block.forward if s.op == "all_gather"}
    # rows without room are sent in further rounds, which add to the gradients
    is_sent = largest(moves(step, sizes) for step in block.forward if step.op == "all_to_all")
    gradient_of = gradient_arrays(derived)
    return total(
        sizes.bytes(derived.declared[name]) * (1 - is_gathered.get(name, 0)) + sizes.bytes(gradient_of[name]) * is_sent
        for name in expert_names
        if name in gradient_of
    )


def copied_gathers(gathers: dict[ShardedArray, Step], gathered: dict[ShardedArray, Number], sizes: OpSizes) -> Number:
    """Returns the bytes of the largest second copy of a gathered weight: a transposed expert on GPUs, on TPUs a weight
    whose shards end within a tile."""
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
    """True if a shard's size along the dim of a collective is not a multiple of the rows of a TPU's tiles."""
    return sizes.local(shard)[step.dim] % STORED_ROWS != 0


def training_scratch_bytes(step: Step, sizes: OpSizes) -> Number:
    """Returns the bytes of temporary memory of a step: its scratch memory, or copies of an array that TPUs scatter in
    whole tiles. A sum of scope "step" also counts its operand, which is not stored until then."""
    if not step.is_collective:
        return kind_of(step).scratch_bytes(step, sizes)
    if step.op != "reduce_scatter" or not sizes.tile_rows:
        return 0.0
    num_copies = _copies_of_scattered(step, sizes)
    return sizes.bytes(step.inputs[0]) * moves(step, sizes) * (num_copies + (step.scope == "step") * (num_copies > 0))


def _copies_of_scattered(step: Step, sizes: OpSizes) -> Number:
    """Returns how many copies of an array exist while TPUs scatter it: one if padding rows are added to its shards, one
    if several mesh axes fill the chips and are put into the order of the links, and one in all if shards have fewer
    rows than a tile."""
    is_in_tile = _ends_within_tiles(step.result, step, sizes)
    axis_sizes = [np.asarray(sizes.mesh[axis]) for axis in step.axes]
    has_several = sum(axis_size > 1 for axis_size in axis_sizes) > 1
    is_full = product(axis_sizes) == product(sizes.mesh.values())
    return np.where(sizes.local(step.result)[step.dim] < STORED_ROWS, 1.0, 1.0 * is_in_tile + has_several * is_full)
