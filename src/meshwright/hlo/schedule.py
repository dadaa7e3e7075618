"""What runs beside a collective, read from the order of a scheduled module's instructions."""

from collections.abc import Iterable, Sequence
from typing import Literal

from meshwright.hlo.module import CONTAINERS, NO_WORK, Instruction, Module
from meshwright.hlo.products import is_product
from meshwright.hlo.shapes import shape_bytes

Overlap = Literal["", "start/done", "async fusion", "windowed", "between slices"]
"""How a collective runs beside compute; empty for an exposed one, which the program waits for."""

_KERNELS = ("tpu_custom_call", "__cudnn$", "mosaic_gpu", "__gpu$xla.gpu.triton")
"""First letters of the targets of custom calls that compute; other custom calls only mark or allocate something."""
_NO_COMPUTE = {
    *NO_WORK,
    *CONTAINERS,
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute"),
    *("send", "recv", "after-all", "custom-call"),
}
"""Opcodes that by themselves compute nothing."""


def runs_beside_compute(module: Module, start: Instruction, done: str, *, num_bytes: int) -> bool:
    """True if compute of some size stands between a start and its ``done``, or the end of the computation without one.

    That is a product, a kernel, or other work that writes at least the collective's ``num_bytes``: memory is several
    times as fast as links, so that less could not hide it.
    """
    instructions = module.computations[start.computation].instructions
    names = [one.name for one in instructions]
    first = names.index(start.name) + 1
    between = instructions[first : names.index(done) if done in names else None]
    return _computes(module, between) or sum(_written(module, one) for one in between) >= num_bytes


def fuses_compute(module: Module, key: str) -> bool:
    """True if a piece of the asynchronous TPU collective with this key is fused with a product."""
    pieces = {one.computation for one in module if one.async_key == key}
    return any(_computes(module, module.computations[piece].instructions) for piece in pieces)


def _computes(module: Module, instructions: Iterable[Instruction]) -> bool:
    """True if a product or a kernel is among these instructions, or among those that they call."""
    return any(
        is_product(one) or one.target.startswith(_KERNELS) or _computes(module, module.inside(one))
        for one in instructions
    )


def _written(module: Module, one: Instruction) -> int:
    """Returns the bytes that elementwise work or a copy writes; of an update in place only the part that changes."""
    ends = ("-start", "-done", "-update")
    if one.opcode in _NO_COMPUTE or one.opcode.endswith(ends):
        return 0
    body: Sequence[Instruction] = module.inside(one) if one.opcode == "fusion" else ()
    updates = [inner for inner in (one, *body) if inner.opcode == "dynamic-update-slice"]
    if updates:
        return sum(module.operand(inner, 1).shapes[0].num_bytes for inner in updates)
    return shape_bytes(one.shape)
