"""Tiled loops: which tiles of which arrays are in HBM, VMEM and registers at each step, and what moves between them.

One table of steps drives the kernel (`examples/flash_attention.py` makes its block specs of it), the counts and the
picture. As in a Pallas pipeline on a TPU, a tile is fetched when its number differs from that of the step before, a
result leaves when its number changes, and both happen beside the products of a step.
Source of the loops of attention: Dao, FlashAttention-2 (2023).
"""

import itertools
import math
from functools import cached_property
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.core.errors import InputError

LoopName = Literal["matmul", "flash", "flash-backward"]
MAX_STEPS = 1_000_000


class TiledArray(msgspec.Struct, frozen=True, kw_only=True):
    """An array in HBM and its tiles; ``picks`` has the coordinate of a step that numbers them along each dim, None
    where a tile spans the dim."""

    name: str
    shape: tuple[int, int]
    tile: tuple[int, int]
    picks: tuple[int | None, int | None]
    itemsize: int = 2
    is_result: bool = False

    def number(self, step: Any) -> tuple[Any, ...]:
        """Returns the tile's number along each dim; ``step`` maps a coordinate to its value, in a kernel a traced one."""
        return tuple(0 if pick is None else step[pick] for pick in self.picks)

    def title(self, step: Any) -> str:
        """Returns the name of a step's tile, such as ``k1`` or ``x0,2``."""
        return self.name + ",".join(str(step[pick]) for pick in self.picks if pick is not None)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.itemsize

    @property
    def tile_bytes(self) -> int:
        """Bytes of one tile."""
        return math.prod(self.tile) * self.itemsize


