"""Finds a program's compute: matrix products with their FLOPs and precision, and compute that overlaps a collective."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from meshwright.hlo.module import CONTAINERS, NO_WORK, Instruction, Module
from meshwright.hlo.shapes import Shape, shape_bytes

_KERNELS = ("tpu_custom_call", "__cudnn$", "mosaic_gpu", "__gpu$xla.gpu.triton")
"""Prefixes of the targets of custom calls that compute; other custom calls only mark or allocate something."""
_NO_COMPUTE = {
    *NO_WORK,
    *CONTAINERS,
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute"),
    *("send", "recv", "after-all", "custom-call"),
}
"""Opcodes that compute nothing themselves."""

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
    """Returns the dims of both operands that a dot, or a library's product, sums over; None if the text lacks them."""
    dims_of = {side: tuple(map(int, _NUMBER.findall(dims))) for side, dims in _CONTRACTED.findall(product.attributes)}
    return (dims_of["lhs"], dims_of["rhs"]) if len(dims_of) == 2 else None


def product_flops(product: Instruction, instructions: Mapping[str, Instruction]) -> int:
    """Returns 2 x the elements of the result x the length of the contraction; 0 unless both operands are known.

    ``instructions`` has the operands by name.
    """
    operand_shapes = [instructions[name].shapes[:1] for name in product.operands[:2] if name in instructions]
    if len(operand_shapes) < 2 or not all((product.shapes, *operand_shapes)):
        return 0
    (left,), (right,) = operand_shapes
    return 2 * product.shapes[0].num_elements * _sum_length(product, left, right)


def _sum_length(product: Instruction, left: Shape, right: Shape) -> int:
    """Returns the number of terms summed for each element of the result.

    A convolution sums over the kernel's dims except its output features. Spatial dims that the compiler dilates to
    carry a batch (on TPU) are not summed.
    """
    if product.opcode != "convolution":
        summed_dims = contracted_dims(product) or ((), ())
        return math.prod(left.dims[dim] for dim in summed_dims[0] if dim < len(left.dims))
    label_match = _DIM_LABELS.search(product.attributes)
    if label_match is None or len(label_match[2]) != len(right.dims):
        return 0
    window_match = _WINDOW.search(product.attributes)
    is_dilated = window_match is not None and "lhs_dilate" in window_match[1]
    return math.prod(
        dim_size
        for letter, dim_size in zip(label_match[2], right.dims, strict=True)
        if letter == "i" or (letter.isdigit() and not is_dilated)
    )


def runs_beside_compute(module: Module, start: Instruction, done: str, *, num_bytes: int) -> bool:
    """True if enough compute runs between a start and its ``done``, or up to the computation's end without a done.

    Enough is a product, a kernel, or other work that writes at least the collective's ``num_bytes``: memory is several
    times as fast as links, so that less work could not hide the collective.
    """
    instructions = module.computations[start.computation].instructions
    instruction_names = [op.name for op in instructions]
    next_index = instruction_names.index(start.name) + 1
    ops_between = instructions[next_index : instruction_names.index(done) if done in instruction_names else None]
    return _computes(module, ops_between) or sum(_written(module, op) for op in ops_between) >= num_bytes


def fuses_compute(module: Module, key: str) -> bool:
    """True if a part of the asynchronous TPU collective with this key is fused with a product."""
    piece_names = {instruction.computation for instruction in module if instruction.async_key == key}
    return any(_computes(module, module.computations[name].instructions) for name in piece_names)


def _computes(module: Module, instructions: Iterable[Instruction]) -> bool:
    """True if a product or a kernel is among these instructions, or in computations that they call."""
    return any(
        is_product(i) or i.target.startswith(_KERNELS) or _computes(module, module.inside(i)) for i in instructions
    )


def _written(module: Module, one: Instruction) -> int:
    """Returns the bytes that elementwise work or a copy writes; for an update in place only the updated part."""
    suffixes = ("-start", "-done", "-update")
    if one.opcode in _NO_COMPUTE or one.opcode.endswith(suffixes):
        return 0
    body: Sequence[Instruction] = module.inside(one) if one.opcode == "fusion" else ()
    updates = [inner for inner in (one, *body) if inner.opcode == "dynamic-update-slice"]
    if updates:
        return sum(module.operand(inner, 1).shapes[0].num_bytes for inner in updates)
    return shape_bytes(one.shape)
