"""HLO text as data: a module, its computations, their instructions."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from graphlib import TopologicalSorter
from typing import Any

import msgspec

from meshwright.core.errors import InputError
from meshwright.core.labels import StepLabel, find_label
from meshwright.hlo.shapes import Shape, element_shape, parse_shapes

_COMPUTATION = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*\)\s*->.*)?\{\s*$")
_END = re.compile(r"^\s*\}(, execution_thread=.*)?\s*$")
_INSTRUCTION = re.compile(r"^\s*(ROOT\s+)?%?([\w.\-]+)\s*=\s*([^\s(]\S*)?")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]()]')
_OPERAND = re.compile(r"%([\w.\-]+(?:#\d+)?)")
_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_FRAME_ID = re.compile(r"\bstack_frame_id=(\d+)")
_SOURCE = re.compile(r'\bsource_file="([^"]*)"(?:\s+source_line=(\d+))?')
_CALLED = re.compile(
    r"\b(body|condition|calls|to_apply|branch_computations|called_computations|true_computation|false_computation)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_TARGET = re.compile(r'\bcustom_call_target="([^"]*)"')
_NAMES = re.compile(r"[\w.\-]+")
_OF_HEADER = re.compile(r"\b(num_partitions|replica_count)=(\d+)")
_CHAIN = re.compile(r'\bchain_id="(\d+)"')
_ROW = re.compile(r'^(\d+) (?:"(.*)"|\{(.*)\})\s*$')
_FIELD = re.compile(r"(\w+)=(\d+)")

CONTAINERS = ("while", "conditional", "call")
"""Opcodes that only run other computations."""
LINES = "lines"
"""Name of the computation for instructions that a text has outside of any computation."""
NO_WORK = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")
"""Opcodes that neither compute nor move data."""


class SourceLine(msgspec.Struct, frozen=True):
    """One line of Python source."""

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f" in {self.function}" if self.function else "")


class Instruction(msgspec.Struct, frozen=True, dict=True):
    """One instruction: ``%name = shape opcode(operands), attributes``.

    ``shape`` and ``attributes`` are the module's own text; ``literal`` is the text in the parentheses of a constant or
    a parameter, which have no operands.
    """

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    attributes: str
    computation: str
    is_root: bool = False
    literal: str = ""

    def number(self, text: str) -> int:
        """Returns ``text``, a part of the instruction, as an integer. Raises InputError unless it is decimal digits."""
        if not text.isdecimal():
            raise InputError(f"{self.opcode} {self.name} has {text[:40]!r}, not a number. Give the whole text.")
        return int(text)

    def attribute(self, key: str) -> str:
        """Returns one attribute as written, with braces and quotes; "" if it is not set."""
        key_start = f", {self.attributes}".find(f", {key}=")
        if key_start < 0:
            return ""
        rest_text = self.attributes[key_start + len(key) + 1 :]
        return rest_text[: _closing(rest_text, 0)] if rest_text[:1] in '{["' else rest_text.split(", ", 1)[0]

    @cached_property
    def op_name(self) -> str:
        """Path of the JAX operations from which the instruction was compiled; empty if it has none."""
        match = _OP_NAME.search(self.attributes)
        return match[1].replace('\\"', '"') if match else ""

    @cached_property
    def label(self) -> StepLabel | None:
        """The derived step that the instruction belongs to; None if it has no label."""
        return find_label(self.op_name)

    @property
    def target(self) -> str:
        """Library or kernel that a custom call invokes; empty for other instructions."""
        match = _TARGET.search(self.attributes) if self.opcode == "custom-call" else None
        return match[1] if match else ""

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The arrays of the result."""
        return parse_shapes(self.shape)

    @cached_property
    def async_key(self) -> str:
        """Key that all pieces of one asynchronous TPU collective share; empty for other instructions."""
        if "async_collective_fusion_config" not in self.attributes:
            return ""
        chain = _CHAIN.search(self.attributes)
        return f"{self.opcode} {self.attribute('channel_id')} {chain[1] if chain else ''}"

    @cached_property
    def called(self) -> tuple[tuple[str, str], ...]:
        """(role, computation) of each computation that it calls: a loop's body and condition, a fusion's ``calls``."""
        calls = _CALLED.findall(self.attributes)
        return tuple((role, name) for role, names_text in calls for name in _NAMES.findall(names_text))


