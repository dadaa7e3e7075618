"""Encodes arrays for the links between islands: as float32, or in blocks of 8- or 4-bit integers with a scale.

The bytes depend only on the values. Decoding gives the same bits on every machine.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

Bits = Literal[32, 8, 4]
FlatFloats = np.ndarray[tuple[int], np.dtype[np.float32]]
Encoded = bytes | bytearray | memoryview

BLOCK = 64
"""Values that share a two-byte scale, which makes 8.25 or 4.25 bits a value."""

_TILE = 1 << 16
"""Values encoded at a time, so that temporary arrays fit in a core's cache."""

_MOST, _LEAST = np.float32(2.0**127), np.float32(2.0**-126)
"""The smallest magnitude that turns a block into NaNs, and the smallest scale."""

_TO_INTEGER = np.float32(1.5 * 2**23)
"""Added to a float32 below 2**22 it leaves the nearest integer, ties to even, in the low bits of the sum."""


class Codec(Protocol):
    """Writes one-dimensional float32 arrays as bytes and reads them back."""

    def num_bytes(self, size: int) -> int:
        """Returns the number of bytes of ``size`` encoded values."""
        ...

    def encode(self, values: FlatFloats) -> Encoded:
        """Returns the encoded values, which may share memory with ``values``."""
        ...

    def decode(self, buffer: Encoded, size: int) -> FlatFloats:
        """Returns ``size`` values, which may share memory with ``buffer``, and may then be read-only."""
        ...


class PlainCodec:
    """Writes values as little-endian float32."""

    def num_bytes(self, size: int) -> int:
        """Returns four bytes a value."""
        return 4 * size

    def encode(self, values: FlatFloats) -> Encoded:
        """Returns a view of the values' memory as bytes."""
        return np.ascontiguousarray(values, "<f4").data.cast("B")

    def decode(self, buffer: Encoded, size: int) -> FlatFloats:
        """Returns a view of the buffer as values."""
        return np.frombuffer(buffer, "<f4", size)


@dataclass(frozen=True)
class BlockCodec:
    """Quantises each block of `BLOCK` values to 8- or 4-bit integers, -levels to levels, times a scale.

    A scale is the upper half of a float32 (bfloat16), max|x| / levels rounded up: any block below 1.7e38 has one.
    Values are rounded to nearest, so that no error exceeds max|x| / levels / 2 by more than 1/128 of it. A block
    whose largest value is below levels * 2**-126 becomes zeros. A block with a NaN, an infinity or a value of
    2**127 becomes NaNs. The bytes are the scales, then the integers in tiles of 65,536: with 4 bits, the first half of
    a tile is in the lower halves of its bytes.
    """

    bits: Literal[8, 4]

    @property
    def levels(self) -> int:
        """The largest integer: 127 or 7."""
        return (1 << (self.bits - 1)) - 1

    def num_bytes(self, size: int) -> int:
        """Returns 66 (8 bits) or 34 (4 bits) bytes per block, the last block padded."""
        return -(-size // BLOCK) * (2 + BLOCK * self.bits // 8)

    def encode(self, values: FlatFloats) -> Encoded:
        """Returns the scales, then the integers."""
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
            with np.errstate(invalid="ignore", over="ignore"):  # expected in blocks that become NaNs
                np.multiply(blocks, inverse[:, None], out=scaled)
            scaled += shifted
            low_bytes = scaled.reshape(-1).view(np.uint32).astype(np.uint8)
            if self.bits == 4:
                half = low_bytes.size // 2
                low_bytes = np.bitwise_or(low_bytes[:half] & 15, low_bytes[half:] << 4, dtype=np.uint8)
            integers[self._bytes(start) : self._bytes(stop)] = low_bytes
        return encoded.data

    def decode(self, buffer: Encoded, size: int) -> FlatFloats:
        """Returns the integers times their scales."""
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
    """Returns the codec with this many bits a value, not counting scales; 32 is float32."""
    return _CODECS[bits]


def _tiles(num_blocks: int) -> Iterator[tuple[int, int]]:
    step = _TILE // BLOCK
    return ((start, min(start + step, num_blocks)) for start in range(0, num_blocks, step))
