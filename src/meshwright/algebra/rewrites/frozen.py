"""Backward passes beside frozen weights: they make only cotangents that the gradient of a trained weight needs."""

from collections.abc import Collection, Iterable

from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.program import WEIGHTS, Program, Variable
from meshwright.algebra.steps import Step


def trained(program: Program) -> tuple[Variable, ...]:
    """Returns the weights that training updates."""
    return tuple(variable for variable in program.of_role(*WEIGHTS) if not variable.frozen)


def differentiated(program: Program) -> frozenset[str]:
    """Returns the variables whose cotangents training needs: weights that train and variables computed from them, or
    all if nothing is frozen."""
    if not any(variable.frozen for variable in program.variables.values()):
        return frozenset(program.variables)
    found, before = {variable.name for variable in trained(program)}, -1
    while len(found) > before:
        before = len(found)
        for block in program.blocks:
            for op in block.ops:
                if not found.isdisjoint(op.inputs):
                    found.add(op.out)
            if block.carry and block.result in found:
                found.add(block.carry)
    return frozenset(found)


def needed_steps(steps: Iterable[Step], left: Collection[ShardedArray]) -> tuple[list[Step], set[ShardedArray]]:
    """Returns the steps that the finished cotangents ``left`` of a backward pass need, and all arrays needed."""
    needed, kept = set(left), list[Step]()
    for step in reversed(list(steps)):
        if step.scope == "step" or not needed.isdisjoint(step.results):
            needed.update(step.inputs)
            kept.insert(0, step)
    return kept, needed
