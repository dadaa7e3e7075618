"""Tiled loops: the tiles that each step uses, and the bytes that it moves between HBM and VMEM.

One table of steps drives the kernel (block specs of `examples/flash_attention.py`), the counts and the picture. As in a
Pallas pipeline on a TPU, a step fetches a tile whose number changed since the step before, a result leaves when its
number changes, and both overlap with products. Source: Dao, FlashAttention-2 (2023).
"""

import math
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.core.errors import InputError

LoopName = Literal["matmul", "flash", "flash-backward"]
MAX_STEPS = 300_000
FP32 = ("lse", "delta", "dq")
"""Arrays that are stored in 4 bytes; the others are in bf16."""

# The nest of a loop, outermost first; its operands, results and accumulators with their dims: letters of the nest are
# tiled, T and S are whole, 1 is one number for each query; and its products as (left, right, result).
_LOOPS: dict[str, tuple[str, str, str, str, str]] = {
    "matmul": ("tfd", "x:td w:df", "y:tf", "y:tf", "x w y"),
    "flash": ("ts", "q:tH k:sH v:sH", "o:tH lse:1t", "o:tH m:1t l:1t", "q k P, P v o"),
    "flash-backward": (
        *("st", "q:tH k:sH v:sH do:tH lse:1t delta:1t", "dk:sH dv:sH dq:TH", "dk:sH dv:sH"),
        "q k P, P do dv, do v dS, dS q dk, dS k dq",
    ),
}


class TiledArray(msgspec.Struct, frozen=True):
    """An array in HBM cut into tiles: its dims in small letters are tiled, and a tile has an index for each of them."""

    name: str
    dims: str
    shape: tuple[int, int]
    tile: tuple[int, int]
    itemsize: int

    def number(self, step: Mapping[str, Any]) -> tuple[Any, ...]:
        """Returns the number of the tile of a step; a kernel traces the coordinates."""
        return tuple(step.get(dim, 0) for dim in self.dims)

    def title(self, number: Iterable[int]) -> str:
        """Returns the name of a tile, such as ``k1`` or ``x0,2``."""
        return self.name + ",".join(str(index) for index, dim in zip(number, self.dims, strict=True) if dim.islower())


