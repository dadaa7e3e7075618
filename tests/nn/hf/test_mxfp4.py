import numpy as np
import pytest

from meshwright.core.errors import InputError
from meshwright.nn.hf.published import VALUES, unpack, with_floats


def packed(*shape, seed=0):
    rng = np.random.default_rng(seed)
    scales = rng.integers(120, 134, shape).astype(np.uint8)
    return rng.integers(0, 256, (*shape, 16)).astype(np.uint8), scales


def test_values_are_those_of_the_format():
    """Sign, two bits of exponent with bias 1, one of mantissa; exponent 0 is subnormal."""
    for bits in range(16):
        sign, exponent, mantissa = bits >> 3, (bits >> 1) & 3, bits & 1
        magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
        assert VALUES[bits] == (-1) ** sign * magnitude


def test_the_low_half_of_a_byte_comes_first():
    byte = np.zeros((1, 16), np.uint8)
    byte[0, 0] = 0x2 | (0xB << 4)
    found = unpack(byte, np.asarray([128], np.uint8)).astype(np.float32)
    np.testing.assert_array_equal(found[:3], [2.0, -3.0, 0.0])


def test_a_part_is_the_part_of_the_whole():
    blocks, scales = packed(3, 5, 4)
    tensors = with_floats({"w_blocks": blocks, "w_scales": scales, "b": np.zeros(3)}, None, np.dtype(np.float32))
    assert tensors["w"].shape == (3, 128, 5)
    assert {"w", "b"} <= tensors.keys()
    whole = tensors["w"][tuple(slice(0, size) for size in (3, 128, 5))]
    box = (slice(1, 3), slice(40, 100), slice(2, 5))
    np.testing.assert_array_equal(tensors["w"][box], whole[box])
    np.testing.assert_array_equal(whole[2, :, 1], unpack(blocks[2, 1], scales[2, 1]))


@pytest.mark.peer
def test_transformers_reads_the_same_numbers():
    torch = pytest.importorskip("torch", reason="torch is not installed: make test installs it")
    pytest.importorskip("transformers")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = packed(2, 6, 3)
    expected = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales)).float().numpy()
    tensors = with_floats({"w_blocks": blocks, "w_scales": scales}, None, np.dtype(np.float32))
    found = tensors["w"][tuple(slice(0, size) for size in tensors["w"].shape)]
    np.testing.assert_array_equal(found.astype(np.float32), expected)


@pytest.mark.parametrize(("blocks", "scales"), [((2, 6, 3, 8), (2, 6, 3)), ((2, 6, 3, 16), (2, 6, 2)), ((6, 16), (6,))])
def test_blocks_without_scales_of_their_shape_are_refused(blocks, scales):
    tensors = {"w_blocks": np.zeros(blocks, np.uint8), "w_scales": np.zeros(scales, np.uint8)}
    with pytest.raises(InputError, match=r"w: blocks of shape .* each 16 bytes need a scale. Fetch its files again"):
        with_floats(tensors, None, np.dtype(np.float32))
