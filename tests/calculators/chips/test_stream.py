"""Tiled loops: bytes and FLOPs in closed form, the pipeline's times by hand, and what is refused."""

import itertools

import numpy as np
import pytest

from meshwright.calculators.chips.stream import tiled_loop, untiled_attention
from meshwright.core.errors import InputError

SIZES = [(512, 128, 128), (512, 64, 128), (1024, 128, 256), (256, 32, 32)]


def moved(loop):
    return int(loop.moved_bytes((*loop.operands, *loop.results)).sum())


@pytest.mark.parametrize(("seq", "width", "block"), SIZES)
def test_flash_moves_and_computes_what_the_page_says(seq, width, block):
    n = seq // block
    forward = tiled_loop("flash", seq=seq, width=width, block=block)
    assert moved(forward) == 4 * seq * width + 4 * n * seq * width + 4 * seq
    assert forward.flops_per_step * forward.num_steps == 4 * seq * seq * width
    backward = tiled_loop("flash-backward", seq=seq, width=width, block=block)
    assert moved(backward) == 4 * n * seq * width + 8 * n * seq + 8 * seq * width + 4 * seq * width
    assert backward.flops_per_step * backward.num_steps == 10 * seq * seq * width


def test_a_causal_mask_leaves_tiles_out():
    seq, width, block = 512, 64, 128
    n = seq // block
    forward = tiled_loop("flash", seq=seq, width=width, block=block, causal=True)
    assert forward.num_steps == n * (n + 1) // 2
    # tile 0 of k and v is there already when the second row of tiles starts
    assert moved(forward) == 4 * seq * width + 4 * seq + 4 * (n * (n + 1) // 2 - 1) * block * width
    for s, t in itertools.product(range(n), repeat=2):
        met = ((forward.steps["s"] == s) & (forward.steps["t"] == t)).any()
        some_query_sees = np.tri(seq)[t * block : (t + 1) * block, s * block : (s + 1) * block].any()
        assert met == some_query_sees
    backward = tiled_loop("flash-backward", seq=seq, width=width, block=block, causal=True)
    pairs = [set(zip(loop.steps["t"], loop.steps["s"], strict=True)) for loop in (forward, backward)]
    assert pairs[0] == pairs[1]


@pytest.mark.parametrize(("seq", "width", "block"), [(512, 256, 128), (256, 512, 64)])
def test_matmul_fetches_two_tiles_a_step(seq, width, block):
    loop = tiled_loop("matmul", seq=seq, width=width, block=block)
    # y[T,F] = x[T,D] w[D,F]: x is fetched for each tile of F, w for each tile of T
    assert moved(loop) == 2 * (seq * width * width // block * 2 + seq * width)
    assert loop.flops_per_step * loop.num_steps == 2 * seq * width * width


def test_one_tile_moves_everything_once():
    loop = tiled_loop("flash-backward", seq=128, width=64, block=128)
    assert loop.num_steps == 1
    assert moved(loop) == sum(np.prod(a.shape) * a.itemsize for a in (*loop.operands, *loop.results))
    ends, _ = loop.times(peak_flops=1e12, bytes_per_s=1e9)
    assert ends[0] == pytest.approx(loop.flops_per_step / 1e12 + moved(loop) / 1e9)


def test_the_table_says_where_sums_start_and_end():
    loop = tiled_loop("flash-backward", seq=256, width=64, block=128, causal=True)
    assert loop.table().tolist() == [[0, 0, 1], [0, 1, 1], [1, 0, 1], [0, 1, 1]]  # s, t, starts, complete


def test_times_by_hand():
    """Tiles of 2 x 2 in bf16: 8 bytes each, 16 FLOPs a step, 4 steps for 2 tiles of y."""
    loop = tiled_loop("matmul", seq=2, width=4, block=2)
    fetched, written = loop.moved_bytes(loop.operands), loop.moved_bytes(loop.results)
    assert (fetched.tolist(), written.tolist()) == ([16, 16, 16, 16], [0, 8, 0, 8])
    # 1 B/s, 1 FLOP/s: first copies 16 s; steps of 16, 16, 16 + 8 (y0 leaves), 16 s; the last y 8 s
    ends, computes = loop.times(peak_flops=1, bytes_per_s=1)
    assert ends.tolist() == [32, 48, 72, 96]
    assert computes.tolist() == [True, True, False, True]


@pytest.mark.parametrize(("name", "passes"), [("flash", 4), ("flash-backward", 7)])
def test_scores_in_hbm_are_most_of_the_bytes(name, passes):
    num_bytes, flops = untiled_attention(name, seq=4096, width=64)
    assert num_bytes == pytest.approx(4 * passes * 4096**2, rel=0.02)
    assert flops == {"flash": 4, "flash-backward": 8}[name] * 4096**2 * 64


def test_refused():
    with pytest.raises(InputError, match="tiles of 100 must divide 512"):
        tiled_loop("flash", seq=512, width=128, block=100)
    with pytest.raises(InputError, match="at most 300,000 steps"):
        tiled_loop("flash", seq=65536, width=128, block=64)