class TiledLoop(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A kernel's steps in order, each with the coordinates of its tiles.

    ``products`` are (left, right, result) of every matrix product of a step, each of ``product_flops``; a name that is
    no array of HBM is a tile that never leaves the registers. ``scratch`` are bytes of accumulators in VMEM. The first
    of the results is the one that the accumulators become.
    """

    arrays: tuple[TiledArray, ...]
    steps: NDArray[np.int32]
    products: tuple[tuple[str, str, str], ...]
    product_flops: int
    scratch: dict[str, int]

    @property
    def flops_per_step(self) -> int:
        """FLOPs of the products of one step."""
        return self.product_flops * len(self.products)

    @property
    def vmem_bytes(self) -> int:
        """Two buffers of every tile, as one is filled or emptied while the other is in use, and the accumulators."""
        return 2 * sum(one.tile_bytes for one in self.arrays) + sum(self.scratch.values())

    def _renewed(self, array: TiledArray) -> NDArray[np.bool_]:
        """True for each step whose tile is not that of the step before."""
        numbers = self.steps[:, [pick for pick in array.picks if pick is not None]]
        return np.concatenate([[True], (np.diff(numbers, axis=0) != 0).any(axis=1)])

    @cached_property
    def fetches(self) -> dict[str, NDArray[np.bool_]]:
        """Operand -> for each step, whether its tile is fetched for it."""
        return {one.name: self._renewed(one) for one in self.arrays if not one.is_result}

    @cached_property
    def writes(self) -> dict[str, NDArray[np.bool_]]:
        """Result -> for each step, whether its tile is complete after it and leaves."""
        return {one.name: np.roll(self._renewed(one), -1) for one in self.arrays if one.is_result}

    def moved(self, which: Literal["fetches", "writes"]) -> NDArray[np.int64]:
        """Returns the bytes that are fetched for each step, or written after it."""
        sizes = {one.name: one.tile_bytes for one in self.arrays}
        return sum(
            (np.int64(sizes[name]) * each for name, each in getattr(self, which).items()), np.zeros(len(self.steps), int)
        )

    @property
    def hbm_bytes(self) -> int:
        """Bytes that cross between HBM and VMEM, both ways."""
        return int(self.moved("fetches").sum() + self.moved("writes").sum())

    @property
    def flops(self) -> int:
        """FLOPs of all products; exponentials and sums are not counted."""
        return self.flops_per_step * len(self.steps)

    def table(self) -> NDArray[np.int32]:
        """Returns what a kernel prefetches: a row per coordinate, then two of 0 or 1: whether the accumulators start at
        this step, and whether they are complete after it."""
        result = next(one for one in self.arrays if one.is_result)
        return np.vstack([self.steps.T, self._renewed(result), self.writes[result.name]]).astype(np.int32)

    def times(self, peak_flops: float, bytes_per_s: float) -> NDArray[np.float64]:
        """Returns the second at which each step ends.

        A step takes the longer of its products and its copies: the next step's operands come, the last one's results go.
        The first operands and the last results have nothing to overlap with.
        """
        fetched, written = (self.moved(which) / bytes_per_s for which in ("fetches", "writes"))
        beside = np.append(fetched[1:], 0.0) + np.append(0.0, written[:-1])
        ends = fetched[0] + np.cumsum(np.maximum(self.flops_per_step / peak_flops, beside))
        ends[-1] += written[-1]
        return np.asarray(ends)


def tiled_loop(name: LoopName, *, seq: int, width: int, block: int, causal: bool = False) -> TiledLoop:
    """Returns the loop over tiles of ``block``; numbers of HBM have 2 bytes, statistics and sums 4.

    matmul: y[T,F] = x[T,D] w[D,F] with T = ``seq``, D = F = ``width``. flash: o[T,H] of one head of H = ``width``, whose
    backward pass has k's tiles outside and q's inside, and keeps dq whole in VMEM. With ``causal`` tiles above the
    diagonal are left out. Raises InputError where ``block`` does not divide a tiled size, or steps are too many.
    """
    sizes = {"--seq": seq, "--width": width} if name == "matmul" else {"--seq": seq}
    for option, size in sizes.items():
        if size % block:
            raise InputError(f"--block {block} does not divide {option} {size}. Use a divisor of it.")
    rows, cols = seq // block, width // block
    if (rows * cols * cols if name == "matmul" else rows * rows) > MAX_STEPS:
        raise InputError(f"tiles of {block} make more than {MAX_STEPS:,} steps. Use a larger --block.")
    if name == "matmul":
        order, tile = list(itertools.product(range(rows), range(cols), range(cols))), (block, block)
        return TiledLoop(
            arrays=(
                TiledArray(name="x", shape=(seq, width), tile=tile, picks=(0, 2)),
                TiledArray(name="w", shape=(width, width), tile=tile, picks=(2, 1)),
                TiledArray(name="y", shape=(seq, width), tile=tile, picks=(0, 1), is_result=True),
            ),
            steps=np.array(order, np.int32),
            products=(("x", "w", "y"),),
            product_flops=2 * block**3,
            scratch={"y": 4 * block * block},
        )
    forward, tile_bytes = name == "flash", 4 * block * width
    pairs = [(t, s) for t, s in itertools.product(range(rows), repeat=2) if s <= t or not causal]

    def array(name: str, pick: int | None, *, is_result: bool = False, row: bool = False) -> TiledArray:
        """Returns an array [seq, width], or [1, seq] for one number a query."""
        high = seq if pick is None else block
        shape, tile, picks = ((1, seq), (1, high), (None, pick)) if row else ((seq, width), (high, width), (pick, None))
        itemsize = 4 if row or pick is None else 2
        return TiledArray(name=name, shape=shape, tile=tile, picks=picks, itemsize=itemsize, is_result=is_result)

    q, k, v = array("q", 0), array("k", 1), array("v", 1)
    if forward:
        results = (array("o", 0, is_result=True), array("lse", 0, is_result=True, row=True))
        return TiledLoop(
            arrays=(q, k, v, *results),
            steps=np.array(pairs, np.int32),
            products=(("q", "k", "P"), ("P", "v", "o")),
            product_flops=2 * block * block * width,
            scratch={"o": tile_bytes, "m": 4 * block, "l": 4 * block},
        )
    given = (array("do", 0), array("lse", 0, row=True), array("delta", 0, row=True))
    results = tuple(array(name, pick, is_result=True) for name, pick in (("dk", 1), ("dv", 1), ("dq", None)))
    return TiledLoop(
        arrays=(q, k, v, *given, *results),
        steps=np.array(sorted(pairs, key=lambda pair: pair[::-1]), np.int32),
        products=(("q", "k", "P"), ("P", "do", "dv"), ("do", "v", "dS"), ("dS", "q", "dk"), ("dS", "k", "dq")),
        product_flops=2 * block * block * width,
        scratch={"dk": tile_bytes, "dv": tile_bytes},
    )


def untiled_attention(name: LoopName, *, seq: int, width: int) -> tuple[int, int]:
    """Returns (bytes, FLOPs) of one head whose products and softmax are operations of their own, with scores in fp32.

    Forward: S is written and read, P too. Backward, with P kept: P is read for dv and dS, dP is written and read, dS
    is written and read for dq and dk. Each product reads its other operand and writes its result in 2 bytes.
    """
    passes, narrow, products = (4, 4, 2) if name == "flash" else (7, 8, 4)
    return 4 * passes * seq * seq + 2 * narrow * seq * width, products * 2 * seq * seq * width
