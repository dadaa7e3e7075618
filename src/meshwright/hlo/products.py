"""Finds a program's matrix products, their FLOPs and their precision."""

import math
import re
from collections.abc import Mapping

from meshwright.hlo.module import Instruction
from meshwright.hlo.shapes import Shape

_LIBRARY = re.compile(r"gemm|matmul", re.IGNORECASE)
_CONTRACTED = re.compile(r"(lhs|rhs)_contracting_dim(?:ension)?s\"?[=:]\s*[\[{]([0-9,\" ]*)[\]}]")
_NUMBER = re.compile(r"\d+")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_DIM_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_PRECISION = re.compile(r"operand_precision\"?[=:]\s*[\[{]\"?(\w+)")


def is_product(one: Instruction) -> bool:
    """True for a dot, a convolution, or a library's matrix product (cuBLAS)."""
    return one.opcode in ("dot", "convolution") or _LIBRARY.search(one.target) is not None


def precision(product: Instruction) -> str:
    """Returns the precision of the first operand, which matters in float32: default, high or highest."""
    match = _PRECISION.search(product.attributes)
    return match[1].lower() if match else "default"


def contracted_dims(product: Instruction) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Returns the dims of both operands that a dot, or a library's product, sums over; None if it does not say."""
    by_side = {side: tuple(map(int, _NUMBER.findall(dims))) for side, dims in _CONTRACTED.findall(product.attributes)}
    return (by_side["lhs"], by_side["rhs"]) if len(by_side) == 2 else None


def product_flops(product: Instruction, instructions: Mapping[str, Instruction]) -> int:
    """Returns 2 x the elements of the result x the length of the contraction; 0 unless two operands are known.

    ``instructions`` holds the operands by name.
    """
    operands = [instructions[name].shapes[:1] for name in product.operands[:2] if name in instructions]
    if len(operands) < 2 or not all((product.shapes, *operands)):
        return 0
    (left,), (right,) = operands
    return 2 * product.shapes[0].num_elements * _sum_length(product, left, right)


def _sum_length(product: Instruction, left: Shape, right: Shape) -> int:
    """Returns the number of terms summed for each element of the result.

    A convolution sums over the kernel without its output features. Spatial dims that the compiler dilates to carry a
    batch (on TPU) are not summed.
    """
    if product.opcode != "convolution":
        dims = contracted_dims(product) or ((), ())
        return math.prod(left.dims[dim] for dim in dims[0] if dim < len(left.dims))
    labels = _DIM_LABELS.search(product.attributes)
    if labels is None or len(labels[2]) != len(right.dims):
        return 0
    window = _WINDOW.search(product.attributes)
    is_dilated = window is not None and "lhs_dilate" in window[1]
    return math.prod(
        size
        for letter, size in zip(labels[2], right.dims, strict=True)
        if letter == "i" or (letter.isdigit() and not is_dilated)
    )
