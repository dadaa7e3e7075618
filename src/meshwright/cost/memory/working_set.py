"""The temporary results that a pass holds at the same time."""

import msgspec
import numpy as np

from meshwright.algebra.derived import BlockSteps, Derived
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.ops import kind_of
from meshwright.algebra.rewrites.split_backward import gradient_arrays
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.steps import Step
from meshwright.core.dims import DTYPE_BYTES
from meshwright.cost.arrays import largest
from meshwright.cost.memory.copies import is_weight, role_of, training_scratch_bytes, trains_in, widening
from meshwright.cost.memory.generation import moves, scratch_bytes, widened_results


class _Life(msgspec.Struct):
    """The steps between which a result is alive: made at ``start``, last used at ``end``.

    ``source`` is the collective or slice that made it; None for other steps.
    """

    start: int
    end: int
    source: Step | None = None


def working_set(block: BlockSteps, derived: Derived, sizes: OpSizes) -> Number:
    """Returns the most bytes, at any step of the backward pass, of live results that no other item counts.

    Without a backward pass the forward pass counts. A result lives from the step that makes it to its last use. Scratch
    memory (attention's scores) counts at its step.
    """
    if block.rerun is not None:
        # rerun layers leave only their stream
        pass_steps = (block.backward[: block.num_again], block.backward[block.num_again :])
        pass_blocks = (msgspec.structs.replace(block, backward=steps, num_again=0, rerun=None) for steps in pass_steps)
        return largest(working_set(pass_block, derived, sizes) for pass_block in pass_blocks)
    steps = block.backward if trains_in(derived) else block.forward
    changes_by_step: list[list[Number]] = [[] for _ in range(len(steps) + 1)]
    life_of = _lives(steps, block, derived)
    if sizes.tile_rows:
        _until_rows_are_back(life_of, steps, derived)
    if sizes.on_cpus and trains_in(derived):
        _until_products_run(life_of, steps, derived)
    logits_step = next(
        (s for s in steps if not s.is_collective and kind_of(s).in_place and s.inputs[0].name == "logits"), None
    )
    held_share = _held_cotangent(logits_step, sizes) if logits_step else 1
    widening_of = {} if trains_in(derived) else widened_results(steps, sizes)
    default_factor = widening(sizes) if trains_in(derived) else 1
    for array, life in life_of.items():
        # capped logits are made in float32, and include the cotangent's memory
        factor = held_share if logits_step and array == logits_step.result and not logits_step.details.softcap else 1
        factor = factor * widening_of.get(array, 1 if array.dtype else default_factor)
        for step_index, change_bytes in _comes_and_goes(array, life, life_of, sizes):
            changes_by_step[step_index].append(change_bytes * factor)
    if logits_step:
        # kept logits are counted in another item; their cotangent replaces them
        changes_by_step[steps.index(logits_step) + 1].append(-sizes.bytes(logits_step.inputs[0]) * held_share)
    live_bytes: Number = 0.0
    max_bytes: Number = 0.0
    for step, byte_changes in zip(steps, changes_by_step, strict=False):
        for change_bytes in byte_changes:
            live_bytes = live_bytes + change_bytes
        step_scratch_bytes = training_scratch_bytes(step, sizes) if trains_in(derived) else scratch_bytes(step, sizes)
        max_bytes = np.maximum(max_bytes, live_bytes + step_scratch_bytes)
    return max_bytes


def _until_rows_are_back(life_of: dict[ShardedArray, "_Life"], steps: tuple[Step, ...], derived: Derived) -> None:
    """Extends the lives of inputs of experts' weight gradients to the last exchange of rows, which TPUs run before
    them."""
    exchange_indices = [index for index, step in enumerate(steps) if step.op == "all_to_all"]
    gradient_names = {array.name for array in gradient_arrays(derived).values()}
    for step in steps[: exchange_indices[-1]] if exchange_indices else ():
        if step.result.name in gradient_names and not step.is_collective:
            for array in step.inputs:
                if array in life_of:
                    life_of[array].end = max(life_of[array].end, exchange_indices[-1])


