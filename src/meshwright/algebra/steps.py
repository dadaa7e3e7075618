"""One step of a derived program: a local operation or a collective, from arrays to an array."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import numpy as np

from meshwright.algebra.notation import ShardedArray, product
from meshwright.core.dims import DTYPE_BYTES
from meshwright.core.labels import StepLabel

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute"]
Phase = Literal["forward", "recompute", "backward", "update"]
Scope = Literal["layer", "microbatch", "step"]
Role = Literal["first", "layer", "last", "head"]
"""What a block is in its stack of layers: it makes the stream, hands it on, or ends it; the head ends that of the
last stack."""

Reduction = Literal["sum", "max"]

COLLECTIVES: tuple[str, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute")
BOOK_NAMES: dict[str, str] = {
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "all_reduce": "AllReduce",
    "all_to_all": "AllToAll",
    "permute": "Permute",
    "slice": "Slice",
}


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """Details of a permute that sends blocks round a ring of n devices in n - 1 moves.

    ``ring`` "past": every other device of the group sees the block; "home": the block begins on the first of them,
    collects on the way and ends where it belongs. With a ``window`` of W positions only devices whose queries reach a
    block see it, the ceil(W n / T) next ones. With ``ways`` 2 the block goes in two halves in opposite directions.
    ``beside_products`` says that the products of a collective matmul run meanwhile.
    """

    ring: Literal["past", "home"]
    window: int | None = None
    ways: int = 1
    beside_products: bool = False


class Dealt(msgspec.Struct, frozen=True, kw_only=True):
    """Details of steps on matrices dealt out to the devices of ``axes``, each of which has whole ones of some layers.

    The dim ``over`` counts the matrices, split over ``among`` before they are dealt out. It is filled up with zeros to
    a multiple of the devices. ``num_inputs`` dims after it go into a matrix.
    """

    over: str
    among: tuple[str, ...]
    axes: tuple[str, ...]
    num_inputs: int

    def filled(self, *, dims: Mapping[str, Any], mesh: Mapping[str, Any]) -> Any:
        """Matrices that are there for each that is wanted, at least 1; sizes may be arrays."""
        count = dims[self.over] / product(mesh[axis] for axis in self.among)
        devices = product(mesh[axis] for axis in self.axes)
        return np.ceil(count / devices) * devices / count


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A derived step: ``result = op(inputs)``.

    ``op`` is a collective, "slice" (each device keeps its part: no communication), "einsum", or another
    op kind of a program; ``more`` are further results of a local op. For a collective ``axes`` are the mesh
    axes it runs over, ``dim`` the dim that is gathered, scattered or left by an all-to-all, ``to_dim`` the
    dim that an all-to-all splits, ``reduction`` what an all-reduce computes. A permute sends a device's block to its
    neighbour, `num_moves` times. With ``accumulates`` the result is added to what is there already.
    ``details`` are facts that no array holds, of the type that the op's module declares; `Round` for a permute.
    A collective matmul computes its ``parts`` together, block by block along ``dim``.
    ``role`` is that of the block. ``phase`` and ``scope`` say when and how often; ``critical`` whether the next matmul
    has to wait for it.
    """

    op: str
    inputs: tuple[ShardedArray, ...]
    result: ShardedArray
    more: tuple[ShardedArray, ...] = ()
    axes: tuple[str, ...] = ()
    dim: str = ""
    to_dim: str = ""
    reduction: Reduction = "sum"
    accumulates: bool = False
    details: Any = None
    block: str = ""
    role: Role = "layer"
    phase: Phase = "forward"
    scope: Scope = "layer"
    critical: bool = False
    parts: tuple["Step", ...] = ()

    @property
    def is_collective(self) -> bool:
        """Whether bytes move between devices."""
        return self.op in COLLECTIVES

    @property
    def only_moves(self) -> bool:
        """Whether nothing is computed: a collective, or the part of an array that a device keeps."""
        return self.is_collective or self.op == "slice"

    @property
    def label(self) -> StepLabel:
        """The label that the step carries into the compiled program."""
        return StepLabel(self.block, self.phase, self.result.name, self.op)

    @property
    def full(self) -> ShardedArray:
        """For a collective: the whole array on its group, per device, whose bytes enter the ring formulas.

        For a permute it is the block that is sent.
        """
        if self.op == "permute":
            return self.result
        left = {
            dim: tuple(a for a in axes if a not in self.axes)
            for dim, axes in zip(self.result.dims, self.result.axes, strict=True)
        }
        return self.result.resharded(left)

    def __str__(self) -> str:
        if self.op in BOOK_NAMES:
            over = _subscript(self)
            return f"{self.result} = {BOOK_NAMES[self.op]}{over}({self.inputs[0]})"
        if self.parts:
            return f"{'; '.join(str(part) for part in self.parts)}, in blocks of {self.dim} as they go round"
        if self.op == "einsum":
            return f"{self.result} = {' * '.join(str(a) for a in self.inputs)}"
        return f"{self.result} = {self.op}({', '.join(str(a) for a in self.inputs)})"


def sent_element_bytes(step: Step, *, width: Any, num_microbatches: Any) -> Any:
    """Bytes of one element of a collective; ``width`` is that of the state's weights. Microbatches may be an array.

    Gradients that go out once per step have been summed in float32 when there was more than one microbatch.
    """
    if step.full.dtype:
        return DTYPE_BYTES[step.full.dtype]
    if step.scope != "step" or step.phase == "update":
        return width
    return np.where(np.asarray(num_microbatches) > 1, DTYPE_BYTES["fp32"], width)


def num_moves(step: Step, *, dims: Mapping[str, Any], mesh: Mapping[str, Any]) -> Any:
    """How many times a permute sends its block on: n - 1 times or fewer round a ring (`Round`), else once.

    Sizes may be arrays, and a group of one sends nothing round its ring.
    """
    ring = step.details
    if not isinstance(ring, Round):
        return 1
    size = product(mesh[axis] for axis in step.axes)
    moves = size - 1
    if ring.window is not None:
        moves = np.minimum(moves, np.ceil(ring.window * size / dims["T"]))
    return moves


def filled_share(step: Step, *, dims: Mapping[str, Any], mesh: Mapping[str, Any]) -> Any:
    """How many times its array a step works on: more than once where matrices dealt out are filled up (`Dealt`)."""
    return step.details.filled(dims=dims, mesh=mesh) if isinstance(step.details, Dealt) else 1


def num_ways(step: Step, *, dims: Mapping[str, Any], mesh: Mapping[str, Any]) -> Any:
    """Pieces that go round at once, in opposite directions: 2 where a permute asks for both ways and its block can be
    cut along its dim, else 1."""
    if not isinstance(step.details, Round) or step.details.ways != 2:
        return 1
    return np.minimum(2, dims[step.dim] / product(mesh[axis] for axis in step.result.axes_of(step.dim)))


def _subscript(step: Step) -> str:
    axes = step.axes
    joined = "".join(axes) if all(len(a) == 1 for a in axes) else ",".join(axes)
    braces = f"{{{joined}}}" if len(axes) > 1 and "," in joined else joined
    return f"_{braces}:{step.dim}->{step.to_dim}" if step.op == "all_to_all" else f"_{braces}"
