"""One step of a derived program: a local operation or a collective, from arrays to an array."""

from typing import Any, Literal

import msgspec
import numpy as np

from meshwright.algebra.notation import ShardedArray
from meshwright.core.dims import DTYPE_BYTES

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
Phase = Literal["forward", "recompute", "backward", "update"]
Scope = Literal["layer", "microbatch", "step"]

COLLECTIVES: tuple[str, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
BOOK_NAMES: dict[str, str] = {
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "all_reduce": "AllReduce",
    "all_to_all": "AllToAll",
    "slice": "Slice",
}


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A derived step: ``result = op(inputs)``.

    ``op`` is a collective, "slice" (each device keeps its part: no communication), "einsum", or another
    op kind of a program; ``more`` are further results of a local op. For a collective ``axes`` are the mesh
    axes it runs over, ``dim`` the dim that is gathered, scattered or left by an all-to-all, ``to_dim`` the
    dim that an all-to-all splits. An attribute accumulate=true adds the result to what is there already.
    ``phase`` and ``scope`` say when and how often; ``critical`` whether the next matmul has to wait for it.
    """

    op: str
    inputs: tuple[ShardedArray, ...]
    result: ShardedArray
    more: tuple[ShardedArray, ...] = ()
    axes: tuple[str, ...] = ()
    dim: str = ""
    to_dim: str = ""
    attributes: tuple[tuple[str, str], ...] = ()
    block: str = ""
    phase: Phase = "forward"
    scope: Scope = "layer"
    critical: bool = False

    @property
    def is_collective(self) -> bool:
        """Whether bytes move between devices."""
        return self.op in COLLECTIVES

    @property
    def full(self) -> ShardedArray:
        """For a collective: the whole array on its group, per device, whose bytes enter the ring formulas."""
        left = {
            dim: tuple(a for a in axes if a not in self.axes)
            for dim, axes in zip(self.result.dims, self.result.axes, strict=True)
        }
        return self.result.resharded(left)

    def __str__(self) -> str:
        if self.op in BOOK_NAMES:
            over = _subscript(self)
            return f"{self.result} = {BOOK_NAMES[self.op]}{over}({self.inputs[0]})"
        if self.op == "einsum":
            return f"{self.result} = {' * '.join(str(a) for a in self.inputs)}"
        return f"{self.result} = {self.op}({', '.join(str(a) for a in self.inputs)})"


def sent_element_bytes(step: Step, *, width: Any, num_microbatches: Any) -> Any:
    """Bytes of one element of a collective; ``width`` is that of the state's weights. Microbatches may be an array.

    Gradients that go out once per step have been summed in float32 when there was more than one microbatch.
    """
    if step.full.dtype:
        return DTYPE_BYTES[step.full.dtype]
    if step.scope != "step":
        return width
    return np.where(np.asarray(num_microbatches) > 1, DTYPE_BYTES["fp32"], width)


def _subscript(step: Step) -> str:
    axes = step.axes
    joined = "".join(axes) if all(len(a) == 1 for a in axes) else ",".join(axes)
    braces = f"{{{joined}}}" if len(axes) > 1 and "," in joined else joined
    return f"_{braces}:{step.dim}->{step.to_dim}" if step.op == "all_to_all" else f"_{braces}"
