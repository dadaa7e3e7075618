"""What kind of work an instruction is, and what bounds it: the classes that a profile adds seconds up in."""

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Literal, get_args

import msgspec

from meshwright.algebra.ops import step_kinds
from meshwright.algebra.steps import COLLECTIVES, Step
from meshwright.core.labels import StepLabel
from meshwright.hlo.module import CONTAINERS, Instruction
from meshwright.hlo.products import is_product
from meshwright.profile.hlo import Program, is_collective

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
_NUMBER = re.compile(r"[.\d]+$")
OUTSIDE = "outside the steps"
"""Where the seconds of instructions stand that carry no label."""


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """What a profile knows of one instruction: FLOPs and bytes are those of one execution on one device."""

    label: StepLabel | None
    kind: OpClass
    bound: Bound
    flops: float
    hbm_bytes: float
    source: str

    @property
    def part(self) -> str:
        """Block and phase: ``layer backward``, ``optimizer``."""
        if self.label is None:
            return OUTSIDE
        return part_of(self.label.block, self.label.phase)

    @property
    def step(self) -> str:
        """The derived step, or the operation of the source where there is none."""
        return str(self.label) if self.label else f"{OUTSIDE}: {self.source}"


def part_of(block: str, phase: str) -> str:
    """``layer backward``; what belongs to the whole step has the phase alone."""
    return block if block in ("optimizer", "update") else f"{block} {phase}"


def part_of_step(step: Step) -> str:
    """The part that a derived step belongs to; the updates of all weights are the optimizer."""
    return "optimizer" if class_of_op(step.op) == "optimizer" else part_of(step.block, step.phase)


class Facts:
    """The facts of every instruction of a program, made when they are asked for.

    ``ridge`` is the FLOPs per byte from which a chip computes for longer than it moves bytes.
    """

    def __init__(self, program: Program, *, ridge: float) -> None:
        self.program, self.ridge = program, ridge
        self._known: dict[str, Fact] = {}

    def of(self, name: str) -> Fact:
        """The facts of one instruction."""
        if name in self._known:
            return self._known[name]
        one, label = self.program.instructions[name], self.program.label(name)
        flops, moved = self.program.flops(name), self.program.hbm_bytes(name)
        kind = _class_of(one, label, self.program)
        bound: Bound = "memory"
        if kind == "collective":
            bound = "communication"
        elif flops >= self.ridge * moved > 0 or (kind == "attention" and one.opcode == "custom-call"):
            bound = "compute"
        source = _NUMBER.sub("", one.op_name.rsplit("/", 1)[-1]) or _NUMBER.sub("", one.name)
        self._known[name] = Fact(label=label, kind=kind, bound=bound, flops=flops, hbm_bytes=moved, source=source)
        return self._known[name]

    def is_work(self, name: str) -> bool:
        """Whether an event of the instruction is its own work, not that of others which it runs."""
        return self.program.instructions[name].opcode not in CONTAINERS

    @cached_property
    def products(self) -> Mapping[str, tuple[Instruction, ...]]:
        """Matrix products by the instruction that runs them."""
        work = [one for one in self.program.module if one.opcode not in CONTAINERS]
        fused = {name for one in work for _, name in one.called}
        found = {one.name: self.program.products(one.name) for one in work if one.computation not in fused}
        return {name: products for name, products in found.items() if products}


def _class_of(one: Instruction, label: StepLabel | None, program: Program) -> OpClass:
    """The class by what the instruction does where that is plain, else by the derived step that it belongs to."""
    if is_collective(one):
        return "collective"
    kind = class_of_op(label.op) if label else "elementwise"
    if kind in ("attention", "optimizer"):
        return kind
    if any(is_product(inner) for inner in program.module.fused(one)):
        return "contraction"
    if _only_moves(one, program):
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


def _only_moves(one: Instruction, program: Program) -> bool:
    """Whether an instruction puts arrays elsewhere and computes nothing on them."""
    for inner in program.module.fused(one):
        if inner.opcode in _MOVES or (inner is one and inner.opcode == "fusion"):
            continue
        scalar = all(shape.num_elements == 1 for shape in inner.shapes)
        if not (scalar and inner.opcode in _PLACES):
            return False
    return True
