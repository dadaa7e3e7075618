"""FLOPs and bytes of a dot product, and the instructions and cycles of a few ways to compute it.

The machine is that of the slides: arithmetic takes one cycle, a load about ten, and the two may or may not overlap.
Source: Scaling systems for LLMs (slides): 2n - 1 FLOPs on 2n elements, near 1/2 FLOP per byte in bf16.
"""

import math

import msgspec

from meshwright.calculators.chips.number_formats import NumberFormat
from meshwright.core.errors import InputError
from meshwright.cost.formulas.roofline import Work

LOAD_CYCLES = 10.0
VECTOR_BITS = 512
MATRIX_SHAPE = (16, 8, 16)
"""m, n, k of the product that one matrix instruction makes: an H100 warp's mma in 16-bit."""


class DotProductWay(msgspec.Struct, frozen=True, kw_only=True):
    """Instructions of one dot product, and its cycles: the larger of both parts, or their sum without overlap.

    ``elements_per_instruction`` are the products that one arithmetic instruction makes; ``instructions`` counts loads,
    arithmetic and stores.
    """

    way: str
    elements_per_instruction: float
    loads: float
    arithmetic: float
    stores: float
    instructions: float
    cycles_lower: float
    cycles_upper: float


def dot_product_work(form: NumberFormat, length: int) -> Work:
    """Returns the work of n products and n - 1 sums on 2n elements read."""
    if length < 1:
        raise InputError(f"a dot product of {length} elements has no result. Give at least 1.")
    return Work(flops=2 * length - 1, num_bytes=2 * length * form.num_bytes)


def dot_product_ways(
    form: NumberFormat, length: int, *, load_cycles: float = LOAD_CYCLES, vector_bits: int = VECTOR_BITS
) -> list[DotProductWay]:
    """Returns four ways: scalar with separate multiply and add, scalar fused, vector, and in a matrix instruction.

    A vector of V lanes needs n/V fused instructions and 2 log2(V) to add its lanes (a shuffle and an add each). A
    matrix instruction makes m n dot products at once, with operands loaded once per tile: one's share is counted.
    """
    lanes = vector_bits // form.stored_bits
    if lanes < 1:
        raise InputError(f"a vector of {vector_bits} bits holds no {form.name}. Give at least {form.stored_bits}.")
    steps = math.ceil(length / lanes)
    rows, cols, depth = MATRIX_SHAPE
    # operands of a matrix instruction arrive in vector loads of their own
    depth = depth * 16 // form.stored_bits if form.stored_bits <= 16 else depth
    tiles, served = math.ceil(length / depth), rows * cols
    operand_loads = math.ceil((rows + cols) * depth / lanes)
    counts: list[tuple[str, float, float, float, float]] = [
        ("multiply, then add", 1, 2 * length, 2 * length - 1, 1),
        ("fused multiply-add", 1, 2 * length, length, 1),
        (f"vector of {lanes}", lanes, 2 * steps, steps + 2 * int(math.log2(lanes)), 1),
        (f"matrix {rows}x{cols}x{depth}", served * depth, tiles * operand_loads / served, tiles / served,
         math.ceil(served / lanes) / served),
    ]  # fmt: skip
    return [
        DotProductWay(
            way=way,
            elements_per_instruction=elements,
            loads=loads,
            arithmetic=arithmetic,
            stores=stores,
            instructions=loads + arithmetic + stores,
            cycles_lower=max((loads + stores) * load_cycles, arithmetic),
            cycles_upper=(loads + stores) * load_cycles + arithmetic,
        )
        for way, elements, loads, arithmetic, stores in counts
    ]
