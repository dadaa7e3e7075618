"""Trip counts of the loops of a compiled program: stated by the compiler, or computed from counter, bound and step."""

import math
import re
from typing import NamedTuple

import msgspec

from meshwright.core.labels import AT_MOST_ONCE, FURTHER_ROUNDS
from meshwright.hlo.module import Instruction, Module

_STATED = re.compile(r'known_trip_count[\\"]*:\s*\{\s*[\\"]*n[\\"]*:\s*[\\"]*(\d+)')
_WHOLE = re.compile(r"\s*[+-]?\d+\s*")
_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}
_SAME_VALUE = {"bitcast", "convert", "copy", "copy-done", "copy-start", "optimization-barrier", "reshape"}
"""Opcodes whose result has the value of their operand."""


class Loop(msgspec.Struct, frozen=True):
    """One loop of a module; ``total_trips`` is the product with the trips of the loops around it. None: unknown."""

    name: str
    body: str
    trips: int | None
    total_trips: int | None
    depth: int
    op_name: str


class _Value(NamedTuple):
    """The result of an instruction, and the fusions (outermost first) that were entered to reach it."""

    module: Module
    at: Instruction
    fusions: tuple[Instruction, ...] = ()

    def operand(self, number: int) -> "_Value":
        """Returns operand ``number`` of the instruction."""
        return self._replace(at=self.module.operand(self.at, number))

    def settled(self, number: int | None = None) -> "_Value":
        """Traces the value, or operand ``number``, back through copies, tuples and fusions."""
        value = self if number is None else self.operand(number)
        while True:
            instruction = value.at
            if instruction.opcode in _SAME_VALUE and instruction.operands:
                value = value.operand(0)
            elif instruction.opcode == "fusion":
                value = _Value(self.module, self.module.body(instruction).root, (*value.fusions, instruction))
            elif instruction.opcode == "parameter" and value.fusions:
                *outer_ops, fusion = value.fusions
                value = _Value(self.module, fusion, tuple(outer_ops)).operand(instruction.number(instruction.literal))
            elif instruction.opcode == "get-tuple-element":
                source_value = value.settled(0)
                if source_value.at.opcode != "tuple":
                    return value
                value = source_value.operand(instruction.number(instruction.attribute("index")))
            else:
                return value

    @property
    def element(self) -> int | None:
        """Index of the value in the computation's only parameter; None if it is not an element of it."""
        if self.at.opcode != "get-tuple-element":
            return None
        state = self.settled(0)
        return (
            self.at.number(self.at.attribute("index")) if state.at.opcode == "parameter" and not state.fusions else None
        )

    @property
    def number(self) -> int | None:
        """The value of an integer constant; None for other values."""
        source = self.settled().at
        return int(source.literal) if source.opcode == "constant" and _WHOLE.fullmatch(source.literal) else None

    def before(self, loop: Instruction | None) -> "_Value | None":
        """Traces the value out of ``loop`` and the loops around it; None if a loop changes it."""
        index = self.element
        if index is None or loop is None or loop.opcode != "while":
            return self
        assigned_value = _made(self.module, loop, index)
        return _initial(self.module, loop, index) if assigned_value and assigned_value.element == index else None


def trip_count(module: Module, loop: Instruction) -> int | None:
    """Returns how often a ``while`` runs its body; None if that cannot be read.

    TPU modules state no count: it is ceil((bound - start) / step), from the comparison in the loop's condition, the
    initial values and what its body adds, all of which must be constants.
    """
    if stated_match := _STATED.search(loop.attributes):
        return int(stated_match[1])
    compare_value = _Value(module, module.body(loop, "condition").root).settled()
    given_direction = compare_value.at.attribute("direction")
    if compare_value.at.opcode != "compare" or given_direction not in _MIRRORED:
        return None
    left, right = compare_value.settled(0), compare_value.settled(1)
    for counter, bound, direction in ((left, right, given_direction), (right, left, _MIRRORED[given_direction])):
        index = counter.element
        step_size = None if index is None else _step(module, loop, index)
        if index is None or not step_size:
            continue
        start_value, limit_value = _initial(module, loop, index), bound.before(loop)
        if start_value and limit_value and start_value.number is not None and limit_value.number is not None:
            return _trips(start_value.number, limit_value.number, step_size, direction)
    return None


