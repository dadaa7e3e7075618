"""Backward passes of models with frozen weights: they make only cotangents that gradients of trained weights need."""

from collections.abc import Collection, Iterable

from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.program import WEIGHTS, Program, Variable
from meshwright.algebra.steps import Step


def trained(program: Program) -> tuple[Variable, ...]:
    """Returns the weights that training updates."""
    return tuple(variable for variable in program.of_role(*WEIGHTS) if not variable.frozen)


def moved_buffers(program: Program) -> frozenset[str]:
    """Returns the names of router corrections, which training updates from token counts, without a gradient."""
    ops = (op for block in program.blocks for op in block.ops)
    return frozenset(op.inputs[1] for op in ops if dict(op.attributes).get("correction_rate"))


def differentiated(program: Program) -> frozenset[str]:
    """Returns the variables whose cotangents training needs: weights that train and variables computed from them, or
    all if nothing is frozen."""
    if not any(variable.frozen for variable in program.variables.values()):
        return frozenset(program.variables)
    needed_names, num_names_before = {variable.name for variable in trained(program)}, -1
    while len(needed_names) > num_names_before:
        num_names_before = len(needed_names)
        for block in program.blocks:
            for op in block.ops:
                if not needed_names.isdisjoint(op.inputs):
                    needed_names.add(op.out)
            if block.carry and block.result in needed_names:
                needed_names.add(block.carry)
    return frozenset(needed_names)


def needed_steps(steps: Iterable[Step], left: Collection[ShardedArray]) -> tuple[list[Step], set[ShardedArray]]:
    """Returns the steps on which arrays ``left`` depend, plus all of scope "step", in order; and all arrays needed."""
    needed_arrays, kept_steps = set(left), list[Step]()
    for step in reversed(list(steps)):
        if step.scope == "step" or not needed_arrays.isdisjoint(step.results):
            needed_arrays.update(step.inputs)
            kept_steps.insert(0, step)
    return kept_steps, needed_arrays