class Computation(msgspec.Struct, frozen=True, dict=True):
    """A named list of instructions, in the module's order (of execution, where the module is scheduled)."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        """Instruction by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    @cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        """Name -> the instructions that read it, in the computation's order."""
        readers_by_name: dict[str, list[Instruction]] = {instruction.name: [] for instruction in self.instructions}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                readers_by_name.setdefault(operand, []).append(instruction)
        return {name: tuple(users) for name, users in readers_by_name.items()}

    @property
    def root(self) -> Instruction:
        """The instruction whose value the computation returns."""
        return next((instruction for instruction in self.instructions if instruction.is_root), self.instructions[-1])

    @cached_property
    def parameters(self) -> Mapping[int, Instruction]:
        """Parameter instruction by its number."""
        return {i.number(i.literal): i for i in self.instructions if i.opcode == "parameter" and i.literal}


class Module(msgspec.Struct, frozen=True, dict=True):
    """A whole HLO module, run by ``num_partitions`` x ``num_replicas`` devices (of each slice, if it has several)."""

    name: str
    computations: Mapping[str, Computation]
    entry: str
    num_partitions: int
    num_replicas: int
    frames: Mapping[int, tuple[SourceLine, int]]
    """Source line by frame number, with the number of the calling frame (0: none)."""

    @property
    def num_devices(self) -> int:
        """Devices that run the module together."""
        return self.num_partitions * self.num_replicas

    def __iter__(self) -> Iterator[Instruction]:
        for computation in self.computations.values():
            yield from computation.instructions

    @cached_property
    def num_instructions(self) -> int:
        """Instructions of all computations, those inside fusions included."""
        return sum(len(computation.instructions) for computation in self.computations.values())

    @cached_property
    def callers(self) -> Mapping[str, Instruction]:
        """Computation -> one instruction that calls it, the last one in the text."""
        return {name: caller for caller in self for _, name in caller.called}

    def around(self, computation: str) -> Iterator[Instruction]:
        """Yields the instructions that run a computation, from its caller outwards to the entry."""
        while (caller := self.callers.get(computation)) is not None:
            yield caller
            computation = caller.computation

    def body(self, one: Instruction, role: str = "calls") -> Computation:
        """Returns the computation that an instruction calls as its ``role``. Raises InputError if there is none."""
        name = dict(one.called).get(role, "")
        if name not in self.computations:
            raise InputError(f"{one.opcode} {one.name} calls {name!r}, which the text lacks. Give the whole text.")
        return self.computations[name]

    def operand(self, one: Instruction, number: int) -> Instruction:
        """Returns the instruction that computes an operand. Raises InputError if there is no operand of this number."""
        if number >= len(one.operands):
            raise InputError(f"{one.opcode} {one.name} has no operand {number}. Give the whole text.")
        return self.computations[one.computation].by_name[one.operands[number]]

    def inside(self, one: Instruction) -> tuple[Instruction, ...]:
        """Returns the instructions of all computations that an instruction calls."""
        bodies = (self.computations.get(name) for _, name in one.called)
        return tuple(inner for body in bodies if body for inner in body.instructions)

    def fused(self, one: Instruction) -> Iterator[Instruction]:
        """Yields the instruction and all instructions fused into it, at any depth."""
        yield one
        if one.opcode not in CONTAINERS:
            for inner in self.inside(one):
                yield from self.fused(inner)

    def find(self, name: str) -> Instruction | None:
        """Returns the instruction of this name, from the entry computation if it has one; None if there is none."""
        bare_name = name.removeprefix("%")
        computations = [self.computations[self.entry], *self.computations.values()] if self.entry else []
        return next((c.by_name[bare_name] for c in computations if bare_name in c.by_name), None)

    def source(self, instruction: Instruction) -> tuple[SourceLine, ...]:
        """Returns an instruction's Python source lines, innermost call first; empty if the module lists none."""
        line_match = _SOURCE.search(instruction.attributes)
        if line_match:
            return (SourceLine(file=line_match[1], line=int(line_match[2] or 0)),)
        frame_match = _FRAME_ID.search(instruction.attributes)
        frame_number, line_by_frame = int(frame_match[1]) if frame_match else 0, dict[int, SourceLine]()
        while frame_number in self.frames and frame_number not in line_by_frame:
            line_by_frame[frame_number], parent_number = self.frames[frame_number]
            frame_number = parent_number
        return tuple(line_by_frame.values())


