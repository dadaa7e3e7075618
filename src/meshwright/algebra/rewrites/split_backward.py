"""Gradients of weights in a derivation: as a microbatch leaves them, their sums once per step, a pass of their own."""

from typing import NamedTuple

from meshwright.algebra.derived import BlockSteps, Derived
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.ops.route import ROUTING
from meshwright.algebra.steps import Phase, Step


def cotangent_of(derived: Derived, name: str) -> ShardedArray:
    """The cotangent of a variable that is no weight, split as the variable is."""
    return derived.declared[name].replace(name=f"d{name}", dtype="")


def gradient_arrays(derived: Derived) -> dict[str, ShardedArray]:
    """Weight -> its gradient as a microbatch leaves it, before what is summed once per step."""
    found = {name: shard.replace(name=f"d{name}") for name, shard in derived.shards.items()}
    first = step_steps(derived)
    return {name: first[name][0].inputs[0] if first.get(name) else array for name, array in found.items()}


def step_steps(derived: Derived) -> dict[str, tuple[Step, ...]]:
    """Weight -> the steps that its gradient goes through once per step, after the last microbatch."""
    found: dict[str, tuple[Step, ...]] = {}
    for block in derived.blocks:
        for step in block.backward:
            if step.scope == "step":
                name = step.result.name.removeprefix("d")
                found[name] = (*found.get(name, ()), step)
    return found


def weights_of(derived: Derived, block: BlockSteps) -> tuple[str, ...]:
    """Names of the weights that a block uses."""
    names = dict.fromkeys(name for op in block.block.ops for name in op.inputs)
    return tuple(name for name in names if derived.program.variables[name].role in ("weight", "vector"))


def counts_of(block: BlockSteps) -> dict[str, ShardedArray]:
    """What the backward pass knows of a block's router besides gradients, by a name that no weight has: what the
    experts of the layer were asked for, summed over all devices. Empty where no loss and no bound has it counted."""
    counted = any(ROUTING in step.inputs for step in block.backward)
    return {f"{ROUTING.name} of {block.block.name}": ROUTING} if counted else {}


def meetings(derived: Derived) -> tuple[Step, ...]:
    """Where a device holds the layers of two stages: the weights go to the device at the other end of the pipeline
    before a step, and their gradients, summed in float32, come back after it; with them what routers counted."""
    gradients = gradient_arrays(derived)
    names = dict.fromkeys(n for block in derived.blocks if block.block.carry for n in weights_of(derived, block))
    pairs: list[tuple[ShardedArray, Phase]] = []
    for name in names:
        pairs += [(derived.declared[name], "update"), (gradients[name], "backward")]
    for block in derived.blocks:
        pairs += [(array.replace(name=name), "backward") for name, array in counts_of(block).items()]
    return tuple(
        Step(op="permute", inputs=(array,), result=array, axes=("pipeline",), block="stage", phase=phase, scope="step")
        for array, phase in pairs
    )


class SplitBackward(NamedTuple):
    """A block's backward pass in two parts, for schedules whose weight gradients have a pass of their own.

    ``handed`` is what the second takes from the first: operands of its products, gathered activations as they are, and
    gradients that came on the way.
    """

    input_steps: tuple[Step, ...]
    weight_steps: tuple[Step, ...]
    handed: tuple[ShardedArray, ...]


def once_per_layer(block: BlockSteps) -> tuple[Step, ...]:
    """Backward steps of one layer and microbatch: sums over the step wait, a segment's second run is not of a layer."""
    again = len(block.forward) if block.segment is not None else 0
    return tuple(step for step in block.backward[again:] if step.scope != "step")


def split_backward(derived: Derived, block: BlockSteps, entering: str) -> SplitBackward:
    """First what the cotangent of the stream ``entering`` comes from, then all the others, both in the derived order.

    Gathers of weights that both parts need run in both: gathered weights are not kept.
    """
    steps, weights, gradients = once_per_layer(block), weights_of(derived, block), gradient_arrays(derived)
    needed, first = {cotangent_of(derived, entering)}, set[Step]()
    for step in reversed(steps):
        if needed & {step.result, *step.more}:
            needed.update(step.inputs)
            first.add(step)
    own = tuple(step for step in steps if step not in first)
    gathered = {a for s in own for a in s.inputs if a.name in weights and a != derived.declared[a.name]}
    shared = tuple(step for step in steps if step in first and step.result in gathered)
    made = {array for step in (*shared, *own) for array in (step.result, *step.more)}
    used = (*(array for step in (*shared, *own) for array in step.inputs), *(gradients[name] for name in weights))
    handed = tuple(a for a in dict.fromkeys(used) if a not in made and not _is_given(derived, a))
    return SplitBackward(tuple(step for step in steps if step in first), (*shared, *own), handed)


def _is_given(derived: Derived, array: ShardedArray) -> bool:
    """Whether an array is a weight as it lies, or comes with the microbatch."""
    variable, declared = derived.program.variables.get(array.name), derived.declared.get(array.name)
    return variable is not None and variable.role != "activation" and array == declared
