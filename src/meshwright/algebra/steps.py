"""One step of a derived program: a local operation or a collective, from arrays to an array."""

from typing import Any, Literal

import msgspec

from meshwright.algebra.notation import ShardedArray
from meshwright.core.dims import COLLECTIVES
from meshwright.core.labels import StepLabel
from meshwright.core.notation import join_axes

Phase = Literal["forward", "recompute", "backward", "update"]
Scope = Literal["layer", "microbatch", "step", "outer"]
Role = Literal["first", "layer", "last", "head"]
"""Role of a block in its stack: first makes the stream, layer updates it, last ends it, head makes logits or a loss."""

BOOK_NAMES: dict[str, str] = {op: op.title().replace("_", "") for op in (*COLLECTIVES, "slice")}
"""Maps a collective or "slice" to its name in "How to Scale Your Model": "all_gather" -> "AllGather"."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A derived step: ``result = op(inputs)``.

    ``op`` is a collective, "slice" (each device keeps its part: no communication), "einsum", or the name of another
    local step (`algebra.ops`); ``more`` are further results of a local step. A collective runs over the mesh ``axes``.
    It gathers or scatters ``dim``; an all-to-all moves the axes from ``dim`` to ``to_dim``; an all-reduce computes the
    ``reduction``. A permute sends a device's block to its neighbour, one hop, unless its details are a `Round`
    (`rewrites.rings`). With ``accumulates`` the result is added to the existing array of that name. ``details`` are the
    op's parameters, a struct that the module of the op or of the rewrite declares. A collective matmul computes its
    ``parts`` together, block by block along ``dim``. ``role`` is the role of the block. ``phase`` and ``scope`` say
    when and how often the step runs; ``critical`` says whether the next matmul has to wait for it.
    """

    op: str
    inputs: tuple[ShardedArray, ...]
    result: ShardedArray
    more: tuple[ShardedArray, ...] = ()
    axes: tuple[str, ...] = ()
    dim: str = ""
    to_dim: str = ""
    reduction: Literal["sum", "max"] = "sum"
    accumulates: bool = False
    details: Any = None
    block: str = ""
    role: Role = "layer"
    phase: Phase = "forward"
    scope: Scope = "layer"
    critical: bool = False
    parts: tuple["Step", ...] = ()

    @property
    def results(self) -> tuple[ShardedArray, ...]:
        """All arrays that the step makes: ``result``, then ``more``."""
        return (self.result, *self.more)

    @property
    def is_collective(self) -> bool:
        """True if bytes move between devices."""
        return self.op in COLLECTIVES

    @property
    def only_moves(self) -> bool:
        """True if nothing is computed: a collective or a slice."""
        return self.is_collective or self.op == "slice"

    @property
    def label(self) -> StepLabel:
        """The label that the step carries into the compiled program."""
        return StepLabel(self.block, self.phase, self.result.name, self.op)

    @property
    def full(self) -> ShardedArray:
        """The array of a collective with the blocks of one group joined, that is without ``axes``; ring formulas take
        its bytes.

        For a permute it is the block that is sent."""
        if self.op == "permute":
            return self.result
        remaining_axes = {
            dim: tuple(a for a in axes if a not in self.axes)
            for dim, axes in zip(self.result.dims, self.result.axes, strict=True)
        }
        return self.result.resharded(remaining_axes)

    def __str__(self) -> str:
        if self.op in BOOK_NAMES:
            dims_text = f":{self.dim}->{self.to_dim}" if self.to_dim else ""
            return f"{self.result} = {BOOK_NAMES[self.op]}_{join_axes(self.axes)}{dims_text}({self.inputs[0]})"
        if self.parts:
            return f"{'; '.join(str(part) for part in self.parts)}, in blocks of {self.dim} as they go round"
        if self.op == "einsum":
            return f"{self.result} = {' * '.join(str(a) for a in self.inputs)}"
        return f"{self.result} = {self.op}({', '.join(str(a) for a in self.inputs)})"
