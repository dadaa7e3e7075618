"""The compiled program behind a trace.

Events carry an instruction's name; the program's text gives its derived step, its kind of work, the FLOPs of its
products, and the bytes that it reads and writes.
"""

import re
from collections import Counter
from functools import cached_property
from pathlib import Path

import msgspec

from meshwright.core.errors import InputError
from meshwright.core.files import read_text
from meshwright.core.labels import StepLabel
from meshwright.hlo.files import MOST_PROGRAM, has_entry, read_module
from meshwright.hlo.module import CONTAINERS, NO_WORK, Instruction, Module
from meshwright.hlo.products import is_product, product_flops
from meshwright.profile.classes import OUTSIDE, Bound, OpClass, class_of, part_name

_NUMBER = re.compile(r"[.\d]+$")
_FREE = (*NO_WORK, "after-all", *CONTAINERS)


class InstructionFact(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of one instruction; FLOPs and bytes are of one execution on one device."""

    label: StepLabel | None
    kind: OpClass
    bound: Bound
    flops: float
    hbm_bytes: float
    source: str

    @property
    def part(self) -> str:
        """Name of the part of the step, ``layer backward`` or ``optimizer``; `OUTSIDE` without a derived step."""
        if self.label is None:
            return OUTSIDE
        return part_name(self.label.block, self.label.phase)

    @property
    def step(self) -> str:
        """Label of the derived step; without one, `OUTSIDE` and the JAX operation."""
        return str(self.label) if self.label else f"{OUTSIDE}: {self.source}"


class TracedProgram(msgspec.Struct, frozen=True, dict=True):
    """A compiled program, with its instructions by the names that events carry.

    ``ridge`` is the chip's FLOPs per byte: above it an instruction is compute-bound.
    """

    module: Module
    ridge: float = 1.0

    @cached_property
    def instructions(self) -> dict[str, Instruction]:
        """Every instruction by its name, which is unique in a compiled program."""
        return {instruction.name: instruction for instruction in self.module}

    @cached_property
    def by_kernel(self) -> dict[str, str]:
        """Instructions by the names of their GPU kernels, which have underscores for dots and dashes."""
        return {name.replace(".", "_").replace("-", "_"): name for name in self.instructions}

    def fact(self, name: str) -> InstructionFact:
        """Returns the properties of one instruction, computed once."""
        if name in self._facts:
            return self._facts[name]
        instruction, label = self.instructions[name], self.label(name)
        flops, moved_bytes = self.flops(name), self.hbm_bytes(name)
        kind = class_of(self.module, instruction, label)
        bound: Bound = "memory"
        if kind == "collective":
            bound = "communication"
        elif flops >= self.ridge * moved_bytes > 0 or (kind == "attention" and instruction.opcode == "custom-call"):
            bound = "compute"
        source = _NUMBER.sub("", instruction.op_name.rsplit("/", 1)[-1]) or _NUMBER.sub("", instruction.name)
        self._facts[name] = InstructionFact(
            label=label, kind=kind, bound=bound, flops=flops, hbm_bytes=moved_bytes, source=source
        )
        return self._facts[name]

    @cached_property
    def _facts(self) -> dict[str, InstructionFact]:
        return {}

    def is_work(self, name: str) -> bool:
        """False for an instruction that only runs other ones, like a loop: its event contains theirs."""
        return self.instructions[name].opcode not in CONTAINERS

    @cached_property
    def products(self) -> dict[str, tuple[Instruction, ...]]:
        """Matrix products by the name of the instruction that executes them, directly or in its fusion."""
        workers = [instruction for instruction in self.module if instruction.opcode not in CONTAINERS]
        fused_names = {name for caller in workers for _, name in caller.called}
        products_by_name = {i.name: self._products(i) for i in workers if i.computation not in fused_names}
        return {name: products for name, products in products_by_name.items() if products}

    def _products(self, instruction: Instruction) -> tuple[Instruction, ...]:
        return tuple(inner for inner in self.module.fused(instruction) if is_product(inner))

    def flops(self, name: str) -> float:
        """Returns the FLOPs of the products in one execution of an instruction; elementwise work counts as 0."""
        return float(sum(product_flops(inner, self.instructions) for inner in self._products(self.instructions[name])))

    def hbm_bytes(self, name: str) -> float:
        """Returns the bytes of operands and result of one execution: its memory traffic, if each moves once.

        With a slice, operands count at most the result's bytes; an update in place counts twice the update's bytes.
        """
        op = self.instructions[name]
        if op.opcode in _FREE:
            return 0.0
        written_bytes = result_bytes(op)
        in_bytes = [result_bytes(self.instructions[operand]) for operand in op.operands if operand in self.instructions]
        opcodes = {inner.opcode for inner in self.module.fused(op)}
        if "dynamic-update-slice" in opcodes:
            # the largest operand is the array that is updated in place
            rest_bytes = sum(in_bytes) - max(in_bytes, default=0.0)
            return min(written_bytes + sum(in_bytes), 2 * rest_bytes) if rest_bytes else written_bytes
        if opcodes & {"dynamic-slice", "gather", "slice"}:
            in_bytes = [min(num_bytes, written_bytes) for num_bytes in in_bytes]
        return written_bytes + sum(in_bytes)

    def label(self, name: str) -> StepLabel | None:
        """Returns the derived step of an instruction; for an unlabelled fusion, the most common one inside; or None."""
        instruction = self.instructions[name]
        own_label = instruction.label
        if own_label is not None or instruction.opcode in CONTAINERS:
            return own_label
        labels = Counter(label for inner in self.module.fused(instruction) if (label := inner.label))
        return labels.most_common(1)[0][0] if labels else None


def result_bytes(one: Instruction) -> float:
    """Returns the bytes of an instruction's result, without padding."""
    return float(sum(shape.num_bytes for shape in one.shapes))


def parse_program(text: str, *, ridge: float = 1.0, source: str = "the program") -> TracedProgram:
    """Parses the text of a compiled program. Raises InputError for other text."""
    if not text.startswith("HloModule") or not has_entry(text):
        header = text.split("\n", 1)[0]
        raise InputError(
            f"{source} is not the text of a compiled program: it begins with {header[:40]!r}, not 'HloModule', or has "
            f"no ENTRY. Write it with compiled.as_text()."
        )
    return TracedProgram(read_module(text, source), ridge)


def load_program(path: Path) -> TracedProgram:
    """Parses the text of a compiled program in a file. Raises InputError if it cannot be read or is another text."""
    text = read_text(path, "Give a text of compiled.as_text().", most=MOST_PROGRAM)
    return parse_program(text, source=str(path))