def parse_module(text: str) -> Module:
    """Parses HLO text, or bare instructions, whose unknown operands become parameters; else raises ValueError."""
    computations: dict[str, Computation] = {}
    entry_name, lines = "", text.splitlines()
    for name, is_entry, body_lines in _bodies(lines):
        if body := tuple(_with_elements(i for line in body_lines if (i := _instruction(line, name)))):
            computations[name] = Computation(name, body)
        entry_name = name if is_entry else entry_name
    if not computations and (instructions := [i for line in lines if (i := _instruction(line, LINES)) and i.shapes]):
        shape_of = {name: shape for shape, name in _TYPED.findall(text) if name not in {i.name for i in instructions}}
        parameters = [Instruction(name, "parameter", shape, (), "", LINES) for name, shape in shape_of.items()]
        computations[LINES] = Computation(LINES, (*parameters, *instructions))
    if not computations:
        raise ValueError("the text holds no HLO computation.")
    header = next((line for line in lines if line.startswith("HloModule")), "HloModule ?")
    header_values = dict(_OF_HEADER.findall(header))
    return Module(
        name=f"{header} ?".split()[1].rstrip(","),
        computations=computations,
        entry=entry_name or list(computations)[-1],
        num_partitions=int(header_values.get("num_partitions", 1)),
        num_replicas=int(header_values.get("replica_count", 1)),
        frames=_frames(lines),
    )


NEEDED = {"fusion": ("calls",), "while": ("body", "condition"), "call": ("to_apply",), "get-tuple-element": ("index",)}
"""Opcode -> attributes that the instruction must have."""
_TYPED = re.compile(r"([a-z]\w*\[[^\s\[\]]*\](?:\{[^{}]*\})?) %([\w.\-]+)")
_FAR = re.compile(r"(replica_groups|source_target_pairs)=\S*\d{9}")
_READS = re.compile(r"copy|-done|element|while|slice|send|gather|reduce|all-to|permute|broadcast|bitcast|convert")
MOST_NESTED, MOST_EXPANDED, MOST_DEVICES = 100, 10_000_000, 10_000_000
"""Limits on the nesting of computations, on instructions including all that they call, and on devices."""


def require_readable(module: Module) -> Module:
    """Returns the module. Raises ValueError if it is damaged, too large, or has computations that call themselves."""
    if module.num_devices > MOST_DEVICES:
        raise ValueError(f"it is for {module.num_devices:.2g} devices; at most {MOST_DEVICES:.0e} are read.")
    callees = {name: [n for i in c.instructions for _, n in i.called] for name, c in module.computations.items()}
    nesting_of: dict[str, tuple[int, int]] = {}
    # a part of a program calls computations that its text lacks
    if LINES in callees and not all(shape.is_possible for instruction in module for shape in instruction.shapes):
        raise ValueError("an instruction has a layout that does not fit its dims.")
    for name in filter(callees.__contains__, TopologicalSorter(callees).static_order() if LINES not in callees else ()):
        callee_pairs = [nesting_of[callee] for callee in callees[name] if callee in nesting_of]
        depth, size = 1 + max((pair[0] for pair in callee_pairs), default=0), sum(pair[1] for pair in callee_pairs)
        nesting_of[name] = depth, size + len(module.computations[name].instructions)
        if depth > MOST_NESTED or size > MOST_EXPANDED:
            raise ValueError(f"{name} has computations nested {depth} deep, with {size:.0e} instructions in them.")
        names_before = set[str]()
        for op in module.computations[name].instructions:
            index_text = op.attribute("index") or op.literal if op.opcode == "parameter" else "0"
            faults = {
                "reads a result that does not come before it": not names_before.issuperset(op.operands),
                "lacks an attribute that it needs": not all(map(op.attribute, NEEDED.get(op.opcode, ()))),
                "names a device of nine digits": _FAR.search(op.attributes),
                "has no operand": not op.operands and _READS.search(op.opcode),
                "has no whole number as its index": not index_text.isdecimal(),
                "has a layout that does not fit its dims": not all(shape.is_possible for shape in op.shapes),
            }
            if fault := next((fault for fault, holds in faults.items() if holds), ""):
                raise ValueError(f"{op.opcode} {op.name} {fault}.")
            names_before.add(op.name)
    return module


