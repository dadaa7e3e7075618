"""FLOPs of the matrix products that a program asks for, before a compiler rewrites them, beside the derived ones.

Kernels of attention and other custom calls state no products: attention is left out on both sides.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping

import msgspec

from meshwright.algebra.ops import step_kinds
from meshwright.core.labels import StepLabel
from meshwright.hlo.loops import runs_at_most_once, trip_count
from meshwright.hlo.module import Instruction, Module, parse_module
from meshwright.hlo.products import product_flops

TOLERANCE = 0.02
"""Differences up to this share are none."""

Label = StepLabel | None


class StepProducts(msgspec.Struct, frozen=True, kw_only=True):
    """FLOPs of one step of the model in which program and derivation differ."""

    where: str
    derived: float
    compiled: float


class Products(msgspec.Struct, frozen=True, kw_only=True):
    """FLOPs of all matrix products but attention's, on one device.

    ``by_data`` are steps whose number of products depends on the data, left out on both sides.
    """

    derived: float
    compiled: float
    differences: tuple[StepProducts, ...] = ()
    by_data: tuple[str, ...] = ()


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """Products of a program by the step that they came from, and the steps in loops that depend on data."""

    flops: dict[Label, float]
    by_data: frozenset[Label]


def compare_products(program: str, derived: Mapping[StepLabel, float]) -> Products:
    """The products of a program that has not been optimised beside those of its derivation."""
    found = count_products(program)
    left_out = {label for label in (*found.flops, *derived) if label in found.by_data or _attends(label)}
    labels = [label for label in dict.fromkeys((*derived, *found.flops)) if label not in left_out]
    pairs = {label: (derived.get(label, 0.0), found.flops.get(label, 0.0)) for label in labels}  # type: ignore[arg-type]
    total_d, total_c = (sum(pair[side] for pair in pairs.values()) for side in (0, 1))
    differing = [
        StepProducts(where=str(label or "no step"), derived=d, compiled=c)
        for label, (d, c) in pairs.items()
        if abs(c - d) > TOLERANCE * max(c, d)
    ]
    return Products(
        derived=total_d,
        compiled=total_c,
        differences=tuple(sorted(differing, key=lambda one: -abs(one.compiled - one.derived))),
        by_data=tuple(sorted(str(label) for label in found.by_data)),
    )


def _attends(label: Label) -> bool:
    kind = step_kinds().get(label.op) if label is not None else None
    return kind is not None and kind.group == "attention"


def count_products(program: str) -> Counted:
    """FLOPs of all products in one call of a program, on one device: 2 n k for n results that sum over k.

    Bodies of loops count as often as they run.
    """
    count = _Count(parse_module(program))
    found = count.of(count.module.entry)
    by_data = frozenset(label for label, depends in found if depends)
    flops: dict[Label, float] = defaultdict(float)
    for (label, _), number in found.items():
        flops[label] += number
    return Counted(flops=dict(flops), by_data=by_data)


class _Count:
    """Products by (label, whether a loop around them depends on data)."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.known: dict[str, Counter[tuple[Label, bool]]] = {}

    def of(self, name: str) -> Counter[tuple[Label, bool]]:
        """Products of a computation and all that it calls."""
        if name not in self.known:
            computation, found = self.module.computations[name], Counter[tuple[Label, bool]]()
            for one in computation.instructions:
                if one.opcode == "dot":
                    found[one.label, False] += product_flops(one, computation.by_name)
                for role, called in one.called:
                    if role != "condition" and called in self.module.computations:
                        self._add(found, one, self.of(called))
            self.known[name] = found
        return self.known[name]

    def _add(
        self, found: Counter[tuple[Label, bool]], caller: Instruction, inside: Counter[tuple[Label, bool]]
    ) -> None:
        """Add what a call runs. Where a function that several steps share has no label, the caller's is taken."""
        if not inside:
            return
        times: int | None = 1
        if caller.opcode == "while" and not runs_at_most_once(self.module, caller):
            times = self._trips(caller)
        for (label, depends), flops in inside.items():
            key = (label if label is not None else caller.label, depends or times is None)
            found[key] += (times or 1) * flops

    def _trips(self, loop: Instruction) -> int | None:
        try:
            return trip_count(self.module, loop)
        except ValueError:
            return None
