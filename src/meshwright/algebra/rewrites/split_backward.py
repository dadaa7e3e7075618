"""Gradients of weights after a microbatch, their sums once per step, backward passes in two parts, and the update of
each weight."""

from collections.abc import Iterable
from typing import NamedTuple

from msgspec.structs import replace

from meshwright.algebra.derived import BlockSteps, Derived
from meshwright.algebra.kinds import Updated
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.ops.dispatch import is_at_experts, rounds_begin_with
from meshwright.algebra.ops.route import ROUTING
from meshwright.algebra.program import WEIGHTS
from meshwright.algebra.rewrites.pipeline import SplitBackward
from meshwright.algebra.steps import Phase, Step


def cotangent_of(derived: Derived, name: str) -> ShardedArray:
    """Returns the cotangent of a variable that is no weight, split as the variable is."""
    return derived.declared[name].replace(name=f"d{name}", dtype="")


def gradient_arrays(derived: Derived) -> dict[str, ShardedArray]:
    """Maps each weight to the sharding of its gradient after a microbatch, before the sums that run once per step."""
    sum_steps_of = step_steps(derived)
    return {
        name: sum_steps_of[name][0].inputs[0] if name in sum_steps_of else shard.replace(name=f"d{name}")
        for name, shard in derived.shards.items()
    }


def step_steps(derived: Derived) -> dict[str, tuple[Step, ...]]:
    """Maps each weight to the steps of scope "step" on its gradient, which run during or after the last microbatch."""
    steps_by_weight: dict[str, tuple[Step, ...]] = {}
    for step in (step for block in derived.blocks for step in block.backward if step.scope == "step"):
        name = step.result.name.removeprefix("d")
        steps_by_weight[name] = (*steps_by_weight.get(name, ()), step)
    return steps_by_weight


class WeightUpdate(NamedTuple):
    """Update steps of one weight: moves to the optimizer's sharding, the optimizer's steps, and moves back."""

    before: list[Step]
    update: list[Step]
    after: list[Step]


def weight_updates(derived: Derived) -> dict[str, WeightUpdate]:
    """Maps each trained weight to its `WeightUpdate`."""
    update_by_name = {name: WeightUpdate([], [], []) for name in derived.weights}
    for step in derived.update:
        name, _, suffix = step.result.name.partition(".")  # without a suffix it is the weight
        if name in update_by_name:  # else a sum of the loss or of the gradient norm
            moves_before, update_steps, moves_after = update_by_name[name]
            is_move = step.only_moves and not suffix
            (update_steps if not is_move else moves_after if update_steps else moves_before).append(step)
    return update_by_name


def state_of_layer(weight: Updated, steps: Iterable[Step]) -> tuple[ShardedArray, ...]:
    """Returns the optimizer states (such as moments) that update steps of a weight read and replace, without the dim of
    layers."""
    return tuple(
        array.replace(dims=array.dims[num_leading:], axes=array.axes[num_leading:])
        for step in steps
        for array in step.more
        if array in step.inputs
        for num_leading in [int(array.dims[0] == weight.layers)]
    )


def weights_of(derived: Derived, block: BlockSteps) -> tuple[str, ...]:
    """Returns the names of the weights that a block uses."""
    return tuple(name for name in block.block.reads if derived.program.variables[name].role in WEIGHTS)


def trained_of(derived: Derived, block: BlockSteps) -> tuple[str, ...]:
    """Returns the names of the weights that a block uses and training updates."""
    return tuple(name for name in weights_of(derived, block) if name in derived.weights)


def counts_of(block: BlockSteps) -> dict[str, ShardedArray]:
    """Returns the router's counts of a block, summed over all devices, under a key that cannot clash with a weight's
    name. Empty if nothing in the backward pass needs them."""
    has_counts = any(ROUTING in step.inputs for step in block.backward)
    return {f"{ROUTING.name} of {block.name}": ROUTING} if has_counts else {}


def meetings(derived: Derived) -> tuple[Step, ...]:
    """Returns the permutes of a pipeline with two copies of the weights, where each device runs two stages: before a
    step it sends weights of layers and of blocks between stacks to the device at the mirrored position, and after the
    step their gradients, summed in float32, and router counts back."""
    gradient_of = gradient_arrays(derived)
    sent_arrays: list[tuple[ShardedArray, Phase]] = []
    block_role = derived.program.block_role
    sent_blocks = [block for block in derived.blocks if block.is_layer or block_role(block.name) == "last"]
    for name in dict.fromkeys(name for block in sent_blocks for name in weights_of(derived, block)):
        sent_arrays.append((derived.declared[name], "update"))
        sent_arrays += [(gradient_of[name], "backward")] if name in gradient_of else []
    for block in derived.blocks:
        sent_arrays += [(array.replace(name=name), "backward") for name, array in counts_of(block).items()]
    return tuple(
        Step(op="permute", inputs=(array,), result=array, axes=("pipeline",), block="stage", phase=phase, scope="step")
        for array, phase in sent_arrays
    )


def once_per_layer(block: BlockSteps) -> tuple[Step, ...]:
    """Returns the backward steps of a block without recomputed segments and without sums of scope "step"."""
    return tuple(step for step in block.backward[block.num_again :] if step.scope != "step")


def with_split_backward(derived: Derived) -> Derived:
    """Returns the derivation with the backward passes of its layers in two parts."""
    splits = (_split(derived, block) if block.is_layer else None for block in derived.blocks)
    blocks = (replace(block, split=split) for block, split in zip(derived.blocks, splits, strict=True))
    return replace(derived, blocks=tuple(blocks))


def _split(derived: Derived, block: BlockSteps) -> SplitBackward:
    """Splits a backward pass: first the steps that the cotangents of the stream and of shared inputs need, then the
    rest, in derived order."""
    shared = [derived.shared[name] for name in derived.program.shared_inputs(block.name)]
    needed_arrays = {cotangent_of(derived, block.block.carry), *(result.cotangent for result in shared)}
    input_places, weight_places = list(range(block.num_again)), list[int]()
    for place, step in reversed(list(enumerate(block.backward))[block.num_again :]):
        if step.scope == "step":
            continue
        if needed_arrays.isdisjoint(step.results):
            weight_places.insert(0, place)
        else:
            needed_arrays.update(step.inputs)
            input_places.insert(block.num_again, place)
    steps = [block.backward[place] for place in weight_places]
    # the second part has its own results, declared weights, and the microbatch's inputs
    known_arrays = {array for step in steps for array in step.results}
    known_arrays |= {result.given for result in shared}
    known_arrays |= {derived.declared[v.name] for v in derived.program.variables.values() if v.role != "activation"}
    gradient_of = gradient_arrays(derived)
    arrays = [*(a for step in steps for a in step.inputs), *(gradient_of[name] for name in trained_of(derived, block))]
    if any(is_at_experts(step) and step.phase == "backward" for step in steps):
        arrays += rounds_begin_with(block.backward)
    handed_arrays = tuple(array for array in dict.fromkeys(arrays) if array not in known_arrays)
    return SplitBackward(tuple(input_places), tuple(weight_places), handed_arrays)
