"""Shapes in HLO: element type, dims, layout, tiling, memory space, and the bytes with and without padding."""

import math
import re
from functools import lru_cache
from itertools import islice

import msgspec

ELEMENT_BITS = {
    "pred": 8, "s1": 8, "u1": 8, "s2": 8, "u2": 8, "s4": 8, "u4": 8, "s8": 8, "u8": 8, "s16": 16, "u16": 16,
    "s32": 32, "u32": 32, "s64": 64, "u64": 64, "f4e2m1fn": 8, "f8e3m4": 8, "f8e4m3": 8, "f8e4m3b11fnuz": 8,
    "f8e4m3fn": 8, "f8e4m3fnuz": 8, "f8e5m2": 8, "f8e5m2fnuz": 8, "f8e8m0fnu": 8, "bf16": 16, "f16": 16,
    "f32": 32, "f64": 64, "c64": 64, "c128": 128,
}  # fmt: skip
"""Bits of an element in memory. Types of four bits or fewer take a byte unless the layout packs them, ``E(4)``."""

_SHAPE = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,<=? ]*)\](?:\{([^}]*)\})?")
_COMMENT = re.compile(r"/\*.*?\*/")
_TILES = re.compile(r"T((?:\([0-9,*]+\))+)")
_NUMBERS = re.compile(r"\(([0-9,*]+)\)")
_SPACE = re.compile(r"S\((\d+)\)")
_BITS = re.compile(r"E\((\d+)\)")
_TAIL = re.compile(r"L\((\d+)\)")


class Shape(msgspec.Struct, frozen=True):
    """One array's shape.

    ``minor_to_major`` lists the dims, the contiguous one first; ``tiles`` tile the minor dims, each dividing the
    previous one. Both are empty without a layout (row-major), ``tiles`` also if they join dims (``*``). A dim of
    unknown size is 1, a bounded one its bound. Elements are padded to a multiple of ``tail_elements``.
    """

    dtype: str
    dims: tuple[int, ...]
    minor_to_major: tuple[int, ...] = ()
    tiles: tuple[tuple[int, ...], ...] = ()
    memory_space: int = 0
    element_bits: int = 0
    tail_elements: int = 1

    @property
    def is_possible(self) -> bool:
        """True if the layout orders exactly these dims and no tile is empty."""
        has_order = not self.minor_to_major or sorted(self.minor_to_major) == [*range(len(self.dims))]
        return has_order and all(0 < n < 2**40 for n in (self.tail_elements, *(n for tile in self.tiles for n in tile)))

    @property
    def num_elements(self) -> int:
        """Elements without padding."""
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        """Bytes without padding; 0 for tokens and for types that `ELEMENT_BITS` lacks."""
        return -(-self.num_elements * self.element_bits // 8)

    @property
    def order(self) -> tuple[int, ...]:
        """Dims from major to minor."""
        return tuple(reversed(self.minor_to_major)) if self.minor_to_major else tuple(range(len(self.dims)))

    @property
    def physical(self) -> tuple[int, ...]:
        """Sizes of the dims from major to minor."""
        return tuple(self.dims[dim] for dim in self.order)

    @property
    def padded_dims(self) -> tuple[int, ...]:
        """Sizes from major to minor, rounded up to whole tiles of the first level."""
        if not self.tiles:
            return self.physical
        untiled_sizes, num_tiles = _cut(self.physical, self.tiles[0])
        return (*untiled_sizes, *(count * size for count, size in zip(num_tiles, self.tiles[0], strict=True)))

    @property
    def padded_bytes(self) -> int:
        """Bytes in memory, with every tiled dim rounded up to whole tiles, level by level."""
        sizes = self.physical
        for tile in self.tiles:
            untiled_sizes, num_tiles = _cut(sizes, tile)
            sizes = (*untiled_sizes, *num_tiles, *tile)
        num_elements = -(-math.prod(sizes) // self.tail_elements) * self.tail_elements
        return -(-num_elements * self.element_bits // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@lru_cache(maxsize=4096)  # a program writes the same shapes again and again
def parse_shapes(text: str) -> tuple[Shape, ...]:
    """Parses a shape such as ``f32[2,16]{1,0:T(8,128)}``, or all shapes of a tuple, in order."""
    return tuple(_shape(*parts) for parts in _SHAPE.findall(_COMMENT.sub("", text)))


def element_shape(text: str, index: int) -> str:
    """Returns the text of array ``index`` of a flat tuple's shape; empty if it has no such array."""
    return next((match[0] for match in islice(_SHAPE.finditer(_COMMENT.sub("", text)), index, None)), "")


def shape_bytes(text: str) -> int:
    """Returns the bytes of a shape such as ``f32[2,16]{1,0}``, or of a tuple, without padding."""
    return sum(shape.num_bytes for shape in parse_shapes(text))


def _shape(dtype: str, dims: str, layout: str) -> Shape:
    order_text, _, rest_text = layout.partition(":")
    tiles_match, space_match, bits_match, tail_match = (p.search(rest_text) for p in (_TILES, _SPACE, _BITS, _TAIL))
    tiles_text = tiles_match[1] if tiles_match and "*" not in tiles_match[1] else ""
    return Shape(
        dtype=dtype,
        dims=tuple(int(n.strip(" <=?") or 1) for n in dims.split(",") if n.strip()),
        minor_to_major=tuple(int(n) for n in order_text.split(",") if n.strip().isdigit()),
        tiles=tuple(tuple(map(int, tile.split(","))) for tile in _NUMBERS.findall(tiles_text)),
        memory_space=int(space_match[1]) if space_match else 0,
        element_bits=int(bits_match[1]) if bits_match and int(bits_match[1]) else ELEMENT_BITS.get(dtype, 0),
        tail_elements=int(tail_match[1]) if tail_match else 1,
    )


def _cut(sizes: tuple[int, ...], tile: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns (sizes of the untiled dims, number of tiles along each tiled dim)."""
    sizes = (1,) * (len(tile) - len(sizes)) + sizes
    num_untiled = len(sizes) - len(tile)
    return sizes[:num_untiled], tuple(-(-n // t) for n, t in zip(sizes[num_untiled:], tile, strict=True))
