"""The step nearest to a collective that lost its own label: XLA rewrites collectives, and forgets where they came from.

Between TPU slices it forgets all of them; where it combines gradients into one array, that one.
"""

from collections.abc import Callable, Sequence

from meshwright.core.labels import StepLabel
from meshwright.hlo.module import Instruction, Module

_Way = Callable[[Module, Instruction], Sequence[Instruction]]
MAX_STEPS_AWAY = 8
"""Instructions without a label that are looked through, in a row."""


def nearest_step(module: Module, one: Instruction, *, kind: str) -> StepLabel | None:
    """The label of the step that takes what a gather brings, or makes what others send; None if none is near.

    ``one`` is the collective as its computation runs it: the fusion that ends it, where it is in pieces.
    """
    gathers = kind in ("all_gather", "broadcast")
    ways = (_users, _makers) if gathers else (_makers, _users)
    return next((found for way in ways if (found := _search(module, one, way))), None)


def ending(module: Module, start: Instruction, collective: Instruction) -> Instruction:
    """The fusion that ends an asynchronous collective which the fusion ``start`` begins; itself where there is none."""
    marks = [collective.attribute("channel_id"), collective.attribute("frontend_attributes")]
    for one in module.computations[start.computation].instructions:
        if one.opcode != "fusion":
            continue
        inside = module.computations[dict(one.called)["calls"]].instructions
        ends = any("AsyncCollectiveDone" in i.attributes for i in inside if i.opcode == "custom-call")
        if ends and any([i.attribute("channel_id"), i.attribute("frontend_attributes")] == marks for i in inside):
            return one
    return start


def _search(module: Module, one: Instruction, way: _Way) -> StepLabel | None:
    """The first label met, the nearest first."""
    seen, edge = {(one.computation, one.name)}, [one]
    for _ in range(MAX_STEPS_AWAY):
        beyond = [b for known in edge for b in way(module, known) if (b.computation, b.name) not in seen]
        for other in beyond:
            if other.label and other.label.phase != "update":
                return other.label
        seen |= {(other.computation, other.name) for other in beyond}
        edge = beyond
    return None


def _users(module: Module, one: Instruction) -> Sequence[Instruction]:
    return [] if one.is_root else module.computations[one.computation].users.get(one.name, ())


def _makers(module: Module, one: Instruction) -> Sequence[Instruction]:
    """The operands; of an element of a loop's state, or of its result, what the loop's body makes of it."""
    computation = module.computations[one.computation]
    operands = [computation.by_name[name] for name in one.operands if name in computation.by_name]
    if one.opcode != "get-tuple-element" or not operands:
        return operands
    whole, index = operands[0], int(one.attribute("index"))
    if whole.opcode == "tuple":
        return [computation.by_name[whole.operands[index]]]
    body = computation
    if whole.opcode == "while":
        body = module.computations[dict(whole.called)["body"]]
    elif whole.opcode != "parameter":
        return operands
    made = body.root.operands[index : index + 1] if body.root.opcode == "tuple" else ()
    return [body.by_name[name] for name in made]
