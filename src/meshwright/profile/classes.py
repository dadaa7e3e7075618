"""Classifies instructions and derived steps by kind of work, for the sums of a profile."""

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
"""Opcodes that only move data. Opcodes of ``_OFFSETS`` on scalars count as moves too: they compute offsets."""
_OFFSETS = frozenset(("add", "subtract", "multiply", "compare", "select", "clamp", "maximum", "minimum", "and", "or"))
_COLLECTIVES = (*KINDS, "send", "recv")
OUTSIDE = "outside the steps"
"""Name of the part that sums instructions without a step label."""


def part_name(block: str, phase: str) -> str:
    """Returns block and phase, ``layer backward``; for the blocks ``optimizer`` and ``update`` only the block."""
    return block if block in ("optimizer", "update") else f"{block} {phase}"


def part_of_step(step: Step) -> str:
    """Returns the part of a derived step; updates of weights belong to the optimizer."""
    return "optimizer" if class_of_op(step.op) == "optimizer" else part_name(step.block, step.phase)


def is_collective(one: Instruction) -> bool:
    """True for a collective, synchronous or one half of an asynchronous pair."""
    return one.opcode.removesuffix("-start").removesuffix("-done") in _COLLECTIVES


def class_of(module: Module, one: Instruction, label: StepLabel | None) -> OpClass:
    """Returns an instruction's kind of work, from its operations where they decide, else from its derived step."""
    if is_collective(one):
        return "collective"
    kind = class_of_op(label.op) if label else "elementwise"
    if kind in ("attention", "optimizer"):
        return kind
    is_row_product = {"multiply", "reduce"} <= {inner.opcode for inner in module.fused(one)}  # a product of one row
    if (is_row_product and kind == "contraction") or any(is_product(inner) for inner in module.fused(one)):
        return "contraction"
    if _only_moves(module, one):
        return "copy"
    if one.opcode in ("gather", "scatter"):
        return "embedding"
    # other instructions that carry a product's label are not products
    return "elementwise" if kind in ("contraction", "collective") and one.opcode != "custom-call" else kind


def class_of_op(op: str) -> OpClass:
    """Returns the kind of work of a derived step's op: "collective", "optimizer", or the op's group."""
    if op in COLLECTIVES:
        return "collective"
    return "optimizer" if op == "optimizer" else step_kinds()[op].group


def _only_moves(module: Module, instruction: Instruction) -> bool:
    """True if an instruction moves arrays and computes nothing on them."""
    for inner in module.fused(instruction):
        if inner.opcode in _MOVES or (inner is instruction and inner.opcode == "fusion"):
            continue
        is_scalar = all(shape.num_elements == 1 for shape in inner.shapes)
        if not (is_scalar and inner.opcode in _OFFSETS):
            return False
    return True
