"""The instructions of a compiled program's text, as far as a profile needs them: what an event of a trace is.

Events carry an instruction's name; its text says which derived step it came from, what kind of work it is, the FLOPs of
its products and the bytes that it reads and writes.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

import msgspec

from meshwright.algebra.labels import StepLabel, find_label
from meshwright.core.errors import InputError

_COMPUTATION = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*\)\s*->.*)?\{\s*$")
_INSTRUCTION = re.compile(r"^\s*(?P<root>ROOT\s+)?%?(?P<name>[\w.\-]+)\s*=\s*(?P<rest>.*)$")
_SHAPE = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,]*)\]")
_COMMENT = re.compile(r"/\*.*?\*/")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_CONTRACTED = re.compile(r"lhs_contracting_dim(?:ension)?s\"?[=:]\s*[\[{]([0-9,\" ]*)[\]}]")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_DIM_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_PRECISION = re.compile(r"operand_precision=\{(\w+),")

ELEMENT_BITS = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "f16": 16, "bf16": 16, "s32": 32, "u32": 32,
    "f32": 32, "s64": 64, "u64": 64, "f64": 64, "f8e4m3fn": 8, "f8e5m2": 8, "f4e2m1fn": 4, "c64": 64, "c128": 128,
}  # fmt: skip

COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast", "send", "recv",
)  # fmt: skip
CONTAINERS = ("while", "conditional", "call")
"""Instructions that only run others: their own events hold those of what they run."""
_FREE = ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", *CONTAINERS)


class Shape(msgspec.Struct, frozen=True):
    """One array of an instruction's result."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> float:
        return self.elements * ELEMENT_BITS.get(self.dtype, 0) / 8


class Instruction(msgspec.Struct, frozen=True, kw_only=True):
    """One instruction. ``shapes`` are the arrays of its result, ``called`` the computations that it names,
    ``attributes`` its text behind the operands."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    called: tuple[str, ...]
    op_name: str
    attributes: str
    is_root: bool

    @property
    def is_collective(self) -> bool:
        """Whether it moves bytes between devices, whole or as one half of an asynchronous pair."""
        return self.opcode.removesuffix("-start").removesuffix("-done") in COLLECTIVES

    @property
    def target(self) -> str:
        """The library that a custom call goes to; empty for others."""
        found = _TARGET.search(self.attributes)
        return found[1] if found else ""

    @property
    def precision(self) -> str:
        """How a product treats its float32 operands: default, high or highest."""
        found = _PRECISION.search(self.attributes)
        return found[1] if found else "default"

    @property
    def is_product(self) -> bool:
        """A matrix product or a convolution, of the compiler's own or of a library (cuBLAS)."""
        return self.opcode in ("dot", "convolution") or "gemm" in self.target or "matmul" in self.target


class Module(msgspec.Struct, frozen=True, dict=True):
    """A compiled program: computations of instructions in order, by name; ``entry`` is the one that runs first."""

    name: str
    computations: Mapping[str, tuple[Instruction, ...]]
    entry: str

    @cached_property
    def instructions(self) -> dict[str, Instruction]:
        """Every instruction by its name, which is unique in a compiled program."""
        return {one.name: one for body in self.computations.values() for one in body}

    @cached_property
    def by_kernel(self) -> dict[str, str]:
        """Instructions by the names of their GPU kernels, which hold no dots and dashes."""
        return {name.replace(".", "_").replace("-", "_"): name for name in self.instructions}

    def inside(self, instruction: Instruction) -> Iterator[Instruction]:
        """The instruction and, of a fusion, everything that was fused, to any depth."""
        yield instruction
        if instruction.opcode not in CONTAINERS:
            for called in instruction.called:
                for one in self.computations.get(called, ()):
                    yield from self.inside(one)

    def products(self, name: str) -> tuple[Instruction, ...]:
        """The matrix products that an instruction is, or holds."""
        return tuple(one for one in self.inside(self.instructions[name]) if one.is_product)

    def flops(self, name: str) -> float:
        """FLOPs of the products in one execution of an instruction; elementwise work counts nothing."""
        return sum(self.product_flops(one) for one in self.products(name))

    def hbm_bytes(self, name: str) -> float:
        """Bytes of the operands and the result of one execution: what has to pass through memory at least.

        Of an operand that is only sliced, and of a result that is only updated in place, the whole array counts no
        more than the other arrays: a slice reads what it gives.
        """
        one = self.instructions[name]
        if one.opcode in _FREE:
            return 0.0
        own = sum(shape.num_bytes for shape in one.shapes)
        read = [sum(s.num_bytes for s in self.instructions[o].shapes) for o in one.operands if o in self.instructions]
        kinds = {inner.opcode for inner in self.inside(one)}
        if "dynamic-update-slice" in kinds:
            # the largest operand is the array that is updated where it lies
            rest = sum(read) - max(read, default=0.0)
            return min(own + sum(read), 2 * rest) if rest else own
        if kinds & {"dynamic-slice", "gather", "slice"}:
            read = [min(b, own) for b in read]
        return own + sum(read)

    def label(self, name: str) -> StepLabel | None:
        """The derived step of an instruction; of a fusion without one, the one most of its parts have."""
        one = self.instructions[name]
        own = find_label(one.op_name)
        if own is not None or one.opcode in CONTAINERS:
            return own
        found = Counter(label for inner in self.inside(one) if (label := find_label(inner.op_name)))
        return found.most_common(1)[0][0] if found else None

    def product_flops(self, one: Instruction) -> float:
        """2 x the elements of the result x the length of the sum that makes each."""
        if not one.shapes:
            return 0.0
        operands = [self.instructions[o].shapes[0] for o in one.operands[:2] if self.instructions.get(o)]
        if len(operands) < 2:
            return 0.0
        return 2.0 * one.shapes[0].elements * _sum_length(one, *operands)


