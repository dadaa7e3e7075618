"""How often the loops of a compiled program run: stated by the compiler, or read from counter, bound and step."""

import re
from typing import NamedTuple

import msgspec

from meshwright.core.labels import AT_MOST_ONCE
from meshwright.hlo.module import Instruction, Module

_STATED = re.compile(r'known_trip_count[\\"]*:\s*\{\s*[\\"]*n[\\"]*:\s*[\\"]*(\d+)')
_INDEX = re.compile(r"\bindex=(\d+)")
_DIRECTION = re.compile(r"\bdirection=(\w\w)")
_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}
_SAME_VALUE = {"bitcast", "convert", "copy", "copy-done", "copy-start", "optimization-barrier", "reshape"}
"""Instructions whose result holds the number that they were given."""


class Loop(msgspec.Struct, frozen=True):
    """One loop of a module; ``total_trips`` counts the loops around it too. None: it depends on data."""

    name: str
    body: str
    trips: int | None
    total_trips: int | None
    depth: int
    op_name: str


class _Place(NamedTuple):
    """An instruction, inside the fusions (outermost first) that were entered to reach it."""

    at: Instruction
    fusions: tuple[Instruction, ...] = ()


def trip_count(module: Module, loop: Instruction) -> int:
    """How often a ``while`` runs its body.

    TPU modules state no count: it is ceil((bound - start) / step), from the comparison in the loop's condition, the
    values that the loop starts with and what its body adds. Raises ValueError, with the loop's name, where one of
    them is not a constant.
    """
    stated = _STATED.search(loop.attributes)
    if stated:
        return int(stated[1])
    found = _counted(module, loop)
    if found is None:
        raise ValueError(f"loop {loop.name} states no trip count that can be read; its collectives cannot be counted.")
    return found


def runs_at_most_once(module: Module, loop: Instruction) -> bool:
    """Whether a loop is a branch that keeps its buffers in place (`algebra.steps.AT_MOST_ONCE`): one turn or none."""
    if _STATED.search(loop.attributes) or _counted(module, loop) is not None:
        return False
    body = next((name for role, name in loop.called if role == "body"), "")
    inside = module.computations[body].instructions if body in module.computations else ()
    return any(AT_MOST_ONCE in one.op_name for one in (loop, *inside))


def loops(module: Module) -> tuple[Loop, ...]:
    """Every loop of a module, outer ones first."""
    found: list[Loop] = []
    for one in module:
        if one.opcode == "while":
            around = _around(module, one)
            counts = [_count_or_none(module, loop) for loop in (one, *around)]
            total = 1
            for count in counts:
                total = -1 if count is None or total < 0 else total * count
            body = dict(one.called)["body"]
            found.append(Loop(one.name, body, counts[0], None if total < 0 else total, len(around), one.op_name))
    return tuple(sorted(found, key=lambda loop: loop.depth))


def times_run(module: Module, computation: str) -> int:
    """How often a computation runs in one call of the module; loops that depend on data count once."""
    times = 1
    caller = module.callers.get(computation)
    while caller is not None:
        if caller.opcode == "while":
            times *= _count_or_none(module, caller) or 1
        caller = module.callers.get(caller.computation)
    return times


def _around(module: Module, loop: Instruction) -> list[Instruction]:
    found, caller = [], module.callers.get(loop.computation)
    while caller is not None:
        if caller.opcode == "while":
            found.append(caller)
        caller = module.callers.get(caller.computation)
    return found


def _count_or_none(module: Module, loop: Instruction) -> int | None:
    try:
        return trip_count(module, loop)
    except ValueError:
        return None


def _counted(module: Module, loop: Instruction) -> int | None:
    called = dict(loop.called)
    test = _settled(module, _Place(module.computations[called["condition"]].root))
    direction = _DIRECTION.search(test.at.attributes)
    if test.at.opcode != "compare" or direction is None or direction[1] not in _MIRRORED:
        return None
    sides = [_settled(module, _operand(module, test, number)) for number in (0, 1)]
    order = direction[1]
    for counter, bound, way in ((sides[0], sides[1], order), (sides[1], sides[0], _MIRRORED[order])):
        index = _element(module, counter)
        step = None if index is None else _step(module, called["body"], index)
        if index is None or not step:
            continue
        start = _constant(module, _initial(module, loop, index))
        limit = _constant(module, _unchanged(module, loop, bound))
        if start is not None and limit is not None:
            return _trips(start, limit, step, way)
    return None


