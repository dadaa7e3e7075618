"""Results of an earlier stack that layers read, as a decoder reads its encoder's: they are resharded once for all
layers, and their cotangents are reduced once, after all layers have added to them."""

from collections.abc import Callable, Iterable

import msgspec

from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.program import Block, Program
from meshwright.algebra.steps import Step
from meshwright.core.errors import InputError


class SharedInput(msgspec.Struct, frozen=True, kw_only=True):
    """A result of an earlier stack as the layers that read it need it sharded, and its cotangent as they leave it,
    which may be unreduced until all layers have added to it."""

    given: ShardedArray
    cotangent: ShardedArray


def shared_inputs(program: Program, steps_of: Callable[[Block], Iterable[Step]]) -> dict[str, SharedInput]:
    """Returns every `SharedInput` of a program by name. ``steps_of`` returns the steps of both passes of a block."""
    shared_by_name = {}
    for stack in program.stacks:
        for name in stack.inputs:
            steps = [s for block in program.blocks if block.name in stack.layers for s in steps_of(block)]
            using_steps = [step for step in steps if not step.only_moves]
            read_arrays = {array for step in using_steps for array in step.inputs if array.name == name}
            cotangents = {array for step in using_steps for array in step.results if array.name == f"d{name}"}
            if len(read_arrays) != 1 or len(cotangents) != 1:
                arrays = ", ".join(map(str, read_arrays | cotangents))
                raise InputError(f"layers need {name} in several shardings: {arrays}. Split heads and widths alike.")
            shared_by_name[name] = SharedInput(given=read_arrays.pop(), cotangent=cotangents.pop())
    return shared_by_name
