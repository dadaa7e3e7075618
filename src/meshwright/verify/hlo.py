"""Collectives of a compiled program: kind, bytes, mesh axes, and how often each runs."""

import math
import re
from collections.abc import Mapping

import msgspec
import numpy as np

ELEMENT_BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4,
    "s64": 8, "u64": 8, "f64": 8, "f8e4m3fn": 1, "f8e5m2": 1, "c64": 8, "c128": 16,
}  # fmt: skip

KINDS = {
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-reduce": "all_reduce",
    "all-to-all": "all_to_all",
    "collective-permute": "permute",
}

_COMPUTATION = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*\(.*\)\s*->.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s*(ROOT\s+)?%?([\w.\-]+)\s*=\s*(.*)$")
_SHAPE = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,]*)\]")
_CALLED = re.compile(r"(body|condition|calls|to_apply|branch_computations|called_computations)=(\{[^}]*\}|%?[\w.\-]+)")
_TRIPS = re.compile(r'known_trip_count[\\"]*:\s*\{\s*[\\"]*n[\\"]*:\s*[\\"]*(\d+)')
_EXPLICIT = re.compile(r"replica_groups=\{(\{[0-9,{} ]*\})\}")
_IOTA = re.compile(r"replica_groups=\[([0-9,]+)\]<=\[([0-9,]+)\](?:T\(([0-9,]+)\))?")
_NAMED = re.compile(r"replica_groups=mesh\[([^\]():]*)\]\s*\{([^}():]*)\}")
_AXIS = re.compile(r"'([^']+)'(?:=(\d+))?")
_PAIRS = re.compile(r"source_target_pairs=\{(\{[0-9,{} ]*\})\}")


class Collective(msgspec.Struct, frozen=True):
    """One collective of a program.

    ``full_bytes`` are those of the whole array on the group, per device: the result of an all-gather, the
    operand of a reduce-scatter, either of an all-reduce, the blocks of the whole group for an all-to-all.
    ``trips`` is how often it runs in one call of the program, ``axes`` the mesh axes that its groups span,
    ``num_arrays`` how many arrays it combines.
    """

    kind: str
    full_bytes: int
    axes: tuple[str, ...]
    trips: int
    num_arrays: int
    name: str
    in_conditional: bool = False

    @property
    def total_bytes(self) -> int:
        """Bytes over all the times that it runs."""
        return self.full_bytes * self.trips


class _Instruction(msgspec.Struct, frozen=True):
    name: str
    opcode: str
    text: str
    shape_text: str


def collectives(hlo_text: str, mesh: Mapping[str, int]) -> tuple[Collective, ...]:
    """Every collective of an optimised HLO module, with the trip counts of the loops around it.

    ``mesh`` maps axis to size, major to minor; the module's device numbers are taken to run over it
    row-major, as they do for a mesh built from ``jax.devices()`` in order. Raises ValueError for a loop
    whose trip count the module does not state.
    """
    computations, entry = _parse(hlo_text)
    shapes = {i.name: i.shape_text for body in computations.values() for i in body}
    found: list[Collective] = []
    _walk(entry, 1, False, computations, shapes, mesh, found)
    return tuple(found)