class TiledLoop(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The steps of a kernel: coordinate -> its value at each step.

    Names in ``products`` that are not arrays are tiles that exist only in registers. ``sums`` are the shapes of the
    fp32 accumulators in VMEM, the accumulator of the first result first.
    """

    operands: tuple[TiledArray, ...]
    results: tuple[TiledArray, ...]
    sums: dict[str, tuple[int, int]]
    num_steps: int
    steps: dict[str, NDArray[np.int64]]
    products: tuple[tuple[str, ...], ...]
    flops_per_step: int

    @property
    def vmem_bytes(self) -> int:
        """Bytes of two buffers per tile (one in use while the other is filled or emptied) and of the accumulators."""
        buffer_bytes = 2 * sum(math.prod(array.tile) * array.itemsize for array in (*self.operands, *self.results))
        return buffer_bytes + 4 * sum(map(math.prod, self.sums.values()))

    @cached_property
    def moves(self) -> dict[str, NDArray[np.bool_]]:
        """Array -> for each step, whether its tile is fetched before it, or leaves after it."""
        moves_by_array = {}
        for array in (*self.operands, *self.results):
            indices = np.array([self.steps[dim] for dim in array.dims if dim in self.steps]).reshape(-1, self.num_steps)
            is_new_tile = np.append(True, (np.diff(indices) != 0).any(axis=0))
            moves_by_array[array.name] = np.roll(is_new_tile, -1) if array in self.results else is_new_tile
        return moves_by_array

    def moved_bytes(self, arrays: Iterable[TiledArray]) -> NDArray[np.int64]:
        """Returns the bytes that these arrays move for each step."""
        return np.asarray(sum(self.moves[array.name] * math.prod(array.tile) * array.itemsize for array in arrays))

    def titles(self, arrays: Iterable[TiledArray], step: int, *, moving: bool = False) -> list[str]:
        """Returns the names of the tiles that a step uses, or that it moves; [] if the loop has no such step."""
        index = {dim: int(indices[step]) for dim, indices in self.steps.items()} if 0 <= step < self.num_steps else None
        return [a.title(a.number(index)) for a in arrays if index and (not moving or self.moves[a.name][step])]

    def table(self) -> NDArray[np.int32]:
        """Returns what a kernel prefetches: a row per coordinate in alphabetical order, then two of 0 or 1: whether the
        accumulators start at a step, and whether they are complete after it."""
        is_complete = self.moves[self.results[0].name]
        index_rows = [self.steps[dim] for dim in sorted(self.steps)]
        return np.array([*index_rows, np.roll(is_complete, 1), is_complete], np.int32)

    def times(self, peak_flops: float, bytes_per_s: float) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Returns the time in seconds when each step finishes, and whether compute binds the step.

        A step takes the longer of its products and its copies: the next step's operands and the previous step's
        results. The first operands and the last results overlap with nothing.
        """
        fetch_s, write_s = (self.moved_bytes(arrays) / bytes_per_s for arrays in (self.operands, self.results))
        copy_s, math_s = np.append(fetch_s[1:], 0) + np.append(0, write_s[:-1]), self.flops_per_step / peak_flops
        step_s = np.maximum(math_s, copy_s)
        step_s[0] += fetch_s[0]
        step_s[-1] += write_s[-1]
        return np.cumsum(step_s), math_s >= copy_s


def tiled_loop(name: LoopName, *, seq: int, width: int, block: int, causal: bool = False) -> TiledLoop:
    """Returns the loop over tiles of ``block``.

    matmul: y[T,F] = x[T,D] w[D,F] with T = ``seq``, D = F = ``width``. flash: o[T,H] of one head of H = ``width``; its
    backward pass has k's tiles outside and q's inside, and keeps dq whole in VMEM. With ``causal`` tiles above the
    diagonal are left out. Raises InputError where ``block`` does not divide a tiled size, or steps are too many.
    """
    nest_dims, *array_texts, products_text = _LOOPS[name]
    sizes = {dim: 1 if dim == "1" else seq if dim in "tsT" else width for dim in "1tsTfdH"}
    tile_sizes = {dim: block if dim in nest_dims else size for dim, size in sizes.items()}
    blocks_per_dim = [sizes[dim] // block for dim in nest_dims]
    if any(sizes[dim] % block for dim in nest_dims) or math.prod(blocks_per_dim) > MAX_STEPS:
        words = " and ".join(str(size) for size in dict.fromkeys(sizes[dim] for dim in nest_dims))
        raise InputError(f"tiles of {block} must divide {words}, in at most {MAX_STEPS:,} steps. Use another --block.")
    indices_of = dict(zip(nest_dims, np.indices(blocks_per_dim).reshape(len(nest_dims), -1), strict=True))
    if causal and "s" in indices_of:
        indices_of = {dim: tile_indices[indices_of["s"] <= indices_of["t"]] for dim, tile_indices in indices_of.items()}

    def array(name: str, dims: str) -> TiledArray:
        (rows, cols), tile_shape = ([size_of[dim] for dim in dims] for size_of in (sizes, tile_sizes))
        return TiledArray(name, dims, (rows, cols), (tile_shape[0], tile_shape[1]), 4 if name in FP32 else 2)

    tiled_arrays = [[array(*word.split(":")) for word in text.split()] for text in array_texts]
    factor_names = [tuple(product.split()) for product in products_text.split(", ")]
    return TiledLoop(
        operands=tuple(tiled_arrays[0]),
        results=tuple(tiled_arrays[1]),
        sums={a.name: a.tile for a in tiled_arrays[2]},
        num_steps=len(indices_of[nest_dims[0]]),
        steps=indices_of,
        products=tuple(factor_names),
        flops_per_step=2 * block * block * (block if name == "matmul" else width) * len(factor_names),
    )


def untiled_attention(name: LoopName, *, seq: int, width: int) -> tuple[int, int]:
    """Returns (bytes, FLOPs) of attention of one head without tiles: every product and softmax is a separate kernel.

    Scores are fp32 in HBM. Forward writes and reads S and P. Backward reads P for dv and dS, writes and reads dP,
    writes dS and reads it for dq and dk. Other operands and results are in bf16.
    """
    num_passes, num_arrays, num_products = (4, 4, 2) if name == "flash" else (7, 8, 4)
    return 4 * num_passes * seq * seq + 2 * num_arrays * seq * width, 2 * num_products * seq * seq * width
