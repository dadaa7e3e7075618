"""How arrays are written for the link between islands: as float32, or in blocks of 8- or 4-bit integers with a scale.

The bytes depend on the values alone. A member that decodes what another encoded has its bits, whatever its machine.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

Bits = Literal[32, 8, 4]
FlatFloats = np.ndarray[tuple[int], np.dtype[np.float32]]
Encoded = bytes | bytearray | memoryview

BLOCK = 64
"""Values that share a scale of two bytes: 8.25 and 4.25 bits a value."""

_TILE = 1 << 16
"""Values that are encoded at a time: their temporary arrays stay in a core's cache."""

_MOST, _LEAST = np.float32(2.0**127), np.float32(2.0**-126)
"""The smallest value that is too large for a block, and the smallest scale."""

_TO_INTEGER = np.float32(1.5 * 2**23)
"""Added to a float32 below 2**22 it leaves the nearest integer, ties to even, in the low bits of the sum."""


class Codec(Protocol):
    """Writes one-dimensional float32 arrays as bytes and reads them back."""

    def num_bytes(self, size: int) -> int:
        """Returns the bytes of ``size`` values."""
        ...

    def encode(self, values: FlatFloats) -> Encoded:
        """Returns the bytes of the values, which may share their memory."""
        ...

    def decode(self, buffer: Encoded, size: int) -> FlatFloats:
        """Returns the values, which may share the memory of the buffer, and may then be read-only."""
        ...


class PlainCodec:
    """Writes float32 as it is, little-endian."""

    def num_bytes(self, size: int) -> int:
        """Returns four bytes a value."""
        return 4 * size

    def encode(self, values: FlatFloats) -> Encoded:
        """Returns the memory of the values."""
        return np.ascontiguousarray(values, "<f4").data.cast("B")

    def decode(self, buffer: Encoded, size: int) -> FlatFloats:
        """Returns the buffer's memory as values."""
        return np.frombuffer(buffer, "<f4", size)


@dataclass(frozen=True)
class BlockCodec:
    """Writes integers of 8 or 4 bits, -levels to levels in each block of `BLOCK`, times the scale of the block.

    A scale is the upper half of a float32 (bfloat16), max|x| / levels rounded up: any block below 1.7e38 has one.
    Values are rounded to nearest, so that none is off by more than max|x| / levels / 2, and 1/128 of that. A block of
    which the largest value is below levels * 2**-126 becomes zeros. A block with a NaN, an infinity or a value of
    2**127 becomes NaNs. The bytes are the scales, then the integers in tiles of 65,536: with 4 bits, the first half of
    a tile is in the lower halves of its bytes.
    """

    bits: Literal[8, 4]

    @property
    def levels(self) -> int:
        """The largest integer: 127 or 7."""
        return (1 << (self.bits - 1)) - 1

    def num_bytes(self, size: int) -> int:
        """Returns the bytes of whole blocks, the last one padded: 66 or 34 each."""
        return -(-size // BLOCK) * (2 + BLOCK * self.bits // 8)

    def encode(self, values: FlatFloats) -> Encoded:
        """Returns the scales and the integers of the values."""
        num_blocks = -(-values.size // BLOCK)
        encoded = np.empty(self.num_bytes(values.size), np.uint8)
        scales, integers = encoded[: 2 * num_blocks].view("<u2"), encoded[2 * num_blocks :]
        shifted = _TO_INTEGER + np.float32(self._shift)
        for start, stop in _tiles(num_blocks):
            tile = values[start * BLOCK : stop * BLOCK]
            if tile.size % BLOCK:
                tile = np.pad(tile, (0, -tile.size % BLOCK))
            blocks = tile.reshape(-1, BLOCK)
            scaled = np.abs(blocks)
            scale_bits, inverse = self._scales(scaled.max(axis=1))
            scales[start:stop] = scale_bits
            with np.errstate(invalid="ignore", over="ignore"):  # in blocks that become NaNs
                np.multiply(blocks, inverse[:, None], out=scaled)
            scaled += shifted
            low_bytes = scaled.reshape(-1).view(np.uint32).astype(np.uint8)
            if self.bits == 4:
                half = low_bytes.size // 2
                low_bytes = np.bitwise_or(low_bytes[:half] & 15, low_bytes[half:] << 4, dtype=np.uint8)
            integers[self._bytes(start) : self._bytes(stop)] = low_bytes
        return encoded.data

    def decode(self, buffer: Encoded, size: int) -> FlatFloats:
        """Returns integers times scales."""
        num_blocks = -(-size // BLOCK)
        encoded = np.frombuffer(buffer, np.uint8, self.num_bytes(size))
        integers = encoded[2 * num_blocks :]
        scales = (encoded[: 2 * num_blocks].view("<u2").astype(np.uint32) << 16).view(np.float32)
        values = np.empty(num_blocks * BLOCK, np.float32)
        for start, stop in _tiles(num_blocks):
            tile, codes = values[start * BLOCK : stop * BLOCK], integers[self._bytes(start) : self._bytes(stop)]
            if self.bits == 4:
                half = codes.size
                tile[:half], tile[half:] = codes & 15, codes >> 4
                tile -= self._shift
            else:
                tile[:] = codes.view(np.int8)
            blocks = tile.reshape(-1, BLOCK)
            blocks *= scales[start:stop, None]
        return values[:size]

    @property
    def _shift(self) -> int:
        return 8 if self.bits == 4 else 0  # integers of four bits are written as 1 to 15

    def _bytes(self, blocks: int) -> int:
        return blocks * BLOCK * self.bits // 8

    def _scales(self, peaks: FlatFloats) -> tuple[np.ndarray, FlatFloats]:
        """Returns the upper 16 bits of the scale of each block, and 1 / scale, 0 where the scale is 0 or NaN."""
        scales = peaks / np.float32(self.levels)
        upper_bits = (scales.view(np.uint32) + np.uint32(0xFFFF)) >> 16
        has_scale = (scales >= _LEAST) & (peaks < _MOST)
        upper_bits = np.where(has_scale, upper_bits, np.where(scales < _LEAST, 0, 0x7FC0)).astype(np.uint32)
        inverse = np.zeros_like(scales)
        np.divide(np.float32(1), (upper_bits << 16).view(np.float32), out=inverse, where=has_scale)
        return upper_bits, inverse


FP32: Codec = PlainCodec()
_CODECS: dict[Bits, Codec] = {32: FP32, 8: BlockCodec(8), 4: BlockCodec(4)}


def codec_of(bits: Bits) -> Codec:
    """Returns the codec that writes a value in so many bits, without its share of a scale."""
    return _CODECS[bits]


def _tiles(num_blocks: int) -> Iterator[tuple[int, int]]:
    step = _TILE // BLOCK
    return ((start, min(start + step, num_blocks)) for start in range(0, num_blocks, step))
