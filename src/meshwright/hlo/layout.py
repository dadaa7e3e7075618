"""What layouts and tilings cost in a compiled program: padding, copies that only change a layout, largest arrays."""

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
"""Instructions that make no array of their own: they name a part of another, or what another writes."""
_RUNS = ("body", "condition", "branch_computations", "true_computation", "false_computation")


class Padded(msgspec.Struct, frozen=True):
    """Arrays of one shape and layout that a tiling makes larger in memory."""

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
        """Part of the memory that holds no number."""
        return self.wasted_bytes / self.padded_bytes


class Relayout(msgspec.Struct, frozen=True):
    """A copy whose result lies in memory in another order than its operand, or in other tiles."""

    name: str
    before: str
    after: str
    num_bytes: int
    times: int
    inside_fusion: bool
    label: StepLabel | None

    @property
    def total_bytes(self) -> int:
        """Bytes written over all the times that it runs."""
        return self.num_bytes * self.times


class Largest(msgspec.Struct, frozen=True):
    """One array that the program makes, or is given, with the bytes that it takes in memory."""

    name: str
    opcode: str
    shape: str
    memory_space: int
    padded_bytes: int
    times: int
    label: StepLabel | None


def executed(module: Module) -> tuple[Computation, ...]:
    """The computations that run instruction by instruction: the entry, loops and calls, not what is fused."""
    found, pending = [], [module.entry]
    while pending:
        name = pending.pop()
        computation = module.computations.get(name)
        if computation is None or computation in found:
            continue
        found.append(computation)
        for one in computation.instructions:
            starts = one.opcode == "call" or one.opcode.endswith("-start")
            pending += [called for role, called in one.called if role in _RUNS or (starts and role != "condition")]
    return tuple(found)


def paddings(module: Module) -> tuple[Padded, ...]:
    """Shapes and layouts that are larger in memory than their numbers, most padding first.

    An array counts where it is made: an instruction that only names a part of another makes none.
    """
    by_shape: dict[str, list[tuple[Instruction, Shape]]] = defaultdict(list)
    for one, shape in _arrays(module):
        if shape.padded_bytes > shape.num_bytes:
            by_shape[layout_text(shape)].append((one, shape))
    found = [
        Padded(
            name=group[0][0].name,
            shape=text,
            num_bytes=group[0][1].num_bytes,
            padded_bytes=group[0][1].padded_bytes,
            num_arrays=len(group),
            label=next((one.label for one, _ in group if one.label), None),
        )
        for text, group in by_shape.items()
    ]
    return tuple(sorted(found, key=lambda one: one.wasted_bytes, reverse=True))


def relayouts(module: Module) -> tuple[Relayout, ...]:
    """Copies that only change the order or the tiles in which an array lies, most bytes first."""
    running = {computation.name for computation in executed(module)}
    found = []
    for one in module:
        if one.opcode not in ("copy", "copy-start"):
            continue
        before, after = _before_and_after(module, one)
        if before is None or after is None or not changes_layout(before, after):
            continue
        found.append(
            Relayout(
                name=one.name,
                before=layout_text(before),
                after=layout_text(after),
                num_bytes=after.padded_bytes,
                times=times_run(module, one.computation),
                inside_fusion=one.computation not in running,
                label=one.label,
            )
        )
    return tuple(sorted(found, key=lambda one: one.total_bytes, reverse=True))


def largest_arrays(module: Module) -> tuple[Largest, ...]:
    """Arrays that the program makes or is given, those with most bytes in memory first."""
    found = [
        Largest(
            name=one.name,
            opcode=one.opcode,
            shape=layout_text(shape),
            memory_space=shape.memory_space,
            padded_bytes=shape.padded_bytes,
            times=times_run(module, one.computation),
            label=one.label,
        )
        for one, shape in _arrays(module)
    ]
    return tuple(sorted(found, key=lambda one: one.padded_bytes, reverse=True))


def changes_layout(before: Shape, after: Shape) -> bool:
    """Whether two layouts of one array put its elements in another order. Dims of size 1 have no place in it."""
    return _places(before) != _places(after)


def layout_text(shape: Shape) -> str:
    """The shape as HLO writes it, without its memory space: ``bf16[8,128]{1,0:T(8,128)(2,1)}``."""
    order = ",".join(map(str, shape.minor_to_major))
    tiles = "".join(f"({','.join(map(str, tile))})" for tile in shape.tiles)
    return f"{shape}{{{order}{':T' if tiles else ''}{tiles}}}" if order or tiles else str(shape)


def tile_offset(tiles: tuple[tuple[int, ...], ...], position: tuple[int, ...]) -> int:
    """Where an element lies in a tile's memory, counted in elements; ``position`` is its place in the whole tile.

    Every further tile cuts the one before it: (row, column) in ``(8,128)(2,1)`` lies at 256 (row // 2) + 2 column +
    row % 2.
    """
    sizes, places = list(tiles[0]), list(position)
    for tile in tiles[1:]:
        head = len(sizes) - len(tile)
        cuts = list(zip(sizes[head:], places[head:], tile, strict=True))
        sizes = [*sizes[:head], *(-(-whole // size) for whole, _, size in cuts), *tile]
        places = [*places[:head], *(at // size for _, at, size in cuts), *(at % size for _, at, size in cuts)]
    return int(np.ravel_multi_index(places, sizes))


def _places(shape: Shape) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    return tuple(dim for dim in shape.order if shape.dims[dim] != 1), shape.tiles


def _arrays(module: Module) -> Iterator[tuple[Instruction, Shape]]:
    """Each array that an instruction makes, and the program's own parameters."""
    for computation in executed(module):
        for one in computation.instructions:
            is_argument = one.opcode == "parameter" and computation.name == module.entry
            if (one.opcode in _VIEWS and not is_argument) or one.opcode.endswith("-done"):
                continue
            made = one.shapes
            if one.opcode == "copy-start":
                made = made[:1]
            elif one.opcode.endswith("-start") and len(made) > 1:
                # A start's tuple also names its operands.
                made = made[1:2]
            yield from ((one, shape) for shape in made if shape.num_bytes)


def _before_and_after(module: Module, one: Instruction) -> tuple[Shape | None, Shape | None]:
    shapes = one.shapes
    if one.opcode == "copy-start":
        return (shapes[1], shapes[0]) if len(shapes) > 1 else (None, None)
    operand = module.computations[one.computation].by_name.get(one.operands[0])
    before = operand.shapes if operand else ()
    return (before[0], shapes[0]) if len(before) == len(shapes) == 1 else (None, None)
