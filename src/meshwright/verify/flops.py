"""Compares the FLOPs of matrix products in a program, before the compiler optimises it, with the derived FLOPs.

Attention kernels and other custom calls state no products: attention is left out on both sides.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import cache

import msgspec

from meshwright.algebra.ops import step_kinds
from meshwright.core.labels import StepLabel
from meshwright.hlo.loops import runs_at_most_once, runs_further_rounds, trip_count
from meshwright.hlo.module import parse_module
from meshwright.hlo.products import product_flops

TOLERANCE = 0.02
"""Relative differences up to this share are ignored."""

KERNELS = ("custom-call", "ragged-dot")
"""Opcodes of grouped products: the number of rows of each expert, and so the FLOPs, depends on the data."""

_Label = StepLabel | None


class StepProducts(msgspec.Struct, frozen=True, kw_only=True):
    """FLOPs of one step, derived and in the program, which differ."""

    where: str
    derived: float
    compiled: float


class Products(msgspec.Struct, frozen=True, kw_only=True):
    """FLOPs of all matrix products except attention's, on one device.

    ``by_data`` names the steps whose FLOPs depend on the data; both totals leave them out.
    """

    derived: float
    compiled: float
    differences: tuple[StepProducts, ...] = ()
    by_data: tuple[str, ...] = ()


class ProductCount(msgspec.Struct, frozen=True, kw_only=True):
    """FLOPs of products by step, and the steps whose FLOPs depend on data, in loops or kernels."""

    flops: dict[_Label, float]
    by_data: frozenset[_Label]


def compare_products(program: str, derived: Mapping[StepLabel, float]) -> Products:
    """Compares the products of an unoptimised program with the derived FLOPs of each step."""
    sums = count_products(program)
    left_out_labels = {label for label in (*sums.flops, *derived) if label in sums.by_data or _attends(label)}
    labels = [label for label in dict.fromkeys((*derived, *sums.flops)) if label not in left_out_labels]
    flop_pair_of = {label: (derived.get(label, 0.0), sums.flops.get(label, 0.0)) for label in labels}  # type: ignore[arg-type]
    total_derived, total_compiled = (sum(flop_pair[side] for flop_pair in flop_pair_of.values()) for side in (0, 1))
    differing_rows = [
        StepProducts(where=str(label or "no step"), derived=derived_flops, compiled=compiled_flops)
        for label, (derived_flops, compiled_flops) in flop_pair_of.items()
        if abs(compiled_flops - derived_flops) > TOLERANCE * max(compiled_flops, derived_flops)
    ]
    return Products(
        derived=total_derived,
        compiled=total_compiled,
        differences=tuple(sorted(differing_rows, key=lambda row: -abs(row.compiled - row.derived))),
        by_data=tuple(sorted(str(label) for label in sums.by_data)),
    )


def _attends(label: _Label) -> bool:
    kind = step_kinds().get(label.op) if label is not None else None
    return kind is not None and kind.group == "attention"


def _multiplies(label: _Label) -> bool:
    kind = step_kinds().get(label.op) if label is not None else None
    return kind is not None and kind.is_einsum


def count_products(program: str) -> ProductCount:
    """Counts the FLOPs of all products in one call of a program on one device: 2 n k for n results that sum over k.

    Loop bodies count as often as they run; the rounds of an exchange after the first do not count.
    """
    module = parse_module(program)

    @cache
    def products(name: str) -> Counter[tuple[_Label, bool]]:
        """Returns FLOPs of a computation and its callees, by label and whether a loop's count depends on data."""
        computation, flop_sums = module.computations[name], Counter[tuple[_Label, bool]]()
        for instruction in computation.instructions:
            if instruction.opcode == "dot":
                flop_sums[instruction.label, False] += product_flops(instruction, computation.by_name)
            elif instruction.opcode in KERNELS:
                flop_sums[instruction.label, True] += 0
            for role, callee in instruction.called:
                if role == "condition" or callee not in module.computations or runs_further_rounds(module, instruction):
                    continue
                sums = products(callee)
                is_loop = bool(sums) and instruction.opcode == "while" and not runs_at_most_once(module, instruction)
                num_trips = trip_count(module, instruction) if is_loop else 1
                for (label, is_dynamic), flops in sums.items():
                    # A function shared by several steps has no label and takes its caller's.
                    flop_sums[label or instruction.label, is_dynamic or num_trips is None] += (num_trips or 1) * flops
        return flop_sums

    flops_by_label: dict[_Label, float] = defaultdict(float)
    for (label, _), num_flops in products(module.entry).items():
        flops_by_label[label] += num_flops
    loop_labels = frozenset(label for label, is_dynamic in products(module.entry) if is_dynamic and _multiplies(label))
    return ProductCount(flops=dict(flops_by_label), by_data=loop_labels)