def _until_products_run(life_of: dict[ShardedArray, "_Life"], steps: tuple[Step, ...], derived: Derived) -> None:
    """Extends the lives of operands of weight-gradient products to the next step that is no product, as CPUs first run
    steps that more steps depend on."""
    gradient_names = {array.name for array in gradient_arrays(derived).values()}
    last_use_index = len(steps) - 1
    for index, step in reversed([(index, step) for index, step in enumerate(steps) if not step.is_collective]):
        if not kind_of(step).is_einsum:
            last_use_index = index
        elif step.result.name in gradient_names:
            for array in life_of.keys() & {*step.inputs}:
                life_of[array].end = max(life_of[array].end, last_use_index)


def _held_cotangent(step: Step, sizes: OpSizes) -> Number:
    """Returns 1 if the cotangent of the logits needs memory besides the logits, else 0.

    A cotangent as wide as the logits takes their memory, except on CPUs. TPUs make it inside the products that read it,
    unless a device has only one sequence.
    """
    if sizes.on_cpus:
        return 1.0
    if sizes.width == DTYPE_BYTES["fp32"]:
        return 0.0
    return np.where(sizes.local(step.inputs[0])["B"] > 1, 0.0, 1.0) if sizes.tile_rows else 1.0


def _comes_and_goes(
    array: ShardedArray, life: _Life, life_of: dict[ShardedArray, _Life], sizes: OpSizes
) -> list[tuple[int, Number]]:
    """Returns pairs (step number, change of live bytes) for a result: it counts from its first step, no longer after
    its last.

    A collective or slice over one device is an alias: its result counts only after the last use of its input."""
    num_bytes = sizes.bytes(array)
    if life.source is None:
        return [(life.start, num_bytes), (life.end + 1, -num_bytes)]
    moved_bytes = num_bytes * moves(life.source, sizes)
    source_life = life_of.get(life.source.inputs[0])
    if source_life is None or source_life.end >= life.end:
        return [(life.start, moved_bytes), (life.end + 1, -moved_bytes)]
    return [(life.start, moved_bytes), (source_life.end + 1, num_bytes - moved_bytes), (life.end + 1, -num_bytes)]


def _lives(steps: tuple[Step, ...], block: BlockSteps, derived: Derived) -> dict[ShardedArray, _Life]:
    """Returns the lives of a pass's temporary results; weights, caches, kept results and sums of gradients count
    elsewhere.

    Training gathers the weights of a whole repeat ahead, which `BlockMemory.gathered_bytes` counts; a pass without a
    backward pass gathers each weight for its product, which counts here."""
    names = (*derived.program.shared_inputs(block.name), *block.block.shares)
    shared_results = (derived.shared[name] for name in names if name in derived.shared)
    kept_arrays = {*block.kept, *(array for result in shared_results for array in (result.given, result.cotangent))}
    excluded_arrays = {*kept_arrays, *(derived.declared.values() if trains_in(derived) else ())}

    def is_state(array: ShardedArray) -> bool:
        is_counted = trains_in(derived) or array == derived.declared.get(array.name)
        return role_of(array, derived) == "cache" or (is_counted and is_weight(array, derived))

    life_of: dict[ShardedArray, _Life] = {}
    for index, step in enumerate(steps):
        # steps that run once have sums of gradients as inputs, which another item counts
        if step.scope == "step":
            continue
        for array in step.inputs:
            if array in life_of:
                life_of[array].end = index
            elif array not in excluded_arrays and not is_state(array):
                life_of[array] = _Life(0, index)  # the cotangent or the stream that enters the block
        for array in step.results:
            if array not in life_of and array not in kept_arrays and not is_state(array):
                is_move = step.only_moves
                life_of[array] = _Life(index, index, step if is_move else None)
    return life_of
