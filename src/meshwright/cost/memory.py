"""Memory of one chip in a training step, itemised, from the declared shardings and the derived steps."""

from typing import Any

import msgspec
import numpy as np

from meshwright.algebra.derive import BlockSteps, Derived
from meshwright.algebra.notation import ShardedArray, product
from meshwright.algebra.steps import Step
from meshwright.algebra.transformer import HEAD_CHUNK_TOKENS
from meshwright.core.dims import DTYPE_BYTES
from meshwright.core.errors import InputError
from meshwright.cost.ops import OpSizes
from meshwright.spec.calibration import Calibration, datasheet_calibration, memory_bytes
from meshwright.spec.cluster import Cluster
from meshwright.spec.strategy import STATE_BYTES

Number = Any
"""A float, or a NumPy array with one entry per candidate."""

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


def training_memory(derived: Derived, sizes: OpSizes, *, num_microbatches: Number) -> dict[str, Number]:
    """Bytes per chip of each item; their sum is what must fit.

    weights, gradients, optimizer: bytes per parameter of the state; with several microbatches the sum of the
    gradients is a further float32 copy. activations: results kept for the backward pass of one microbatch.
    logits: those kept, or one chunk of them with its cotangent. communication: the gathered weights of one
    repeat of the block where they are most. workspace: the largest set of passing results alive at once in the
    backward pass of one repeat.
    """
    state = STATE_BYTES[sizes.state]
    elements = _state_elements(derived, sizes)
    accumulated = DTYPE_BYTES["fp32"] * (np.asarray(num_microbatches) > 1)
    blocks = derived.blocks
    return {
        "weights": elements["weights"] * state["weights"],
        "gradients": elements["gradients"] * (state["gradients"] + accumulated),
        "optimizer": elements["optimizer"] * state["optimizer"],
        "activations": sum(_kept_bytes(block, derived, sizes, logits=False) for block in blocks),
        "logits": sum(_kept_bytes(block, derived, sizes, logits=True) for block in blocks)
        + _chunk_bytes(derived, sizes),
        "kv_cache": _zero(sizes),
        "communication": _largest(_gathered_bytes(block, derived, sizes) for block in blocks),
        "workspace": _largest(_working_set(block, derived, sizes) for block in blocks),
    }


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


def _state_elements(derived: Derived, sizes: OpSizes) -> dict[str, Number]:
    """Elements per chip of the weights, of their gradients and of what the optimizer updates, over all repeats."""
    repeats = {name: block.repeat for block in derived.blocks for op in block.block.ops for name in op.inputs}
    # a gradient is held as it enters the collectives that run once per step, whole where they scatter it
    held = {step.inputs[0].name: step.inputs[0] for step in reversed(_once_a_step(derived))}
    found = dict.fromkeys(("weights", "gradients", "optimizer"), _zero(sizes))
    for step in derived.update:
        if step.op == "adamw":
            shard = step.inputs[1]
            arrays = (derived.declared[shard.name], held[f"d{shard.name}"], shard)
            for part, array in zip(found, arrays, strict=True):
                found[part] = found[part] + repeats[shard.name] * sizes.elements(array)
    return found


def _once_a_step(derived: Derived) -> list[Step]:
    backward = [step for block in derived.blocks for step in block.backward if step.scope == "step"]
    return [*backward, *derived.update]


def _kept_bytes(block: BlockSteps, derived: Derived, sizes: OpSizes, *, logits: bool) -> Number:
    """Kept results of all repeats: the logits, or all the others. Gathered weights count as communication.

    What is gathered or sliced over one device is the array it came from, so it counts only where there are several.
    """
    made = {array: step for step in block.forward for array in (step.result, *step.more)}
    total = _zero(sizes)
    for array in block.kept:
        if (array.name == "logits") == logits and not _is_weight(array.name, derived):
            step = made.get(array)
            if step and (step.is_collective or step.op == "slice") and _is_there(step.inputs[0], block, made):
                total = total + sizes.bytes(array) * _moves(step, sizes)
            else:
                total = total + sizes.bytes(array)
    return block.repeat * total


def _is_there(array: ShardedArray, block: BlockSteps, made: dict[ShardedArray, Step]) -> bool:
    """Whether an array is kept itself, or was there before the block ran."""
    return array in block.kept or array not in made


def _chunk_bytes(derived: Derived, sizes: OpSizes) -> Number:
    """Logits of one chunk and their cotangent, where the loss head is chunked; else 0."""
    for block in derived.blocks:
        for step in block.forward:
            if step.op == "chunked_logits_statistics":
                local = sizes.local(*step.inputs[:2])
                tokens = np.minimum(local["B"] * local["T"], HEAD_CHUNK_TOKENS)
                return 2 * DTYPE_BYTES["fp32"] * tokens * local["V"]
    return 0.0


def _is_weight(name: str, derived: Derived) -> bool:
    variable = derived.program.variables.get(name)
    return variable is not None and variable.role in ("weight", "vector")


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

    A result lives from the step that makes it to its last use; nothing is taken to be done in place: an upper
    rule. Attention's scores in memory are counted in the step that makes them.
    """
    changes: list[list[Number]] = [[] for _ in range(len(block.backward) + 1)]
    lives = _lives(block, derived)
    for array, life in lives.items():
        for number, amount in _comes_and_goes(array, life, lives, sizes):
            changes[number].append(amount)
    alive, largest = _zero(sizes), _zero(sizes)
    for step, amounts in zip(block.backward, changes, strict=False):
        for amount in amounts:
            alive = alive + amount
        largest = np.maximum(largest, alive + _scores(step, sizes))
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


def _lives(block: BlockSteps, derived: Derived) -> dict[ShardedArray, _Life]:
    """The passing results of a backward pass; weights, kept results and sums of gradients count elsewhere."""
    elsewhere = {*block.kept, *derived.declared.values()}
    lives: dict[ShardedArray, _Life] = {}
    for number, step in enumerate(block.backward):
        if step.scope == "step":
            continue
        for array in step.inputs:
            if array in lives:
                lives[array].end = number
            elif array not in elsewhere and not _is_weight(array.name, derived):
                lives[array] = _Life(0, number)  # the cotangent that the block is given
        for array in (step.result, *step.more):
            if array not in lives and array not in block.kept and not _is_weight(array.name, derived):
                moves = step.is_collective or step.op == "slice"
                lives[array] = _Life(number, number, step if moves else None)
    return lives


def _scores(step: Step, sizes: OpSizes) -> Number:
    """Attention's T x S arrays where no kernel keeps them on chip: scores and their cotangent, and the weights."""
    if sizes.scores == "on_chip" or not step.op.startswith("attention"):
        return 0.0
    q, k = step.inputs[-5:-3]
    rows = sizes.local(q)
    per_element = {"attention": 4 + sizes.width, "attention_backward": 8 + sizes.width}[step.op]
    return rows["B"] * rows["N"] * rows["T"] * sizes.local(k)["T"] * per_element


def _zero(sizes: OpSizes) -> Number:
    """Zero in the shape of the candidates."""
    return 0.0 * (sizes.dims["B"] + product(sizes.mesh.values()))


def _largest(values: Any) -> Number:
    result: Number = 0.0
    for value in values:
        result = np.maximum(result, value)
    return result
