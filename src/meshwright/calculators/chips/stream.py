"""Tiled loops: which tiles each step uses, and what moves between HBM and VMEM for it.

One table of steps drives the kernel (`examples/flash_attention.py` makes its block specs of it), the counts and the
picture. As in a Pallas pipeline on a TPU, a tile is fetched when its number differs from that of the step before, a
result leaves when its number changes, and both overlap with products. Source: Dao, FlashAttention-2 (2023).
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
    """An array in HBM and its tiles, numbered along the tiled ones of its dims."""

    name: str
    dims: str
    shape: tuple[int, int]
    tile: tuple[int, int]

    def number(self, step: Mapping[str, Any]) -> tuple[Any, ...]:
        """Returns the number of the tile of a step; a kernel traces the coordinates."""
        return tuple(step.get(dim, 0) for dim in self.dims)

    def title(self, number: Iterable[int]) -> str:
        """Returns the name of a tile, such as ``k1`` or ``x0,2``."""
        return self.name + ",".join(str(at) for at, dim in zip(number, self.dims, strict=True) if dim.islower())

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return 4 if self.name in ("lse", "delta", "dq") else 2

    @property
    def tile_bytes(self) -> int:
        """Bytes of one tile."""
        return math.prod(self.tile) * self.itemsize


class TiledLoop(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The steps of a kernel: coordinate -> its value at each step. A name in ``products`` that is no array is a tile that
    never leaves the registers. ``sums`` are the shapes of the fp32 accumulators in VMEM, of the first result first."""

    operands: tuple[TiledArray, ...]
    results: tuple[TiledArray, ...]
    sums: dict[str, tuple[int, int]]
    steps: dict[str, NDArray[np.int64]]
    products: tuple[tuple[str, ...], ...]
    product_flops: int

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        return len(next(iter(self.steps.values())))

    @property
    def flops_per_step(self) -> int:
        """FLOPs of the products of one step; exponentials and sums are not counted."""
        return self.product_flops * len(self.products)

    @property
    def vmem_bytes(self) -> int:
        """Two buffers of every tile, as one is filled or emptied while the other is in use, and the accumulators."""
        tiles = 2 * sum(one.tile_bytes for one in (*self.operands, *self.results))
        return tiles + 4 * sum(map(math.prod, self.sums.values()))

    @cached_property
    def renewed(self) -> dict[str, NDArray[np.bool_]]:
        """Array -> for each step, whether its tile is another one than in the step before."""
        found = {}
        for one in (*self.operands, *self.results):
            numbers = np.array([self.steps[dim] for dim in one.dims if dim in self.steps]).reshape(-1, self.num_steps)
            found[one.name] = np.append(True, (np.diff(numbers) != 0).any(axis=0))
        return found

    @cached_property
    def fetched_bytes(self) -> NDArray[np.int64]:
        """Bytes that have to be in VMEM before each step and were not there in the step before."""
        return np.sum([one.tile_bytes * self.renewed[one.name].astype(int) for one in self.operands], axis=0)

    @cached_property
    def written_bytes(self) -> NDArray[np.int64]:
        """Bytes of results that are complete after each step."""
        return np.roll(
            np.sum([one.tile_bytes * self.renewed[one.name].astype(int) for one in self.results], axis=0), -1
        )

    @property
    def overlapped_bytes(self) -> NDArray[np.int64]:
        """Bytes that are copied during each step: the operands of the next one and the results of the one before."""
        return np.append(self.fetched_bytes[1:], 0) + np.append(0, self.written_bytes[:-1])

    def table(self) -> NDArray[np.int32]:
        """Returns what a kernel prefetches: a row per coordinate in alphabetical order, then two of 0 or 1: whether the
        accumulators start at a step, and whether they are complete after it."""
        starts = self.renewed[self.results[0].name]
        return np.array([*(self.steps[dim] for dim in sorted(self.steps)), starts, np.roll(starts, -1)], np.int32)

    def end_s(self, peak_flops: float, bytes_per_s: float) -> NDArray[np.float64]:
        """Returns the second at which each step ends: a step takes the longer of its products and its copies.

        The first operands and the last results have nothing to overlap with.
        """
        steps = np.maximum(self.flops_per_step / peak_flops, self.overlapped_bytes / bytes_per_s)
        steps[0] += self.fetched_bytes[0] / bytes_per_s
        steps[-1] += self.written_bytes[-1] / bytes_per_s
        return np.cumsum(steps)


def tiled_loop(name: LoopName, *, seq: int, width: int, block: int, causal: bool = False) -> TiledLoop:
    """Returns the loop over tiles of ``block``.

    matmul: y[T,F] = x[T,D] w[D,F] with T = ``seq``, D = F = ``width``. flash: o[T,H] of one head of H = ``width``; its
    backward pass has k's tiles outside and q's inside, and keeps dq whole in VMEM. With ``causal`` tiles above the
    diagonal are left out. Raises InputError where ``block`` does not divide a tiled size, or steps are too many.
    """
    nest, *arrays, products = _LOOPS[name]
    sizes = {dim: 1 if dim == "1" else seq if dim in "tsT" else width for dim in "1tsTfdH"}
    tiles = {dim: block if dim in nest else size for dim, size in sizes.items()}
    for dim in nest:
        if sizes[dim] % block:
            raise InputError(f"tiles of {block} do not divide {sizes[dim]} rows or columns. Use a --block that does.")
    counts = [sizes[dim] // block for dim in nest]
    if math.prod(counts) > MAX_STEPS:
        raise InputError(
            f"tiles of {block} make {math.prod(counts):,} steps. Use a larger --block: at most {MAX_STEPS:,}."
        )
    steps = dict(zip(nest, np.indices(counts).reshape(len(nest), -1), strict=True))
    if causal and "s" in steps:
        steps = {dim: each[steps["s"] <= steps["t"]] for dim, each in steps.items()}
    operands, results, sums = (
        [
            TiledArray(one, dims, (sizes[dims[0]], sizes[dims[1]]), (tiles[dims[0]], tiles[dims[1]]))
            for one, dims in pairs
        ]
        for pairs in ([each.split(":") for each in text.split()] for text in arrays)
    )
    return TiledLoop(
        operands=tuple(operands),
        results=tuple(results),
        sums={one.name: one.tile for one in sums},
        steps=steps,
        products=tuple(tuple(product.split()) for product in products.split(", ")),
        product_flops=2 * block * block * (block if name == "matmul" else width),
    )


def untiled_attention(name: LoopName, *, seq: int, width: int) -> tuple[int, int]:
    """Returns (bytes, FLOPs) of one head whose products and softmax are operations of their own, with scores in fp32.

    Forward: S is written and read, P too. Backward, with P kept: P is read for dv and dS, dP is written and read, dS
    is written and read for dq and dk. Each product reads its other operand and writes its result in bf16.
    """
    passes, arrays, products = (4, 4, 2) if name == "flash" else (7, 8, 4)
    return 4 * passes * seq * seq + 2 * arrays * seq * width, 2 * products * seq * seq * width