def _frames(lines: Sequence[str]) -> dict[int, tuple[SourceLine, int]]:
    """Reads a module's source tables: frame number -> (source line, number of the calling frame, 0 for none)."""
    table_names = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
    tables: dict[str, dict[int, Any]] = {name: {} for name in table_names}
    table_name = ""
    for line in lines:
        if line.startswith(("%", "ENTRY")):
            break
        table_name = line if line in tables else table_name
        if table_name and (row_match := _ROW.match(line)) and (row_match[3] is None) == table_name.endswith("Names"):
            tables[table_name][int(row_match[1])] = (
                row_match[2] if row_match[3] is None else {key: int(n) for key, n in _FIELD.findall(row_match[3])}
            )
    file_of, function_of, location_of, row_of = tables.values()
    frames = {}
    for frame_number, row in row_of.items():
        location = location_of.get(row.get("file_location_id", 0), {})
        file = file_of.get(location.get("file_name_id", 0), "?")
        frame = SourceLine(file, location.get("line", 0), function_of.get(location.get("function_name_id", 0), ""))
        # XLA writes parents one higher than frame numbers: 1 is none.
        frames[frame_number] = frame, row.get("parent_frame_id", 1) - 1
    return frames


def _bodies(lines: Sequence[str]) -> Iterator[tuple[str, bool, list[str]]]:
    """Yields (name, is entry, lines of instructions) of each computation.

    An instruction may continue on the next lines: the metadata of a Pallas kernel has line breaks.
    """
    name, is_entry, body_lines = "", False, list[str]()
    for line in lines:
        if name and _END.match(line):
            yield name, is_entry, body_lines
            name = ""
        elif not name:
            head_match = _COMPUTATION.match(line)
            if head_match and "=" not in line.split("(", 1)[0]:
                name, is_entry, body_lines = head_match[2], bool(head_match[1]), []
        elif line[:1].isspace() and _INSTRUCTION.match(line):
            body_lines.append(line)
        elif body_lines and line:
            body_lines[-1] += f" {line}"


def _instruction(line: str, computation: str) -> Instruction | None:
    head_match = _INSTRUCTION.match(line)
    if head_match is None:
        return None
    # a tuple's shape is in parentheses
    shape_end = head_match.end() if head_match[3] else _closing(line, head_match.end())
    opcode_match = _OPCODE.match(line, shape_end)
    if opcode_match is None:
        return None
    operands_end = _closing(line, opcode_match.end() - 1)
    operands_text = line[opcode_match.end() : operands_end].removesuffix(")")
    has_operands = opcode_match[1] not in ("constant", "parameter")
    operands = _OPERAND.findall(operands_text)
    if has_operands and not operands:
        # The short form omits percent signs.
        word_lists = (text.split() for text in operands_text.split(","))
        operands = [words[-1] for words in word_lists if words and _NAMES.fullmatch(words[-1])]
    return Instruction(
        name=head_match[2],
        opcode=opcode_match[1],
        shape=head_match[3] or line[head_match.end() : shape_end],
        operands=tuple(operands) if has_operands else (),
        attributes=line[operands_end:].lstrip(", ").rstrip(),
        computation=computation,
        is_root=bool(head_match[1]),
        literal="" if has_operands else operands_text,
    )


def _with_elements(instructions: Iterable[Instruction]) -> Iterator[Instruction]:
    """Yields the instructions; if newer texts abbreviate an element of a tuple as ``%state#2``, the get-tuple-element
    comes before its first reader."""
    shape_of = dict[str, str]()
    for instruction in instructions:
        for element in (name for name in instruction.operands if "#" in name and name not in shape_of):
            source, index = element.split("#")
            shape_of[element] = element_shape(shape_of.get(source, ""), int(index))
            attributes, computation = f"index={index}", instruction.computation
            yield Instruction(element, "get-tuple-element", shape_of[element], (source,), attributes, computation)
        shape_of[instruction.name] = instruction.shape
        yield instruction


def _closing(text: str, start: int) -> int:
    """Returns the end of the bracket or quote that opens at ``start``; the end of the text if it does not close."""
    depth = 0
    for match in _BRACKET.finditer(text, start):
        if match[0][0] != '"':
            depth += 1 if match[0] in "{[(" else -1
        if depth == 0:
            return match.end()
    return len(text)