def runs_at_most_once(module: Module, loop: Instruction) -> bool:
    """True if a loop of unknown count runs once or never, as its scope says (`core.labels.AT_MOST_ONCE`)."""
    return trip_count(module, loop) is None and _in_scope(module, loop, AT_MOST_ONCE)


def runs_further_rounds(module: Module, loop: Instruction) -> bool:
    """True for a loop over further rounds of an exchange (`core.labels.FURTHER_ROUNDS`): none run if loads are even."""
    return loop.opcode == "while" and trip_count(module, loop) is None and _in_scope(module, loop, FURTHER_ROUNDS)


def _in_scope(module: Module, loop: Instruction, scope: str) -> bool:
    """True if a loop's name, or every name in the body of a loop without a name, contains a scope."""
    body = module.computations.get(dict(loop.called).get("body", ""))
    op_names = [instruction.op_name for instruction in (body.instructions if body else ()) if instruction.op_name]
    return all(scope in name for name in ([loop.op_name] if loop.op_name else op_names or [""]))


def loops(module: Module) -> tuple[Loop, ...]:
    """Returns every loop of a module, outer ones first."""
    rows: list[Loop] = []
    for inner in module:
        if inner.opcode == "while":
            outers = [caller for caller in module.around(inner.computation) if caller.opcode == "while"]
            trips = [trip_count(module, loop) for loop in (inner, *outers)]
            known_counts = [count for count in trips if count is not None]
            total_trips = math.prod(known_counts) if len(known_counts) == len(trips) else None
            rows.append(Loop(inner.name, dict(inner.called)["body"], trips[0], total_trips, len(outers), inner.op_name))
    return tuple(sorted(rows, key=lambda loop: loop.depth))


def times_run(module: Module, computation: str) -> int:
    """Returns the product of the trip counts of the loops around one caller of a computation; an unknown count is 1."""
    loops_around = (caller for caller in module.around(computation) if caller.opcode == "while")
    return math.prod(num_trips for loop in loops_around if (num_trips := trip_count(module, loop)) is not None)


def _trips(start: int, limit: int, step: int, direction: str) -> int | None:
    if (direction in ("LT", "LE")) != (step > 0) and direction != "NE":
        return None
    distance = limit - start + (1 if direction == "LE" else -1 if direction == "GE" else 0)
    if direction == "NE" and distance % step:
        return None
    return max(0, -(-distance // step))


def _initial(module: Module, loop: Instruction, index: int) -> _Value | None:
    """Returns the initial value of element ``index`` of a loop's state, traced out of the loops around it, or None."""
    state = _Value(module, loop).settled(0)
    if state.at.opcode != "tuple":
        return None
    value = state.settled(index)
    return value.before(module.callers.get(value.at.computation))


def _made(module: Module, loop: Instruction, index: int) -> _Value | None:
    """Returns the value that a loop's body assigns to element ``index`` of its state; None if that is no tuple."""
    root = _Value(module, module.body(loop, "body").root).settled()
    return root.settled(index) if root.at.opcode == "tuple" else None


def _step(module: Module, loop: Instruction, index: int) -> int | None:
    """Returns the constant that a loop's body adds to element ``index`` of its state; None if it adds none."""
    assigned_value = _made(module, loop, index)
    if assigned_value is None or assigned_value.at.opcode not in ("add", "subtract"):
        return None
    left, right, is_add = assigned_value.settled(0), assigned_value.settled(1), assigned_value.at.opcode == "add"
    if left.element == index and right.number is not None:
        return right.number if is_add else -right.number
    return left.number if is_add and right.element == index else None