def _trips(start: int, limit: int, step: int, way: str) -> int | None:
    if (way in ("LT", "LE")) != (step > 0) and way != "NE":
        return None
    distance = limit - start + (1 if way == "LE" else -1 if way == "GE" else 0)
    if way == "NE" and distance % step:
        return None
    return max(0, -(-distance // step))


def _settled(module: Module, place: _Place) -> _Place:
    """Where a value comes from, through copies, tuples and fusions."""
    while True:
        one = place.at
        if one.opcode in _SAME_VALUE and one.operands:
            place = _operand(module, place, 0)
        elif one.opcode == "fusion":
            inside = module.computations[dict(one.called)["calls"]]
            place = _Place(inside.root, (*place.fusions, one))
        elif one.opcode == "parameter" and place.fusions:
            *outer, fusion = place.fusions
            operand = fusion.operands[int(one.literal)]
            place = _Place(module.computations[fusion.computation].by_name[operand], tuple(outer))
        elif one.opcode == "get-tuple-element":
            whole = _settled(module, _operand(module, place, 0))
            if whole.at.opcode != "tuple":
                return place
            place = _operand(module, whole, _index(one))
        else:
            return place


def _operand(module: Module, place: _Place, number: int) -> _Place:
    computation = module.computations[place.at.computation]
    return _Place(computation.by_name[place.at.operands[number]], place.fusions)


def _index(one: Instruction) -> int:
    found = _INDEX.search(one.attributes)
    assert found, one
    return int(found[1])


def _element(module: Module, place: _Place) -> int | None:
    """Which element of its computation's only parameter a value is; None where it is something else."""
    if place.at.opcode != "get-tuple-element":
        return None
    whole = _settled(module, _operand(module, place, 0))
    return _index(place.at) if whole.at.opcode == "parameter" and not whole.fusions else None


def _constant(module: Module, place: _Place | None) -> int | None:
    if place is None:
        return None
    settled = _settled(module, place).at
    try:
        return int(settled.literal) if settled.opcode == "constant" else None
    except ValueError:
        return None


def _initial(module: Module, loop: Instruction, index: int) -> _Place | None:
    """The value that element ``index`` of a loop's state starts with, through the loops around that pass it on."""
    state = _settled(module, _operand(module, _Place(loop), 0))
    if state.at.opcode != "tuple":
        return None
    return _outermost(module, _settled(module, _operand(module, state, index)))


def _unchanged(module: Module, loop: Instruction, bound: _Place) -> _Place | None:
    """A bound as it was before the loop, where the body passes it on as it is."""
    index = _element(module, bound)
    if index is None:
        return bound
    return _initial(module, loop, index) if _passed_on(module, dict(loop.called)["body"], index) else None


def _outermost(module: Module, place: _Place) -> _Place | None:
    index = _element(module, place)
    caller = module.callers.get(place.at.computation)
    if index is None or caller is None or caller.opcode != "while":
        return place
    passed = _passed_on(module, dict(caller.called)["body"], index)
    return _initial(module, caller, index) if passed else None


def _passed_on(module: Module, body: str, index: int) -> bool:
    result = _result(module, body, index)
    return result is not None and _element(module, result) == index


def _result(module: Module, body: str, index: int) -> _Place | None:
    root = _settled(module, _Place(module.computations[body].root))
    return _settled(module, _operand(module, root, index)) if root.at.opcode == "tuple" else None


def _step(module: Module, body: str, index: int) -> int | None:
    """What a loop's body adds to element ``index`` of its state; None where it is not one constant."""
    result = _result(module, body, index)
    if result is None or result.at.opcode not in ("add", "subtract"):
        return None
    sides = [_settled(module, _operand(module, result, number)) for number in (0, 1)]
    for number, (counter, added) in enumerate((sides, sides[::-1])):
        amount = _constant(module, added)
        if _element(module, counter) == index and amount is not None:
            if result.at.opcode == "add":
                return amount
            return -amount if number == 0 else None
    return None
