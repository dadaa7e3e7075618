"""The cost of layouts and tilings in a compiled program: padding, copies that only change a layout, largest arrays."""

from collections import defaultdict
from collections.abc import Iterator

import msgspec
import numpy as np

from meshwright.core.labels import StepLabel
from meshwright.hlo.loops import times_run
from meshwright.hlo.module import Computation, Instruction, Module
from meshwright.hlo.shapes import Shape

_VIEWS = {
    *("parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "after-all", "constant"),
    *("add-dependency", "opt-barrier", "optimization-barrier", "copy-done", "slice-done", "partition-id", "send-done"),
}
"""Opcodes that allocate no array: their result is part of another array, or was written by another instruction."""
_RUNS = ("body", "condition", "branch_computations", "true_computation", "false_computation")


class Padded(msgspec.Struct, frozen=True):
    """Arrays of one shape and layout, to which tiling adds padding."""

    name: str
    shape: str
    num_bytes: int
    padded_bytes: int
    num_arrays: int
    label: StepLabel | None

    @property
    def wasted_bytes(self) -> int:
        """Bytes of padding in one array."""
        return self.padded_bytes - self.num_bytes

    @property
    def wasted_share(self) -> float:
        """Padding as a share of the bytes in memory."""
        return self.wasted_bytes / self.padded_bytes


class Relayout(msgspec.Struct, frozen=True):
    """A copy whose result has a different dim order or tiling than its operand."""

    name: str
    before: str
    after: str
    num_bytes: int
    times: int
    inside_fusion: bool
    label: StepLabel | None

    @property
    def total_bytes(self) -> int:
        """Bytes written by all executions."""
        return self.num_bytes * self.times


class Largest(msgspec.Struct, frozen=True):
    """One array that the program allocates or has as a parameter, with its bytes in memory."""

    name: str
    opcode: str
    shape: str
    memory_space: int
    padded_bytes: int
    times: int
    label: StepLabel | None


def executed(module: Module) -> tuple[Computation, ...]:
    """Returns the computations that run instruction by instruction: entry, loops, branches and calls, not fusions."""
    computations, stack = [], [module.entry]
    while stack:
        name = stack.pop()
        computation = module.computations.get(name)
        if computation is None or computation in computations:
            continue
        computations.append(computation)
        for caller in computation.instructions:
            is_start = caller.opcode == "call" or caller.opcode.endswith("-start")
            stack += [called for role, called in caller.called if role in _RUNS or (is_start and role != "condition")]
    return tuple(computations)


def paddings(module: Module) -> tuple[Padded, ...]:
    """Returns the shapes and layouts with padding, most padding first.

    An array counts where it is allocated; views of it do not count.
    """
    group_by_layout: dict[str, list[tuple[Instruction, Shape]]] = defaultdict(list)
    for instruction, shape in _arrays(module):
        if shape.padded_bytes > shape.num_bytes:
            group_by_layout[layout_text(shape)].append((instruction, shape))
    rows = [
        Padded(
            name=group[0][0].name,
            shape=layout,
            num_bytes=group[0][1].num_bytes,
            padded_bytes=group[0][1].padded_bytes,
            num_arrays=len(group),
            label=next((instruction.label for instruction, _ in group if instruction.label), None),
        )
        for layout, group in group_by_layout.items()
    ]
    return tuple(sorted(rows, key=lambda row: row.wasted_bytes, reverse=True))


def relayouts(module: Module) -> tuple[Relayout, ...]:
    """Returns the copies that only change an array's dim order or tiling, most bytes first."""
    running_names = {computation.name for computation in executed(module)}
    rows = []
    for instruction in module:
        if instruction.opcode not in ("copy", "copy-start"):
            continue
        operand = module.computations[instruction.computation].by_name.get(instruction.operands[0])
        shapes = instruction.shapes[1::-1]  # of a start: the operand's, then the result's
        if instruction.opcode == "copy":
            shapes = (*operand.shapes, *instruction.shapes) if operand and len(instruction.shapes) == 1 else ()
        if len(shapes) != 2 or not changes_layout(*shapes):
            continue
        before, after = shapes
        rows.append(
            Relayout(
                name=instruction.name,
                before=layout_text(before),
                after=layout_text(after),
                num_bytes=after.padded_bytes,
                times=times_run(module, instruction.computation),
                inside_fusion=instruction.computation not in running_names,
                label=instruction.label,
            )
        )
    return tuple(sorted(rows, key=lambda row: row.total_bytes, reverse=True))


def largest_arrays(module: Module) -> tuple[Largest, ...]:
    """Returns the arrays that the program allocates or has as parameters, largest first."""
    rows = [
        Largest(
            name=instruction.name,
            opcode=instruction.opcode,
            shape=layout_text(shape),
            memory_space=shape.memory_space,
            padded_bytes=shape.padded_bytes,
            times=times_run(module, instruction.computation),
            label=instruction.label,
        )
        for instruction, shape in _arrays(module)
    ]
    return tuple(sorted(rows, key=lambda row: row.padded_bytes, reverse=True))


def changes_layout(before: Shape, after: Shape) -> bool:
    """True if two layouts of one array order its elements differently. Dims of size 1 do not matter."""
    orders = [[dim for dim in shape.order if shape.dims[dim] != 1] for shape in (before, after)]
    return orders[0] != orders[1] or before.tiles != after.tiles


def layout_text(shape: Shape) -> str:
    """Writes a shape as HLO does, without its memory space: ``bf16[8,128]{1,0:T(8,128)(2,1)}``."""
    order = ",".join(map(str, shape.minor_to_major))
    tiles = "".join(f"({','.join(map(str, tile))})" for tile in shape.tiles)
    return f"{shape}{{{order}{':T' if tiles else ''}{tiles}}}" if order or tiles else str(shape)


def tile_offset(tiles: tuple[tuple[int, ...], ...], position: tuple[int, ...]) -> int:
    """Returns the offset in memory, in elements, of the element at ``position`` of a tile.

    Every further tile divides the one before it: (row, column) in ``(8,128)(2,1)`` has the offset 256 (row // 2) + 2
    column + row % 2.
    """
    sizes, places = list(tiles[0]), list(position)
    for tile in tiles[1:]:
        start = len(sizes) - len(tile)
        cuts = list(zip(sizes[start:], places[start:], tile, strict=True))
        sizes = [*sizes[:start], *(-(-dim_size // size) for dim_size, _, size in cuts), *tile]
        places = [*places[:start], *(spot // size for _, spot, size in cuts), *(spot % size for _, spot, size in cuts)]
    return int(np.ravel_multi_index(places, sizes))


def _arrays(module: Module) -> Iterator[tuple[Instruction, Shape]]:
    """Yields every array that an instruction allocates, and the program's own parameters."""
    for computation in executed(module):
        for instruction in computation.instructions:
            is_argument = instruction.opcode == "parameter" and computation.name == module.entry
            if (instruction.opcode in _VIEWS and not is_argument) or instruction.opcode.endswith("-done"):
                continue
            shapes = instruction.shapes
            if instruction.opcode == "copy-start":
                shapes = shapes[:1]
            elif instruction.opcode.endswith("-start") and len(shapes) > 1:
                # A start's tuple also names its operands.
                shapes = shapes[1:2]
            yield from ((instruction, shape) for shape in shapes if shape.num_bytes)