def _sum_length(one: Instruction, left: Shape, right: Shape) -> int:
    """Length of the sum behind each element of a product.

    A convolution sums over the kernel without its output features; spatial dims that only carry the batch of a product
    (dilated by the compiler, as on TPU) are no sum.
    """
    if one.opcode != "convolution":
        found = _CONTRACTED.search(one.attributes)
        dims = [int(n) for n in re.findall(r"\d+", found[1])] if found else []
        return math.prod(left.dims[d] for d in dims if d < len(left.dims))
    labels = _DIM_LABELS.search(one.attributes)
    if labels is None:
        return 0
    window = _WINDOW.search(one.attributes)
    batched = window is not None and "lhs_dilate" in window[1]
    return math.prod(
        size
        for letter, size in zip(labels[2], right.dims, strict=True)
        if letter == "i" or (letter.isdigit() and not batched)
    )


def parse_module(text: str, *, source: str = "the program") -> Module:
    """A program from the text that the compiler prints of it. Raises InputError for other text."""
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", ""
    for line in text.splitlines():
        head = _COMPUTATION.match(line)
        if head and not line.startswith((" ", "HloModule")):
            current = head[2]
            computations[current] = []
            entry = current if head[1] else entry
        elif current and (match := _INSTRUCTION.match(line)):
            computations[current].append(_instruction(match))
    first = text.split("\n", 1)[0]
    if not first.startswith("HloModule") or not entry:
        raise InputError(
            f"{source} is not the text of a compiled program: it begins with {first[:40]!r}, not 'HloModule', or has "
            f"no ENTRY. Write it with compiled.as_text()."
        )
    name = first.removeprefix("HloModule").split(",")[0].strip()
    return Module(name, {n: tuple(body) for n, body in computations.items()}, entry)


def load_module(path: Path) -> Module:
    """The program in a file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"cannot read {path}: {error.__class__.__name__}. Give a text of compiled.as_text()."
        ) from error
    return parse_module(text, source=str(path))


def _instruction(match: re.Match[str]) -> Instruction:
    shape, rest = _split_shape(_COMMENT.sub("", match["rest"]))
    opcode = _OPCODE.match(rest)
    arguments, attributes = _split_arguments(rest[opcode.end() :]) if opcode else ("", rest)
    op_name = _OP_NAME.search(attributes)
    return Instruction(
        name=match["name"],
        opcode=opcode[1] if opcode else "",
        shapes=tuple(Shape(d, tuple(int(n) for n in dims.split(",") if n)) for d, dims in _SHAPE.findall(shape)),
        operands=tuple(_OPERAND.findall(arguments)),
        called=tuple(_CALLED.findall(attributes)),
        op_name=op_name[1] if op_name else "",
        attributes=attributes,
        is_root=bool(match["root"]),
    )


def _split_shape(text: str) -> tuple[str, str]:
    """(shape of the result, rest); the shape of a tuple is in parentheses."""
    if not text.startswith("("):
        shape, _, rest = text.partition(" ")
        return shape, rest
    end = _closing(text, 1)
    return text[:end], text[end:]


def _split_arguments(text: str) -> tuple[str, str]:
    """(what stands up to the closing parenthesis, what follows)."""
    end = _closing(text, 1, start=0)
    return text[: end - 1], text[end:]


def _closing(text: str, depth: int, start: int = 1) -> int:
    """The place behind the parenthesis that closes ``depth`` open ones."""
    for index in range(start, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if depth == 0:
            return index + 1
    return len(text)