def _parse(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    computations: dict[str, list[_Instruction]] = {}
    entry, current = "", ""
    for line in text.splitlines():
        head = _COMPUTATION.match(line)
        if head and "=" not in line.split("(")[0]:
            current = head[2]
            computations[current] = []
            entry = current if head[1] else entry
            continue
        if current and (match := _INSTRUCTION.match(line)):
            shape, rest = _split_shape(match[3])
            opcode = rest.split("(", 1)[0].strip()
            computations[current].append(_Instruction(match[2], opcode, rest, shape))
    return computations, entry


def _split_shape(text: str) -> tuple[str, str]:
    """(result shape, rest) of the right-hand side of an instruction; a tuple shape is in parentheses."""
    if not text.startswith("("):
        shape, _, rest = text.partition(" ")
        return shape, rest
    depth = 0
    for index, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return text[: index + 1], text[index + 1 :].lstrip()
    return text, ""


def _walk(
    name: str,
    trips: int,
    conditional: bool,
    computations: Mapping[str, list[_Instruction]],
    shapes: Mapping[str, str],
    mesh: Mapping[str, int],
    found: list[Collective],
) -> None:
    for instruction in computations.get(name, []):
        kind = KINDS.get(instruction.opcode.removesuffix("-start"))
        if kind:
            found.append(_collective(kind, instruction, trips, conditional, shapes, mesh))
            continue
        inner = trips * _loop_trips(instruction) if instruction.opcode == "while" else trips
        for role, called in _CALLED.findall(instruction.text):
            if role == "condition":
                continue
            branch = conditional or instruction.opcode == "conditional"
            for target in re.findall(r"[\w.\-]+", called):
                if target in computations:
                    _walk(target, inner, branch, computations, shapes, mesh, found)


def _loop_trips(instruction: _Instruction) -> int:
    match = _TRIPS.search(instruction.text)
    if match is None:
        raise ValueError(f"loop {instruction.name} states no trip count; its collectives cannot be counted.")
    return int(match[1])


def _collective(
    kind: str,
    instruction: _Instruction,
    trips: int,
    conditional: bool,
    shapes: Mapping[str, str],
    mesh: Mapping[str, int],
) -> Collective:
    operands = re.findall(r"%([\w.\-]+)", instruction.text.split("),")[0])
    operand_bytes = [shape_bytes(shapes[o]) for o in operands if o in shapes]
    if kind == "all_gather" and not instruction.opcode.endswith("-start"):
        total = shape_bytes(instruction.shape_text)
    elif kind == "all_gather":
        total = shape_bytes(instruction.shape_text) - sum(operand_bytes)
    else:
        total = sum(operand_bytes)
    axes = _axes(instruction.text, mesh, permute=kind == "permute")
    num_arrays = len(operand_bytes)
    if kind == "all_to_all":
        size = math.prod(mesh[axis] for axis in axes)
        total *= size
        # an array may come as one operand, or as one for each device of the group
        num_arrays = max(1, num_arrays // size)
    return Collective(kind, total, axes, trips, num_arrays, instruction.name, conditional)


def shape_bytes(text: str) -> int:
    """Bytes of a shape such as ``f32[2,16]{1,0}`` or of all the shapes in a tuple."""
    return sum(
        ELEMENT_BYTES[dtype] * math.prod(int(n) for n in dims.split(",") if n)
        for dtype, dims in _SHAPE.findall(re.sub(r"/\*.*?\*/", "", text))
        if dtype in ELEMENT_BYTES
    )


def _groups(text: str, num_devices: int) -> list[list[int]]:
    """Device numbers of each replica group, in any of the three forms; all devices when not given."""
    explicit = _EXPLICIT.search(text)
    if explicit:
        return [[int(n) for n in group.split(",") if n.strip()] for group in re.findall(r"\{([^{}]*)\}", explicit[1])]
    iota = _IOTA.search(text)
    if iota:
        shape, source, order = ([int(n) for n in part.split(",")] if part else [] for part in iota.groups())
        numbers = np.arange(math.prod(source)).reshape(source)
        if order:
            numbers = numbers.transpose(order)
        return numbers.reshape(shape).tolist()
    named = _NAMED.search(text)
    if named:
        return _named_groups(named[1], named[2])
    if "replica_groups=mesh" in text or "replica_groups=@" in text:
        raise ValueError(f"replica groups in a form that is not known: {text[text.index('replica_groups') :][:120]}")
    return [list(range(num_devices))]


def _named_groups(mesh: str, axes: str) -> list[list[int]]:
    """Groups over named axes of a mesh that is written out, row-major: ``'data'=2,'tensor'=4`` and ``'tensor'``."""
    sizes = {name: int(size) for name, size in _AXIS.findall(mesh)}
    over = [list(sizes).index(name) for name, _ in _AXIS.findall(axes)]
    numbers = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    numbers = np.moveaxis(numbers, over, range(-len(over), 0))
    return numbers.reshape(-1, math.prod(numbers.shape[-len(over) :]) if over else 1).tolist()


def _axes(text: str, mesh: Mapping[str, int], *, permute: bool) -> tuple[str, ...]:
    """Mesh axes along which the members of a group (or the ends of a permute) differ."""
    shape = tuple(mesh.values())
    if permute:
        pairs = _PAIRS.search(text)
        groups = [[int(n) for n in p.split(",")] for p in re.findall(r"\{([^{}]*)\}", pairs[1])] if pairs else []
    else:
        groups = _groups(text, math.prod(shape))
    varies = np.zeros(len(shape), bool)
    for group in groups:
        places = np.array(np.unravel_index(group, shape))
        varies |= (places != places[:, :1]).any(axis=1)
    return tuple(axis for axis, differs in zip(mesh, varies, strict=True) if differs)
