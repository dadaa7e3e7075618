"""Codecs: bytes, bounds of the error, odd values, and the same bits for every member of a sum."""

import time
from functools import partial

import numpy as np
import pytest

from meshwright.islands.codec import BLOCK, FP32, BlockCodec, codec_of
from tests.islands.threads import members, together

BLOCKED = [BlockCodec(8), BlockCodec(4)]
SIZES = [0, 1, 63, 64, 65, 1000, (1 << 16) - 1, 1 << 16, (1 << 16) + 33, 3 * (1 << 16) + 640]
TINY = 2.0**-126


def normal(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def returned(codec: BlockCodec, values: np.ndarray) -> np.ndarray:
    values = np.asarray(values, np.float32)
    return codec.decode(codec.encode(values), values.size)


def peaks(values: np.ndarray) -> np.ndarray:
    """The largest magnitude of each value's block."""
    padded = np.pad(np.abs(values), (0, -values.size % BLOCK)).reshape(-1, BLOCK)
    return np.repeat(padded.max(axis=1), BLOCK)[: values.size]


@pytest.mark.parametrize("bits", [32, 8, 4])
@pytest.mark.parametrize("size", SIZES)
def test_every_size_comes_back(bits, size):
    codec, values = codec_of(bits), normal(size)
    encoded = codec.encode(values)
    assert memoryview(encoded).nbytes == codec.num_bytes(size)
    decoded = codec.decode(bytes(encoded), size)
    assert decoded.shape == (size,)
    assert decoded.dtype == np.float32
    bound = 0 if bits == 32 else peaks(values) / (2 ** (bits - 1) - 1) / 2 * (1 + 1 / 128)
    assert np.all(np.abs(decoded.astype(np.float64) - values) <= bound)


def test_bits_of_a_value():
    assert codec_of(4).num_bytes(1 << 20) * 8 / (1 << 20) == 4.25
    assert codec_of(8).num_bytes(1 << 20) * 8 / (1 << 20) == 8.25
    assert codec_of(32).num_bytes(1 << 20) == 1 << 22


@pytest.mark.parametrize("codec", BLOCKED)
@pytest.mark.parametrize("exponent", range(-117, 127, 13))
def test_magnitudes_of_float32(codec, exponent):
    """Scales have the exponents of float32, of float16 they would not."""
    values = normal(4096) / 6 * np.float32(2.0**exponent)
    bound = peaks(values) / codec.levels / 2 * (1 + 1 / 128)
    assert np.all(np.abs(returned(codec, values).astype(np.float64) - values) <= bound)


@pytest.mark.parametrize("codec", BLOCKED)
def test_blocks_do_not_disturb_each_other(codec):
    values = normal(256)
    values[:BLOCK] *= np.float32(1e30)
    assert np.array_equal(returned(codec, values)[BLOCK:], returned(codec, values[BLOCK:]))


@pytest.mark.parametrize("codec", BLOCKED)
@pytest.mark.parametrize("constant", [0.0, 1.0, -3.5, 1e30, -1e-30])
def test_constants(codec, constant):
    """All values of a block are the largest, and are off by no more than the rounding of the scale."""
    decoded = returned(codec, np.full(200, constant, np.float32))
    assert np.allclose(decoded, constant, rtol=1 / 128, atol=0)
    assert len(set(decoded.tolist())) == 1


@pytest.mark.parametrize("codec", BLOCKED)
def test_multiples_of_a_scale_are_exact(codec):
    """The scale of integers up to the largest is 1."""
    values = np.tile(np.arange(-codec.levels, codec.levels + 1), 20).astype(np.float32)
    values = np.concatenate([values[i : i + BLOCK - 1] for i in range(0, values.size, BLOCK - 1)][:4])
    blocks = np.append(values[: 4 * (BLOCK - 1)].reshape(4, BLOCK - 1), np.full((4, 1), codec.levels), axis=1)
    assert np.array_equal(returned(codec, blocks.reshape(-1).astype(np.float32)), blocks.reshape(-1))


@pytest.mark.parametrize("codec", BLOCKED)
def test_tiny_values_become_zeros(codec):
    values = normal(640) * np.float32(TINY / 8)
    assert 0 < np.abs(values).max() < codec.levels * TINY
    assert not np.any(returned(codec, values))
    assert not np.any(returned(codec, np.full(64, 1e-45, np.float32)))


@pytest.mark.parametrize("codec", BLOCKED)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf, 2.0**127, -3e38])
def test_a_value_that_has_no_place_makes_its_block_nan(codec, bad):
    values = normal(4 * BLOCK)
    values[70] = bad
    decoded = returned(codec, values)
    assert np.all(np.isnan(decoded[BLOCK : 2 * BLOCK]))
    assert np.array_equal(decoded[:BLOCK], returned(codec, values[:BLOCK]))
    assert not np.any(np.isnan(decoded[2 * BLOCK :]))


@pytest.mark.parametrize("codec", [FP32, *BLOCKED])
def test_nan_stays_in_a_sum(codec):
    def added(member):
        values = normal(300, seed=member.rank)
        if member.rank == 1:
            values[7] = np.nan
        return member.sum([values], codec=codec)[0]

    for total in together([partial(added, member) for member in members(3)]):
        assert np.isnan(total[7])
        assert np.all(np.isfinite(total[2 * BLOCK :]))


@pytest.mark.parametrize("codec", [FP32, *BLOCKED])
def test_bytes_depend_on_the_values_alone(codec):
    values = normal(70_000)
    spread = np.zeros(140_001, np.float32)[1::2]
    spread[:] = values
    assert bytes(codec.encode(values)) == bytes(codec.encode(values.copy())) == bytes(codec.encode(spread))


@pytest.mark.parametrize("bits", [32, 8, 4])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_members_have_the_same_bits(bits, size):
    codec, shapes = codec_of(bits), [(17, 9), (1,), (1000,)]

    def arrays(rank):
        return [normal(int(np.prod(shape)), seed=10 * rank + i).reshape(shape) for i, shape in enumerate(shapes)]

    sums = together([lambda member=member: member.sum(arrays(member.rank), codec=codec) for member in members(size)])
    for other in sums[1:]:
        assert all(a.tobytes() == b.tobytes() for a, b in zip(sums[0], other, strict=True))
    exact = [np.sum([arrays(rank)[i].astype(np.float64) for rank in range(size)], axis=0) for i in range(len(shapes))]
    levels = 2 ** (bits - 1) - 1
    for total, wanted in zip(sums[0], exact, strict=True):
        # each of the members' values and the sum are rounded once
        assert np.all(np.abs(total - wanted) <= (size + 1) * 5 * size / levels / 2 + 1e-5)
        assert total.shape == wanted.shape


def test_rounding_is_to_the_nearest_integer():
    values = np.zeros(BLOCK, np.float32)
    values[:6] = [7, 0.49, 0.51, -1.49, -1.51, 2.5]
    assert returned(BlockCodec(4), values)[:6].tolist() == [7, 0, 1, -1, -2, 2]


@pytest.mark.parametrize("codec", BLOCKED)
def test_a_core_encodes_300_mb_of_float32_a_second(codec):
    values = normal(1 << 22)

    def fastest_s(function):
        times = []
        for _ in range(5):
            start_s = time.process_time()
            function()
            times.append(time.process_time() - start_s)
        return min(times)

    encoded = codec.encode(values)
    assert values.nbytes / fastest_s(lambda: codec.encode(values)) > 300e6
    assert values.nbytes / fastest_s(lambda: codec.decode(encoded, values.size)) > 300e6
