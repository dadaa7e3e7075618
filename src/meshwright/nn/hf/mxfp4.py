"""Reads tensors in four-bit blocks (MXFP4), as gpt-oss publishes its experts, as bf16.

A block is 32 values with one scale: two values per byte, the even one in the low half, times 2 to the power of the
scale's byte minus 127. Blocks divide the inputs: [E, out, in / 32, 16] bytes are read as a tensor [E, in, out].
Source: OCP Microscaling Formats (MX) Specification 1.0 (2023), section 5.3.
"""

from dataclasses import dataclass

import numpy as np

from meshwright.nn.hf.files import DTYPES, Tensor, Tensors

BLOCK = 32
BLOCKS, SCALES = "_blocks", "_scales"
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = np.asarray([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], np.float32)
"""Four bits (a sign, two of exponent, one of mantissa) -> value."""
_SCALE_BIAS = 127


@dataclass(frozen=True)
class Packed:
    """A packed tensor that is read as [E, in, out]; only the blocks of a box are read."""

    blocks: Tensor
    scales: Tensor
    dtype: np.dtype = DTYPES["bf16"]

    @property
    def shape(self) -> tuple[int, ...]:
        experts, outputs, blocks, _ = self.blocks.shape
        return experts, blocks * BLOCK, outputs

    def __getitem__(self, box: tuple[slice, ...]) -> np.ndarray:
        experts, inputs, outputs = box
        blocks = slice(inputs.start // BLOCK, -(-inputs.stop // BLOCK))
        packed = self.blocks[experts, outputs, blocks, slice(0, BLOCK // 2)]
        scales = self.scales[experts, outputs, blocks]
        first = inputs.start - blocks.start * BLOCK
        wide = unpack(packed, scales)[..., first : first + inputs.stop - inputs.start]
        return wide.transpose(0, 2, 1)


def with_unpacked(tensors: Tensors) -> Tensors:
    """Returns the tensors with each pair ``X_blocks`` and ``X_scales`` as one tensor ``X``."""
    stems = (name.removesuffix(BLOCKS) for name in tensors if name.endswith(BLOCKS))
    packed = {s: Packed(tensors[s + BLOCKS], tensors[s + SCALES]) for s in stems if s + SCALES in tensors}
    parts = {s + end for s in packed for end in (BLOCKS, SCALES)}
    return {**{name: tensor for name, tensor in tensors.items() if name not in parts}, **packed}


def unpack(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Unpacks [..., blocks, 16] bytes with [..., blocks] scales to [..., blocks * 32] in bf16."""
    values = np.stack([VALUES[packed & 0x0F], VALUES[packed >> 4]], axis=-1)
    scaled = np.ldexp(values, (scales.astype(np.int32) - _SCALE_BIAS)[..., None, None])
    return scaled.reshape(*packed.shape[:-2], -1).astype(DTYPES["bf16"])
