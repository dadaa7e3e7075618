"""Seconds of single kernels, against times worked out by hand."""

import numpy as np
import pytest

from meshwright.core.errors import InputError
from meshwright.cost.formulas.serving import experts_read
from meshwright.cost.work import kernel_times
from meshwright.cost.work.kernel_times import (
    attention_s,
    collective_s,
    experts_s,
    gated_s,
    generation_attention_s,
    grouped_s,
    kernel_rates,
    latent_attention_s,
    loss_s,
    padded,
    product_s,
    small_reduce_s,
)
from meshwright.spec.chip import chip
from meshwright.spec.efficiency import KERNEL_NUMBERS, fitted_numbers

NUMBERS = {
    "compute": 0.5, "narrow": 0.8, "start_s": 1e-5, "call_s": 2e-5, "power": 1.0, "half": 0.0, "head_half": 32.0,
    "head_half_backward": 64.0, "grid_s": 1e-6, "softmax": 1024.0, "link": 0.5, "collective_s": 4e-6, "member_s": 1e-6,
    "ramp_s": 0.0, "step_s": 0.0, "decode_s": 1e-5, "block_s": 0.0, "experts_s": 3e-5, "reduce_s": 4e-6, "peers": 0.5,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _datasheet(monkeypatch):
    """Data-sheet bandwidths and masks for nothing, so that hand-worked times stay."""
    monkeypatch.setattr(kernel_times, "MEMORY", {"gpu": 1.0, "tpu": 1.0})
    monkeypatch.setattr(kernel_times, "NCCL_LINKS", {})
    monkeypatch.setattr(kernel_times, "MASKED", 0.0)


def rates(name, *, cores=None, **numbers):
    return kernel_rates(chip(name), NUMBERS | numbers, cores=cores)


def test_a_product_is_the_root_of_the_squares_of_its_flops_and_its_bytes():
    """64 x 66 tiles of 128 x 128 fill 132 SMs 32 times; the thin one is 64 tiles, split in two for one wave of 128."""
    math, moved = 2 * 8192 * 8192 * 8448 / (989.4e12 / 2), 2 * (8192 * 8192 + 2 * 8192 * 8448)
    full = product_s({"M": 8192, "K": 8192, "N": 8448}, rates("h100"))
    assert full == pytest.approx((math**2 + (moved / 3.35e12) ** 2) ** 0.5 + 1e-5)
    math, moved = 2 * 128 * 8192 * 8192 / (989.4e12 / 2) * 132 / 128, 2 * (2 * 128 * 8192 + 8192 * 8192)
    thin = product_s({"M": 128, "K": 8192, "N": 8192}, rates("h100"))
    assert thin == pytest.approx((math**2 + (moved / 3.35e12) ** 2) ** 0.5 + 1e-5)


def test_waves_are_counted_for_the_best_split():
    """144 tiles are two waves of 132 SMs where 1.09 are filled; in four parts 576 are five for 4.36."""
    at = rates("h100")
    assert at.waves(1536, 1536) == pytest.approx(2 * 132 / 144)
    assert at.waves(1536, 1536, (1, 2, 4)) == pytest.approx(5 * 132 / 576)
    assert rates("v5p").waves(1536, 1536) == 1.0


def test_filling_the_pipeline_takes_half_over_k_but_on_blackwell():
    shape = {"M": 8192, "K": 512, "N": 8448}
    math = 2 * 8192 * 512 * 8448 / 989.4e12
    moved = 2 * (8192 * 512 + 512 * 8448 + 8192 * 8448) / 3.35e12
    found = product_s(shape, rates("h100", half=128.0))
    assert found == pytest.approx(((math * (2 + 128 / 512)) ** 2 + moved**2) ** 0.5 + 1e-5)
    assert product_s(shape, rates("b200", half=128.0)) == product_s(shape, rates("b200"))


def test_an_fp8_product_reads_its_rows_twice_and_writes_them_once_before():
    shape = {"M": 8192, "K": 8192, "N": 8448}
    math = 2 * 8192 * 8192 * 8448 / (1979e12 * 0.5 * 0.8)
    moved = (8192 * 8192 + 8192 * 8448 + 2 * 8192 * 8448) / 3.35e12
    cast = 5 * 8192 * 8192 / 3.35e12
    assert product_s(shape, rates("h100"), narrow=True) == pytest.approx((math**2 + moved**2) ** 0.5 + cast + 2e-5)


def test_attention_on_a_tpu_pads_heads_transposes_operands_and_starts_each_head():
    """Heads of 128 on a unit of 256 take twice as long; a causal query sees (4096 + 2048) / 2 keys."""
    shape = {"B": 1, "T": 4096, "N": 8, "G": 8, "H": 128, "causal": 1}
    math = 4 * 8 * 4096 * 3072 * 256 / (918e12 / 2)
    moved = 4 * 4096 * 128 * 16 / 1.638e12
    assert attention_s(shape, rates("v6e")) == pytest.approx((math**2 + moved**2) ** 0.5 + 2 * moved + 8e-6 + 1e-5)
    assert padded(128, 256) == 256
    assert padded(100, 0) == 100


def test_softmax_adds_to_the_width_of_heads_on_gpus_half_as_much_with_twice_the_exponentials():
    shape = {"B": 2, "T": 2048, "N": 16, "G": 16, "H": 64, "causal": 0}
    scores, moved = 4 * 2 * 16 * 2048 * 2048, 4 * 2 * 2048 * 64 * 32 / 3.35e12
    forward = attention_s(shape, rates("h100"))
    assert forward == pytest.approx(((scores * 96 / (989.4e12 / 2)) ** 2 + moved**2) ** 0.5 + 1e-5)
    backward, apart = attention_s(shape, rates("h100"), phase="backward"), 8 * 2 * 16 * 2048 * 64 / 3.35e12
    math = 2.5 * scores * 128 / (989.4e12 / 2)
    assert backward == pytest.approx((math**2 + (2 * moved) ** 2) ** 0.5 + apart + 1e-5)
    assert rates("gb300").exponentials == 2 * rates("gb200").exponentials


def test_the_longest_block_comes_last_but_where_kernels_begin_with_it():
    """64 blocks of 128 queries, of 640 keys in the mean and 1,024 at most, on 132 SMs: the longest takes as long as
    1,024 x 132 / 64 keys for every block would."""
    shape = {"B": 1, "T": 1024, "N": 8, "G": 1, "H": 128, "causal": 1}
    each, longest = 4 * 8 * 1024 * 160 / (989.4e12 / 2), 1024 * 132 / 64
    moved = 4 * 1024 * 128 * 9 / 3.35e12
    assert attention_s(shape, rates("h100")) == pytest.approx(((each * longest) ** 2 + moved**2) ** 0.5 + 1e-5)
    each, longest = 4 * 8 * 1024 * 160 / (312e12 / 2), 1024 * 108 / 64
    moved = 4 * 1024 * 128 * 9 / 2.039e12
    found = attention_s(shape, rates("a100-80gb"))
    assert found == pytest.approx(((each * (640 + longest)) ** 2 + moved**2) ** 0.5 + 1e-5)


def test_a_mask_costs_a_share_of_the_block_at_the_diagonal(monkeypatch):
    """Of 4,096 keys in the mean 2,176 are seen, and a quarter of 256 is added."""
    shape = {"B": 64, "T": 4096, "N": 64, "G": 1, "H": 128, "causal": 1}
    plain = attention_s(shape, rates("h100"))
    monkeypatch.setattr(kernel_times, "MASKED", 0.25)
    assert attention_s(shape, rates("h100")) / plain == pytest.approx((2176 + 64) / 2176, rel=1e-3)


def test_pages_slow_down_attention_on_hopper_alone():
    shape = {"B": 4, "T": 16384, "N": 32, "G": 8, "H": 128, "causal": 1}
    for name, factor in (("h200", 2.0), ("b200", 1.0)):
        plain, paged = (attention_s(shape, rates(name, **more), paged=True) for more in ({}, {"paged.h100": 0.5}))
        assert paged == pytest.approx(factor * plain, rel=0.01)


def test_groups_on_a_tpu_run_on_one_core_with_a_tile_more_each():
    """A v5p has two cores of half its peak: 8 groups add 128 rows each."""
    shape = {"M": 65536, "K": 4096, "N": 4096, "G": 8, "copied": 0}
    math = 2 * (65536 + 8 * 128) * 4096**2 / (459e12 / 2) * 2
    moved = 2 * (2 * 65536 * 4096 + 8 * 4096**2) / 2.765e12
    assert grouped_s(shape, rates("v5p")) == pytest.approx((math**2 + moved**2) ** 0.5 + 1e-5)


def test_groups_of_mosaic_on_hopper_wait_for_shared_memory_and_copy_transposed_weights():
    """Tiles of 128 x 64: 192 values come in for 256 that instructions read, so products take 1.75 times as long."""
    shape = {"M": 65536, "K": 4096, "N": 4096, "G": 8, "copied": 0}
    math = 2 * (65536 + 8 * 128) * 4096**2 / 989.4e12 * 1.75
    moved = 2 * (2 * 65536 * 4096 + 8 * 4096**2) / 3.35e12
    found = grouped_s(shape, rates("h100"))
    assert found == pytest.approx((math**2 + moved**2) ** 0.5 + 1e-5)
    assert grouped_s(shape | {"copied": 8}, rates("h100")) - found == pytest.approx(4 * 8 * 4096**2 / 3.35e12)
    math = 2 * (65536 + 8 * 256) * 4096**2 / (2250e12 / 2)
    moved = 2 * (2 * 65536 * 4096 + 8 * 4096**2) / 7.7e12
    assert grouped_s(shape, rates("b200")) == pytest.approx((math**2 + moved**2) ** 0.5 + 1e-5)


def test_a_gate_of_mosaic_on_hopper_has_whole_waves():
    """11 rows of 12 tiles fill 132 SMs; a row more is a second wave. 384 values come in for 1,024 that are read."""
    found = [gated_s({"M": m, "K": 65536, "N": 1536, "copied": 0}, rates("h100"), fused=True) for m in (1408, 1536)]
    assert found[1] - 1e-5 == pytest.approx(2 * (found[0] - 1e-5), rel=0.02)
    math = 4 * 1408 * 65536 * 1536 / 989.4e12 * (1 + 384 / 1024)
    moved = 2 * (1408 * 65536 + 2 * 65536 * 1536 + 1408 * 1536) / 3.35e12
    assert found[0] == pytest.approx((math**2 + moved**2) ** 0.5 + 1e-5)


def test_an_unfused_gate_writes_and_reads_both_results_and_some_are_copied():
    shape = {"M": 65536, "K": 128, "N": 4096, "copied": np.array([0, 1])}
    math = 4 * 65536 * 128 * 4096 / (459e12 / 2)
    moved = 2 * (65536 * 128 + 2 * 128 * 4096) + np.array([18, 26]) * 65536 * 4096
    expected = (math**2 + (moved / 2.765e12) ** 2) ** 0.5 + 1e-5
    assert gated_s(shape, rates("v5p"), fused=False) == pytest.approx(expected)


def test_a_loss_moves_logits_on_gpus_and_has_vector_work_on_tpus():
    shape = {"M": 8192, "K": 4096, "N": 128256}
    product, logits = 2 * 8192 * 4096 * 128256 / (989.4e12 / 2), 4 * 8192 * 128256 / 3.35e12
    weights = 4096 * 128256
    assert loss_s(shape, rates("h100")) == pytest.approx(product + logits + 1e-5)
    backward = loss_s(shape, rates("h100"), phase="backward")
    assert backward == pytest.approx(3 * product + logits + 4 * weights / 3.35e12 + 1e-5)
    product, softmax = 2 * 8192 * 4096 * 128256 / (918e12 / 2), 2 * 8192 * 1024 * 128256 / 918e12
    assert loss_s(shape, rates("v6e")) == pytest.approx(product + softmax + 1e-5)
    backward = loss_s(shape, rates("v6e"), phase="backward")
    assert backward == pytest.approx(3 * product + 8 * weights / 1.638e12 + 1e-5)


def test_a_ring_copies_its_chunks_and_the_last_is_only_received():
    """AllGather over 4: 3.5 chunks; AllReduce: 6.5. The start is 4 us and one for each of 3 or 6 steps, or one."""
    shape = {"op": np.array(["all_gather", "all_reduce", "alltoall"]), "n": np.full(3, 4), "bytes": np.full(3, 8e8)}
    chunk = 2e8 / (450e9 / 2)
    expected = [3.5 * chunk + 7e-6, 6.5 * chunk + 10e-6, 3.5 * chunk + 5e-6]
    assert collective_s(shape, rates("h100")) == pytest.approx(expected)


def test_short_messages_carry_as_many_flags_as_bytes():
    """1 kB a chunk: four chunks twice, sooner than the ramp of 100 us; ``quick`` shortens all but the bytes."""
    shape = {"op": np.array(["all_gather"]), "n": np.array([4]), "bytes": np.array([4096.0])}
    chunk = 1024 / (450e9 / 2)
    assert collective_s(shape, rates("h100", ramp_s=1e-4)) == pytest.approx([8 * chunk + 7e-6])
    assert collective_s(shape, rates("h100", **{"quick.h100": 0.5})) == pytest.approx([3.5 * chunk + 3.5e-6])
    long = shape | {"bytes": np.array([4e9])}
    assert collective_s(long, rates("h100", ramp_s=1e-4)) == pytest.approx([3.5 * 1e9 / 225e9 + 1e-4 + 7e-6])


def test_the_switch_adds_up_for_eight_where_it_can():
    shape = {"op": np.array(["all_reduce"]), "n": np.array([8]), "bytes": np.array([8e8])}
    assert collective_s(shape, rates("h100")) == pytest.approx([9 * 1e8 / (225e9 * 0.85) + 18e-6])
    assert collective_s(shape, rates("a100-80gb")) == pytest.approx([14.5 * 1e8 / 150e9 + 18e-6])


# -- token generation ---------------------------------------------------------------------------------------


def cache(batch, length, *, heads=32, kv_heads=8, width=128, bits=16, window=0):
    return {"B": batch, "T": length, "N": heads, "G": kv_heads, "H": width, "bits": bits, "window": window}


def test_a_product_of_one_row_streams_its_weights_and_goes_through_k():
    """On GPUs alone: 8,192 entries of 0.4 ns; a v5p's has no such step."""
    shape = {"M": 1, "K": 8192, "N": 8192}
    found = product_s(shape, rates("h100", step_s=4e-10))
    assert found == pytest.approx(2 * 8192 * (8192 + 2) / 3.35e12 + 8192 * 4e-10 + 1e-5, rel=1e-3)
    assert product_s(shape, rates("v5p", step_s=4e-10)) == product_s(shape, rates("v5p"))


def test_scales_of_blocks_are_found_by_one_kernel_that_reads_rows_once():
    shape = {"M": 8192, "K": 8192, "N": 8448}
    apart = product_s(shape, rates("h100"), narrow=True) - product_s(shape, rates("h100"), narrow=True, blocks=True)
    assert apart == pytest.approx(2 * 8192 * 8192 / 3.35e12 + 2e-5 - 2 * 1e-5)


def test_attention_of_generation_reads_the_cache_of_each_sequence():
    """Keys and values of 64 x 4,096 positions, 8 heads of 128 entries of 2 bytes; and queries and outputs."""
    moved = 64 * 4096 * 8 * 128 * 4 + 64 * 32 * 128 * 4
    assert generation_attention_s(cache(64, 4096), rates("h100")) == pytest.approx(moved / 3.35e12 + 1e-5)
    moved = 64 * 4096 * 8 * 128 * 2 + 64 * 32 * 128 * 4
    assert generation_attention_s(cache(64, 4096, bits=8), rates("h100")) == pytest.approx(moved / 3.35e12 + 1e-5)
    seen = generation_attention_s(cache(64, 65536, window=128), rates("h100"))
    assert seen == generation_attention_s(cache(64, 128), rates("h100"))


def test_few_caches_are_read_in_parts_that_another_kernel_adds_and_many_take_turns():
    """8 kv heads on 132 SMs: 10 us more, but not for 256 positions. 4,096 of them take 5 us x 4,096 / 132."""
    one = generation_attention_s(cache(1, np.array([256, 65536])), rates("h100"))
    moved = np.array([256, 65536]) * 8 * 128 * 4 + 32 * 128 * 4
    assert one == pytest.approx(moved / 3.35e12 + np.array([1e-5, 2e-5]))
    many = generation_attention_s(cache(512, 256), rates("h100", block_s=5e-6))
    moved, blocks_s = (512 * 256 * 8 * 128 * 4 + 512 * 32 * 128 * 4) / 3.35e12, 5e-6 * 4096 / 132
    assert many == pytest.approx((moved**2 + blocks_s**2) ** 0.5 + 1e-5)


def test_latent_attention_is_bound_by_products_or_by_bytes_and_rotates_queries():
    """128 sequences have more tiles of 64 heads than 132 SMs; 16 heads are computed as 64."""
    entries, ends = 128 * 65536, 2 * 128 * 128 * (3 * 576 + 512) / 3.35e12
    math = 2 * entries * 128 * (576 + 512) / (989.4e12 / 2)
    shape = {"B": 128, "T": 65536, "N": 128, "bits": 16}
    assert latent_attention_s(shape, rates("h100")) == pytest.approx(math + ends + 2e-5)
    ends, parts = ends / 8, 8 * 128 * 1024 * 16 * 512 / 1024 / 3.35e12
    found = latent_attention_s(shape | {"N": 16}, rates("h100"))
    assert found == pytest.approx(max(math / 2, entries * 1152 / 3.35e12) + ends + 132 / 128 * parts + 2e-5)
    wide, narrow = (latent_attention_s(shape | {"bits": bits}, rates("b200", compute=0.1)) for bits in (16, 8))
    assert wide / narrow == pytest.approx(2, rel=0.02)


def test_experts_read_the_weights_of_those_that_are_met_once():
    """Two tokens that choose 2 of 8 each meet 3.5 experts. One of 3 x 4096 x 14336 has 64 rows more on Hopper."""
    weights, shape = 3 * 4096 * 14336, {"M": 4, "G": 3.5, "K": 4096, "N": 14336}
    moved = (2 * 3.5 * weights + 4 * (8 * 4096 + 6 * 14336)) / 3.35e12
    math = 2 * (4 + 3.5 * 64) * weights / 989.4e12
    assert experts_s(shape, rates("h100")) == pytest.approx((math**2 + moved**2) ** 0.5 + 3e-5)
    eight = [experts_s(shape, rates("h100"), bits=8, blocks=blocks) for blocks in (False, True)]
    assert eight[1] - eight[0] == pytest.approx(4e-5)
    moved = (3.5 * weights * 4.5 / 8 + 4 * (8 * 4096 + 6 * 14336)) / 7.7e12
    math = 2 * (4 + 3.5 * 128) * weights / 4500e12
    found = experts_s(shape, rates("b200"), bits=4.5)
    assert found == pytest.approx((math**2 + moved**2) ** 0.5 + 2e-5)


def test_a_small_sum_takes_one_shot_or_two():
    """8 GPUs: 7 arrays at half of 450 GB/s, or twice 7/8 of one and a second barrier of 4 us."""
    found = small_reduce_s({"n": 8, "bytes": np.array([8192.0, 8e6])}, rates("h100"))
    assert found == pytest.approx([7 * 8192 / 225e9 + 4e-6, 14e6 / 225e9 + 8e-6])
    assert small_reduce_s({"n": 2, "bytes": 8e6}, rates("h100")) == pytest.approx(8e6 / 225e9 + 4e-6)


@pytest.fixture
def shipped(_datasheet, monkeypatch):
    """The rates of a chip as they are shipped, without the data sheet's bandwidths of the other tests."""
    monkeypatch.undo()
    return lambda name: kernel_rates(chip(name), fitted_numbers(KERNEL_NUMBERS).numbers)


@pytest.mark.parametrize("name", ["a100-80gb", "h100", "h200", "b200", "gb300"])
def test_generation_takes_longer_with_batch_and_length_and_never_less_than_its_bytes(shipped, name):
    at = shipped(name)
    steps = 2.0 ** np.arange(10)
    for make in (lambda batch: cache(batch, 2048), lambda batch: cache(32, 128 * batch)):
        assert (np.diff(generation_attention_s(make(steps), at)) > 0).all()
        assert (np.diff(latent_attention_s(make(steps), at)) > 0).all()
    assert (np.diff(product_s({"M": steps, "K": 8192, "N": 7168}, at)) > 0).all()
    met = {"M": 8 * steps, "G": experts_read(steps, num_experts=256, active_experts=8), "K": 7168, "N": 2048}
    assert (np.diff(experts_s(met, at)) > 0).all()
    assert (np.diff(small_reduce_s({"n": 8, "bytes": 1024 * steps}, at)) > 0).all()
    large = 512 * 65536 * 8 * 128 * 4 / at.hbm_bytes_per_s / at["streams"]
    assert generation_attention_s(cache(512, 65536), at) == pytest.approx(large, rel=0.01)


@pytest.mark.parametrize(("batch", "parts_us", "bytes_us"), [(8, (44, 18, 24, 14), 75), (64, (46, 56, 24, 37), 113)])
def test_a_layer_of_llama3_70b_over_eight_h100(shipped, batch, parts_us, bytes_us):
    """A decode step at 4,096 positions: [8192, 7168] of gate and up, the cache of a kv head, [3584, 8192] of down, two
    sums of [batch, 8192]; the rest are query, key and value and the output. Weights and cache are 214 MB and more.

    TensorRT-LLM's products of 1 to 64 rows take 45 to 47 us (gate and up), 24 to 25 (down) and 9 (output); SGLang's
    attention 34 at batch 32, its sums of 128 KB and 1 MB 9 and 20 each.
    """
    at = shipped("h100")
    qkv, out, gates, down = (
        product_s({"M": batch, "K": k, "N": n}, at) for k, n in ((8192, 1280), (1024, 8192), (8192, 7168), (3584, 8192))
    )
    seen = generation_attention_s(cache(batch, 4096, heads=8, kv_heads=1), at)
    sums = 2 * small_reduce_s({"n": 8, "bytes": batch * 8192 * 2}, at)
    assert [1e6 * one for one in (gates, seen, down, sums)] == pytest.approx(parts_us, abs=1)
    weights = 2 * 8192 * (1280 + 1024 + 7168 + 3584)
    streamed = (weights + batch * 4096 * 128 * 4) / at.hbm_bytes_per_s
    assert 1e6 * streamed == pytest.approx(bytes_us, abs=1)
    assert 1.5 < (qkv + out + gates + down + seen + sums) / streamed < 1.7


def test_a_number_of_the_chip_goes_before_that_of_its_family_and_its_unit():
    numbers = {"compute.256": 0.1, "compute.v6e": 0.2, "compute.tpu7x": 0.3, "compute.tpu": 0.4}
    found = [kernel_rates(chip(name), numbers)["compute"] for name in ("tpu7x", "v6e")]
    assert found == [0.3, 0.2]
    assert kernel_rates(chip("v6e"), {"compute.256": 0.1, "compute.tpu": 0.4})["compute"] == 0.1


def test_one_core_of_an_ironwood_has_half_its_rates():
    whole, core = rates("tpu7x"), rates("tpu7x", cores=1)
    assert (core.flops_per_s, core.hbm_bytes_per_s) == (whole.flops_per_s / 2, whole.hbm_bytes_per_s / 2)


def test_power_limits_blackwell_whatever_its_peak():
    """With exponent 1 a GB200 of 1,200 W has 1.2 times the rate of a B200 of 1,000 W."""
    assert rates("gb200").flops_per_s == pytest.approx(1.2 * 2250e12)


def test_a_missing_number_is_named():
    with pytest.raises(InputError, match=r"kernel numbers lack 'start_s'. Fit them again"):
        product_s({"M": 1, "K": 1, "N": 1}, kernel_rates(chip("h100"), {"compute": 1.0}))
