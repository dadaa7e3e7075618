"""The work, compute units and time of one operation on one chip: a product, a sum, a softmax or a norm, for `roofline`.

Matrix units run products of two arrays that share a contracted dim, if one operand has a dim that the other lacks.
Vector units run everything else: elementwise sums, elementwise and dot products, softmax and norms over rows. A row is
read and written once; its intermediate results stay on the chip.
"""

import math
import re

import msgspec
from msgspec.structs import replace

from meshwright.algebra.notation import ShardedArray, parse_array
from meshwright.calculators.sharding.parsing import distinct_names, parse_einsum, refuse_unknown_dims
from meshwright.core.errors import InputError
from meshwright.core.notation import compact
from meshwright.cost.formulas.anatomy import mxu_padding
from meshwright.cost.formulas.roofline import Channel, Operand, Roofline, chip_roofline, einsum_work, vector_peak
from meshwright.spec.chip import Chip, compute_dtype

ROW_STEPS: dict[str, tuple[str, ...]] = {
    "softmax": ("max", "subtract", "exp", "sum", "divide"),
    "rms_norm": ("square", "sum", "divide", "scale"),
    "layer_norm": ("sum", "subtract", "square", "sum", "divide", "scale", "shift"),
}
"""The steps that count for every element of a row; a scale and a shift also read a weight of a row's width."""

_ROW = re.compile(rf"({'|'.join(ROW_STEPS)})\((.*)\)(?:->(.*))?")
_PLUS = re.compile(r"(?<=[\]}])\+")


class LocalOp(msgspec.Struct, frozen=True):
    """One operation: its arrays, the result last, and the FLOPs for every element by name. ``matrix`` has the dims of
    rows, contraction and columns of a product on matrix units; None on vector units."""

    arrays: tuple[ShardedArray, ...]
    steps: tuple[str, ...]
    matrix: tuple[set[str], ...] | None = None

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Dims and dtypes of all arrays, the result last."""
        return tuple(Operand(a.dims, a.dtype or "bf16") for a in self.arrays)

    @property
    def dims(self) -> tuple[str, ...]:
        """Every dim once."""
        return tuple(dict.fromkeys(dim for array in self.arrays for dim in array.dims))

    def dtype(self, chip: Chip) -> str:
        """Returns the dtype that the chip computes in; vector units compute in fp32."""
        return compute_dtype(chip, *(o.dtype for o in self.operands[:-1])) if self.matrix else "fp32"

    def roofline(self, chip: Chip, sizes: dict[str, int], channel: Channel) -> Roofline:
        """Returns the bounds; matrix units compute whole tiles, vector units of unknown rate take the matrix units'."""
        refuse_unknown_dims(sizes, self.arrays)
        *operands, out = self.operands
        work = einsum_work(operands, out, sizes)
        if self.matrix:
            roof = chip_roofline(work, chip, dtype=self.dtype(chip), channel=channel)
            return replace(roof, padding=self.padding(chip, sizes))
        flops = len(self.steps) * math.prod(sizes[dim] for dim in self.dims)
        roof = chip_roofline(replace(work, flops=flops), chip, dtype=compute_dtype(chip, "bf16"), channel=channel)
        return replace(roof, peak_flops=vector_peak(chip) or roof.peak_flops)

    def padding(self, chip: Chip, sizes: dict[str, int]) -> float:
        """Returns the FLOPs of whole matrix tiles divided by the FLOPs of the product; 1 on vector units."""
        return mxu_padding(chip, *(math.prod(sizes[d] for d in dims) for dims in self.matrix)) if self.matrix else 1.0


def parse_op(text: str) -> LocalOp:
    """Parses ``A[I,J] * B[J,K] -> C[I,K]``, ``A[I] + B[I] -> C[I]`` or ``softmax(A[B,S])``. Raises InputError for
    another text and for sharded arrays."""
    op_text = compact(text).replace(" ", "").replace("→", "->")
    match, (left_text, _, right_text) = _ROW.fullmatch(op_text), op_text.partition("->")
    if match is None and not right_text:
        raise InputError(f"{text!r} is no op. Write A[I,J] * B[J,K] -> C[I,K], A[I] + B[I] -> C[I], softmax(A[I]).")
    if match is not None:
        operand = parse_array(match[2])
        out, step_names = parse_array(match[3]) if match[3] else operand.replace(name="Out"), ROW_STEPS[match[1]]
        row = operand.replace(dims=operand.dims[-1:], axes=operand.axes[-1:])
        op = LocalOp((operand, *(row.replace(name=s) for s in step_names if s in ("scale", "shift")), out), step_names)
        if operand.dims != out.dims:
            raise InputError(f"{match[1]} keeps the dims of {operand}, and the result has others. Write the same dims.")
    elif _PLUS.search(left_text):
        addends, out = tuple(map(parse_array, _PLUS.split(left_text))), parse_array(right_text)
        if len(addends) != 2 or set(out.dims) != {dim for array in addends for dim in array.dims}:
            raise InputError(f"{text!r} is not the sum of two arrays. Write A[I,J] + B[I,J] -> C[I,J].")
        op = LocalOp(distinct_names(*addends, out), ("add",))
    else:
        arrays = parse_einsum(text)
        lhs_dims, rhs_dims, out_dims = (set(a.dims) for a in arrays)
        matrix_dims = (lhs_dims - rhs_dims, lhs_dims & rhs_dims - out_dims, rhs_dims - lhs_dims)
        step_names = ("multiply", "add")[: 1 + bool((lhs_dims | rhs_dims) - out_dims)]
        op = LocalOp(arrays, step_names, matrix_dims if matrix_dims[1] and lhs_dims ^ rhs_dims else None)
    for array in op.arrays:
        if array.spread or array.unreduced:
            raise InputError(f"{array} is sharded; roofline is for one chip. Use meshwright shard for a mesh.")
    return op
