"""Tensors in four-bit blocks (MXFP4) read as bf16: the form in which gpt-oss publishes its experts.

A block is 32 values of one scale: two values to a byte, the even one in the low half, times 2 to the power of the
scale's byte less 127. Blocks lie along the inputs of [E, out, in / 32, 16] bytes; what is read is [E, in, out].
Source: OCP Microscaling Formats 1.0, section 5.3.
"""

import ml_dtypes
import numpy as np

from meshwright.nn.hf.files import Tensors

BLOCK = 32
BLOCKS, SCALES = "_blocks", "_scales"
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = np.asarray([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], np.float32)
"""Four bits (a sign, two of exponent, one of mantissa) -> value."""
_SCALE_BIAS = 127


class Unpacked:
    """`Tensors` in which packed ones appear under their plain names; only the blocks that are asked for are read."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        names = tensors.names
        stems = (name.removesuffix(BLOCKS) for name in names if name.endswith(BLOCKS))
        self._packed = frozenset(stem for stem in stems if stem + SCALES in names)
        self._names = names | self._packed

    @property
    def names(self) -> frozenset[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._packed:
            return self.tensors.shape(name)
        experts, outputs, blocks, _ = self.tensors.shape(name + BLOCKS)
        return experts, blocks * BLOCK, outputs

    def read(self, name: str, box: tuple[slice, ...]) -> np.ndarray:
        if name not in self._packed:
            return self.tensors.read(name, box)
        experts, inputs, outputs = box
        blocks = slice(inputs.start // BLOCK, -(-inputs.stop // BLOCK))
        packed = self.tensors.read(name + BLOCKS, (experts, outputs, blocks, slice(0, BLOCK // 2)))
        scales = self.tensors.read(name + SCALES, (experts, outputs, blocks))
        first = inputs.start - blocks.start * BLOCK
        wide = unpack(packed, scales)[..., first : first + inputs.stop - inputs.start]
        return wide.transpose(0, 2, 1)


def unpack(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[..., blocks, 16] bytes and [..., blocks] scales -> [..., blocks * 32] in bf16."""
    values = np.stack([VALUES[packed & 0x0F], VALUES[packed >> 4]], axis=-1)
    scaled = np.ldexp(values, (scales.astype(np.int32) - _SCALE_BIAS)[..., None, None])
    return scaled.reshape(*packed.shape[:-2], -1).astype(ml_dtypes.bfloat16)
