"""What kind of work an instruction is, and what bounds it: the classes that a profile adds seconds up in."""

from typing import Literal, get_args

from meshwright.algebra.ops import step_kinds
from meshwright.algebra.steps import Step
from meshwright.core.dims import COLLECTIVES
from meshwright.core.labels import StepLabel
from meshwright.hlo.collectives import KINDS
from meshwright.hlo.module import Instruction, Module
from meshwright.hlo.products import is_product

OpClass = Literal[
    "contraction", "attention", "normalisation", "elementwise", "embedding", "optimizer", "collective", "copy"
]
CLASSES: tuple[OpClass, ...] = get_args(OpClass)

Bound = Literal["compute", "memory", "communication"]

_MOVES = frozenset(
    ("copy", "copy-start", "copy-done", "transpose", "bitcast", "bitcast-convert", "reshape", "slice", "dynamic-slice",
     "dynamic-update-slice", "concatenate", "pad", "parameter", "constant", "tuple", "get-tuple-element", "broadcast",
     "convert", "reverse", "async-start", "async-update", "async-done")
)  # fmt: skip
"""Instructions that compute nothing; arithmetic on scalars beside them finds places."""
_PLACES = frozenset(("add", "subtract", "multiply", "compare", "select", "clamp", "maximum", "minimum", "and", "or"))
_COLLECTIVES = (*KINDS, "send", "recv")
OUTSIDE = "outside the steps"
"""Where the seconds of instructions stand that carry no label."""


def part_name(block: str, phase: str) -> str:
    """``layer backward``; what belongs to the whole step has the phase alone."""
    return block if block in ("optimizer", "update") else f"{block} {phase}"


def part_of_step(step: Step) -> str:
    """The part that a derived step belongs to; the updates of all weights are the optimizer."""
    return "optimizer" if class_of_op(step.op) == "optimizer" else part_name(step.block, step.phase)


def is_collective(one: Instruction) -> bool:
    """Whether it moves bytes between devices, whole or as one half of an asynchronous pair."""
    return one.opcode.removesuffix("-start").removesuffix("-done") in _COLLECTIVES


def class_of(module: Module, one: Instruction, label: StepLabel | None) -> OpClass:
    """The class by what the instruction does where that is plain, else by the derived step that it belongs to."""
    if is_collective(one):
        return "collective"
    kind = class_of_op(label.op) if label else "elementwise"
    if kind in ("attention", "optimizer"):
        return kind
    if any(is_product(inner) for inner in module.fused(one)):
        return "contraction"
    if _only_moves(module, one):
        return "copy"
    if one.opcode in ("gather", "scatter"):
        return "embedding"
    # what the compiler puts beside a product is no product
    return "elementwise" if kind in ("contraction", "collective") and one.opcode != "custom-call" else kind


def class_of_op(op: str) -> OpClass:
    """The class of a derived step by its op: the group that the op states, or a collective."""
    if op in COLLECTIVES:
        return "collective"
    return "optimizer" if op == "optimizer" else step_kinds()[op].group


def _only_moves(module: Module, one: Instruction) -> bool:
    """Whether an instruction puts arrays elsewhere and computes nothing on them."""
    for inner in module.fused(one):
        if inner.opcode in _MOVES or (inner is one and inner.opcode == "fusion"):
            continue
        scalar = all(shape.num_elements == 1 for shape in inner.shapes)
        if not (scalar and inner.opcode in _PLACES):
            return False
    return True
