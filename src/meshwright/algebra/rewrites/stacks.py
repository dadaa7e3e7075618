"""Results of earlier stacks or layers that later layers read: resharded once, and their cotangents reduced once."""

from collections.abc import Callable, Iterable

import msgspec

from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.program import Block, Program
from meshwright.algebra.steps import Step
from meshwright.core.errors import InputError


class SharedInput(msgspec.Struct, frozen=True, kw_only=True):
    """A shared result in the sharding in which later layers read it, and its cotangent in the sharding in which they
    leave it, perhaps unreduced until all layers have added to it."""

    given: ShardedArray
    cotangent: ShardedArray


def shared_inputs(program: Program, steps_of: Callable[[Block], Iterable[Step]]) -> dict[str, SharedInput]:
    """Returns every `SharedInput` of a program by name. ``steps_of`` returns the steps of both passes of a block.
    Raises InputError if layers need a result in different shardings."""
    shared_by_name: dict[str, SharedInput] = {}
    readers = {block.name: program.shared_inputs(block.name) for block in program.blocks}
    steps_by_block = {block.name: list(steps_of(block)) for block in program.blocks if readers[block.name]}
    for name in dict.fromkeys(name for names in readers.values() for name in names):
        steps = [s for block, steps in steps_by_block.items() if name in readers[block] for s in steps]
        using_steps = [step for step in steps if not step.only_moves or step.op == "permute"]  # rounds of a ring
        read_arrays = {array for step in using_steps for array in step.inputs if array.name == name}
        cotangents = {array for step in using_steps for array in step.results if array.name == f"d{name}"}
        if len(read_arrays) != 1 or len(cotangents) > 1:
            arrays = ", ".join(map(str, read_arrays | cotangents))
            raise InputError(f"layers need {name} in several shardings: {arrays}. Split heads and widths alike.")
        given = read_arrays.pop()
        unused = given.replace(name=f"d{name}", dtype="")  # no trained weight needs this cotangent
        shared_by_name[name] = SharedInput(given=given, cotangent=cotangents.pop() if cotangents else unused)
    return shared_by_name
