"""The temporary results that a pass holds at once."""

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
from meshwright.cost.memory.copies import (
    is_weight,
    role_of,
    training_scratch_bytes,
    trains_in,
    widening,
)
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
        # layers that run again leave nothing but their stream
        passes = (block.backward[: block.num_again], block.backward[block.num_again :])
        pass_blocks = (msgspec.structs.replace(block, backward=steps, num_again=0, rerun=None) for steps in passes)
        return largest(working_set(pass_block, derived, sizes) for pass_block in pass_blocks)
    steps = block.backward if trains_in(derived) else block.forward
    changes: list[list[Number]] = [[] for _ in range(len(steps) + 1)]
    lives = _lives(steps, block, derived)
    if sizes.tile_rows:
        _until_rows_are_back(lives, steps, derived)
    if sizes.on_cpus and trains_in(derived):
        _until_products_run(lives, steps, derived)
    logits = next(
        (s for s in steps if not s.is_collective and kind_of(s).in_place and s.inputs[0].name == "logits"), None
    )
    held_share = _held_cotangent(logits, sizes) if logits else 1
    widened = {} if trains_in(derived) else widened_results(steps, sizes)
    width_factor = widening(sizes) if trains_in(derived) else 1
    for array, life in lives.items():
        # capped logits are made in float32, of which the cotangent is a part, wherever it is made
        factor = held_share if logits and array == logits.result and not logits.details.softcap else 1
        factor = factor * widened.get(array, 1 if array.dtype else width_factor)
        for step_number, change_bytes in _comes_and_goes(array, life, lives, sizes):
            changes[step_number].append(change_bytes * factor)
    if logits:
        # which another item counts; their cotangent takes their place
        changes[steps.index(logits) + 1].append(-sizes.bytes(logits.inputs[0]) * held_share)
    live_bytes: Number = 0.0
    max_bytes: Number = 0.0
    for step, byte_changes in zip(steps, changes, strict=False):
        for change_bytes in byte_changes:
            live_bytes = live_bytes + change_bytes
        scratch_size = training_scratch_bytes(step, sizes) if trains_in(derived) else scratch_bytes(step, sizes)
        max_bytes = np.maximum(max_bytes, live_bytes + scratch_size)
    return max_bytes


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
    last_use = len(steps) - 1
    for number, step in reversed([(number, step) for number, step in enumerate(steps) if not step.is_collective]):
        if not kind_of(step).is_einsum:
            last_use = number
        elif step.result.name in gradients:
            for array in lives.keys() & {*step.inputs}:
                lives[array].end = max(lives[array].end, last_use)


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
    moved_bytes = size * moves(life.source, sizes)
    source_life = lives.get(life.source.inputs[0])
    if source_life is None or source_life.end >= life.end:
        return [(life.start, moved_bytes), (life.end + 1, -moved_bytes)]
    return [(life.start, moved_bytes), (source_life.end + 1, size - moved_bytes), (life.end + 1, -size)]


def _lives(steps: tuple[Step, ...], block: BlockSteps, derived: Derived) -> dict[ShardedArray, _Life]:
    """Returns the temporary results of a pass; weights, caches, kept results and sums of gradients count elsewhere.

    Training gathers the weights of a whole repeat ahead, which `BlockMemory.gathered_bytes` counts; a forward pass
    alone gathers each weight for its product, which counts here.
    """
    shared = (derived.shared[name] for name in derived.program.inputs_from_earlier_stacks(block.name))
    kept_arrays = {*block.kept, *(array for result in shared for array in (result.given, result.cotangent))}
    counted_elsewhere = {*kept_arrays, *(derived.declared.values() if trains_in(derived) else ())}

    def is_state(array: ShardedArray) -> bool:
        is_counted = trains_in(derived) or array == derived.declared.get(array.name)
        return role_of(array, derived) == "cache" or (is_counted and is_weight(array, derived))

    lives: dict[ShardedArray, _Life] = {}
    for number, step in enumerate(steps):
        # these run once, on sums of gradients, which another item counts
        if step.scope == "step":
            continue
        for array in step.inputs:
            if array in lives:
                lives[array].end = number
            elif array not in counted_elsewhere and not is_state(array):
                lives[array] = _Life(0, number)  # the cotangent or the stream that enters the block
        for array in step.results:
            if array not in lives and array not in kept_arrays and not is_state(array):
                is_move = step.only_moves
                lives[array] = _Life(number, number, step if is_move else None)
    return lives
