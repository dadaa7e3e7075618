"""Sizes from which FLOPs and bytes of steps are counted: dims, mesh axes and element widths, as numbers or arrays."""

from collections.abc import Mapping
from functools import reduce
from typing import Any, Literal

import msgspec
import numpy as np

from meshwright.algebra.notation import ShardedArray, Sizes, local_elements, product
from meshwright.core.dims import DTYPE_BYTES
from meshwright.spec.strategy import STATE_BYTES

Number = Any
"""A float, or a NumPy array with one entry per candidate."""

Scores = Literal["on_chip", "in_memory", "in_memory_16"]
"""Scores of attention: never written, written in float32, or written in 16 bits (as Megatron-LM of 2021 does)."""

WIDTHS = tuple((dim,) for dim in ("D", "Do", "Dl", "F", "Fw", "Fe", "Fs", "H", "Hf", "Hv", "Fx", "Hx", "Dc"))
"""Last dims that TPUs lay along the lanes of tiles even if that pads them; for other dims the compiler chooses."""

LANES, SUBLANES = 128, 8
"""A TPU's tile has 8 rows of 128 lanes, each of 32 bits."""


def moment_bytes(state: str) -> float:
    """Returns the bytes of one entry of an optimizer's moment in a training state."""
    return 2.0 if state == "pure-16bit" else 4.0


def master_bytes(state: str) -> float:
    """Returns the bytes of one entry of the float32 copy of the weights, 0 in a state that keeps none."""
    return STATE_BYTES[state]["optimizer"] - 2 * moment_bytes(state)


class OpSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes from which FLOPs and bytes of a step are counted: dims (B of one microbatch), mesh axes, and element
    widths.

    ``state`` is the training state. ``scores`` says whether attention is one kernel that keeps its T x S scores on
    chip, or a chain of products and a softmax that writes them to memory. With ``causal`` attention skips masked keys,
    about half of them; else every key is counted. ``on_gpus``, ``on_cpus``: XLA compiles for them. ``tile_rows`` are
    the rows of the tiles from which products on TPUs take 16-bit numbers, 0 on other chips; with ``padded`` the bytes
    of arrays count whole tiles. ``sequences`` are the groups of a packed step (`cost.work.sequences`), and ``cache``
    remembers bytes of arrays."""

    dims: Mapping[str, Number]
    mesh: Sizes
    state: str
    scores: Scores = "on_chip"
    causal: bool = False
    on_gpus: bool = False
    on_cpus: bool = False
    tile_rows: int = 0
    padded: bool = False
    sequences: tuple[Any, ...] = ()
    cache: dict[ShardedArray, Number] = msgspec.field(default_factory=dict)

    @property
    def width(self) -> int:
        """Bytes of one element of an activation or weight, in memory or communicated: as the state stores weights."""
        return int(STATE_BYTES[self.state]["weights"])

    @property
    def rows_each(self) -> Number:
        """Positions that the step runs of one sequence; of packed sequences, the most of any."""
        return reduce(np.maximum, (part.rows for part in self.sequences), self.dims["T"])

    def elements(self, array: ShardedArray) -> Number:
        """Returns the elements of one device's block."""
        return local_elements(array, self.dims, self.mesh)

    def bytes(self, array: ShardedArray) -> Number:
        """Returns the bytes of one device's block: in the array's dtype if it has one, else the width of the state."""
        if array not in self.cache:
            element_bytes = DTYPE_BYTES[array.dtype] if array.dtype else self.width
            self.cache[array] = self.elements(array) * element_bytes * self._padding(array)
        return self.cache[array]

    def _padding(self, array: ShardedArray) -> Number:
        """Returns the factor by which whole tiles exceed an array whose last dim is in `WIDTHS`; 1 if the last dim
        fills less than half of the lanes, or without ``padded``."""
        if not self.padded or array.dims[-1:] not in WIDTHS:
            return 1.0
        local_width = self.local(array)[array.dims[-1]]
        return np.where(2 * local_width < LANES, 1.0, np.ceil(local_width / LANES) * LANES / local_width)

    def total(self, *arrays: ShardedArray) -> Number:
        """Returns the bytes of one device's blocks of several arrays."""
        return sum(self.bytes(array) for array in arrays)

    def local(self, *arrays: ShardedArray) -> dict[str, Number]:
        """Returns the local size of every dim of the arrays; for a dim in two arrays the later one counts."""
        return {
            dim: self.dims[dim] / product(self.mesh[axis] for axis in axes)
            for array in arrays
            for dim, axes in zip(array.dims, array.axes, strict=True)
        }
