"""One operation on one chip, as `roofline` reads it: a product, a sum, a softmax or a norm; its work, units and time.

Matrix units multiply two arrays that share a contracted dim and of which one has a dim that the other lacks. All else
runs on the vector units: sums, elementwise and dot products, rows. A row is read and written once, its steps stay on
the chip.
"""

import math
import re

import msgspec
from msgspec.structs import replace

from meshwright.algebra.notation import ShardedArray, parse_array
from meshwright.calculators.chips.anatomy import mxu_padding, vector_rate
from meshwright.calculators.sharding.parsing import distinct_names, parse_einsum
from meshwright.core.errors import InputError
from meshwright.core.notation import compact
from meshwright.cost.formulas.roofline import Channel, Operand, Roofline, chip_roofline, einsum_work
from meshwright.spec.chip import Chip, compute_dtype

ROW_STEPS: dict[str, tuple[str, ...]] = {
    "softmax": ("max", "subtract", "exp", "sum", "divide"),
    "rms_norm": ("square", "sum", "divide", "scale"),
    "layer_norm": ("sum", "subtract", "square", "sum", "divide", "scale", "shift"),
}
"""The steps that count for every element of a row; scales and shifts of a row's width are not counted as bytes."""

_ROW = re.compile(rf"({'|'.join(ROW_STEPS)})\((.*)\)(?:->(.*))?")
_PLUS = re.compile(r"(?<=[\]}])\+")


class LocalOp(msgspec.Struct, frozen=True, kw_only=True):
    """One operation: its arrays, the result last. ``kind`` is "product", "sum" or a key of `ROW_STEPS`."""

    kind: str
    arrays: tuple[ShardedArray, ...]

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Dims and dtypes of all arrays, the result last."""
        return tuple(Operand(a.dims, a.dtype or "bf16") for a in self.arrays)

    @property
    def dims(self) -> tuple[str, ...]:
        """Every dim once."""
        return tuple(dict.fromkeys(dim for array in self.arrays for dim in array.dims))

    @property
    def steps(self) -> tuple[str, ...]:
        """What the vector units do for every element, one FLOP each."""
        multiplied = ("multiply", "add") if set(self.dims) - set(self.arrays[-1].dims) else ("multiply",)
        return multiplied if self.kind == "product" else ROW_STEPS.get(self.kind, ("add",))

    @property
    def on_matrix_units(self) -> bool:
        """True for a product with a contraction, unless both factors have the same dims."""
        if self.kind != "product":
            return False
        lhs, rhs, out = (set(a.dims) for a in self.arrays)
        return bool(lhs & rhs - out and lhs ^ rhs)

    def dtype(self, chip: Chip) -> str:
        """Returns the dtype that the chip computes in; vector units compute in fp32."""
        return compute_dtype(chip, *(o.dtype for o in self.operands[:-1])) if self.on_matrix_units else "fp32"

    def roofline(self, chip: Chip, sizes: dict[str, int], channel: Channel) -> Roofline:
        """Returns the bounds; matrix units compute whole tiles, vector units of unknown rate take the matrix units'."""
        *operands, out = self.operands
        work = einsum_work(operands, out, sizes)
        if self.on_matrix_units:
            line = chip_roofline(work, chip, dtype=self.dtype(chip), channel=channel)
            return replace(line, padding=self.padding(chip, sizes))
        flops = len(self.steps) * math.prod(sizes[dim] for dim in self.dims)
        line = chip_roofline(replace(work, flops=flops), chip, dtype=compute_dtype(chip, "bf16"), channel=channel)
        return replace(line, peak_flops=vector_rate(chip) or line.peak_flops)

    def padding(self, chip: Chip, sizes: dict[str, int]) -> float:
        """Returns the FLOPs of whole tiles over those of a product on matrix units: rows, contraction and columns."""
        lhs, rhs, out = (set(a.dims) for a in self.arrays)
        return mxu_padding(
            chip, *(math.prod(sizes[d] for d in dims) for dims in (lhs - rhs, lhs & rhs - out, rhs - lhs))
        )


def parse_op(text: str) -> LocalOp:
    """Returns the op of ``A[I,J] * B[J,K] -> C[I,K]``, ``A[I] + B[I] -> C[I]`` or ``softmax(A[B,S])``, on one chip."""
    written = compact(text).replace(" ", "").replace("→", "->")
    row, (left, _, right) = _ROW.fullmatch(written), written.partition("->")
    if row is not None:
        given = parse_array(row[2])
        op = LocalOp(kind=row[1], arrays=(given, parse_array(row[3]) if row[3] else given.replace(name="Out")))
        if op.arrays[0].dims != op.arrays[1].dims:
            raise InputError(f"{row[1]} keeps the dims of {given}, and the result has others. Write the same dims.")
    elif _PLUS.search(left):
        addends, out = tuple(map(parse_array, _PLUS.split(left))), parse_array(right)
        if len(addends) != 2 or set(out.dims) != {dim for array in addends for dim in array.dims}:
            raise InputError(f"{text!r} is not the sum of two arrays. Write A[I,J] + B[I,J] -> C[I,J].")
        op = LocalOp(kind="sum", arrays=distinct_names(*addends, out))
    else:
        op = LocalOp(kind="product", arrays=parse_einsum(text))
    for array in op.arrays:
        if array.spread or array.unreduced:
            raise InputError(f"{array} is sharded; roofline is for one chip. Use meshwright shard for a mesh.")
    return op
