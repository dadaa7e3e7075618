"""Bytes of prefill and decode beside weights, worked out by hand: caches in tiles, and what XLA copies."""

import msgspec
import pytest

from meshwright.algebra.generation.program import Storage
from meshwright.api.planning import make_setting
from meshwright.cost.memory.generation import copied_bytes, widened_results
from meshwright.cost.setting import Setting
from meshwright.plan.serving.fleet import engine_strategy
from meshwright.spec.strategy import Strategy, make_mesh, standard_assignment

INT8 = Storage(cache_dtype="int8")


def setting_of(model, cluster, *, kind="decode", batch=8, storage=None) -> Setting:
    made = make_setting(model, cluster, batch=f"{batch}seq", seq_len=1024, calibration="datasheet", kind=kind)
    return Setting(made.model, made.cluster, made.job, made.calibration, storage or Storage())


def memory_of(model, cluster, axes, **given) -> dict:
    strategy = Strategy(mesh=make_mesh(axes), assignment=standard_assignment(zero=0))
    return setting_of(model, cluster, **given).memory(strategy)


def cache_of(model, cluster, axes, **given) -> float:
    return float(memory_of(model, cluster, axes, **given)["kv_cache"])


def test_a_slots_heads_fill_tiles_on_tpus():
    """llama3-8b: 32 layers, 8 kv heads of 128; a tile of int8 has at least 4 rows, of bf16 2. Heads that are fewer are
    no dim of the tiles, whose rows are slots then."""
    slots = 32 * 2 * 8 * 1024
    assert cache_of("llama3-8b", "v5e:2x2", {"tensor": 4}) == slots * 2 * 128 * 2
    scales = slots * 2 * 4
    assert cache_of("llama3-8b", "v5e:2x2", {"tensor": 4}, storage=INT8) == slots * 2 * 128 + scales
    assert cache_of("llama3-8b", "h100:4x1", {"tensor": 4}, storage=INT8) == slots * 2 * 128 + scales
    assert cache_of("llama3-8b", "v5e:2x4", {"tensor": 8}, storage=INT8) == slots * 128 + slots * 4


def test_heads_of_64_fill_128_lanes_on_tpus():
    on_tpus, on_gpus = (
        cache_of("gpt-oss-20b", c, {"data": 4}, storage=Storage(page_len=16)) for c in ("v5p:2x2x1", "h100:4x1")
    )
    assert on_tpus == 2 * on_gpus


def test_gpus_slice_the_weights_of_a_layer():
    """llama3-8b on one device: a layer has 218.1M numbers in matrices; pages are read where they are."""
    matrices = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336) * 2
    on_gpu, on_tpu = (memory_of("llama3-8b", c, {})["workspace"] for c in ("h100:1x1", "v5e:1x1"))
    # beside results of 8 tokens, at most four of the 14,336 wide ones
    assert 0 < on_gpu - matrices < 4 * 8 * 14336 * 2
    assert on_tpu < matrices / 50


def test_what_attention_reads_has_been_scaled_on_gpus():
    """t5-11b has no rope between a product and attention: of its encoder's only the first product of the MLP waits."""
    setting = setting_of("t5-11b", "h100:1x1", kind="prefill", storage=Storage(weights="int8"))
    strategy = Strategy(mesh=make_mesh({}))
    layer = next(block for block in setting.derived(strategy).blocks if block.name == "encoder_layer")
    widened = {array.name: times for array, times in widened_results(layer.forward, setting.sizes(strategy)).items()}
    assert widened == dict.fromkeys(("encoder_a", "encoder_u", "encoder_y"), 2.0)


def test_products_with_int8_weights_are_in_float32_on_gpus():
    given = {"kind": "prefill", "storage": Storage(weights="int8")}
    on_gpu, on_tpu = (memory_of("gemma2-27b", c, {}, **given)["workspace"] for c in ("b200:1x1", "v6e:1x1"))
    layer = 4608 * (2 * 4096 + 2 * 2048 + 3 * 36864)
    # gate and up, of 8 sequences of 1,024: 2 bytes more each
    assert on_gpu - on_tpu == pytest.approx(2 * 2 * 8 * 1024 * 36864 + layer, rel=0.01)


def test_writes_change_the_tiles_of_int8_latents_on_tpus():
    wide, narrow = (
        memory_of("deepseek-v2-lite", "v5p:2x2x1", {"data": 4}, storage=s, batch=64) for s in (Storage(), INT8)
    )
    latents = 26 * 16 * 1024 * (512 + 64)  # of the layers with experts, on one device
    assert latents < narrow["workspace"] < 1.01 * latents
    assert wide["workspace"] < 0.03 * latents


def test_gpus_transpose_all_layers_of_what_is_gathered_along_another_dim():
    """llama3-70b, fsdp 2 x tp 4: wo [64 heads x 128, 8192] and w_down [28672, 8192] of 80 layers are gathered along
    their last dim, and lie on 8 devices; measured on h100: 3.5 GB in int8, 7.0 in bf16."""
    strategy = engine_strategy({"context": 2, "tensor": 4}, "", "gathered")
    moved, one = (
        float(copied_bytes(layer, derived, setting.sizes(at)))
        for at in (strategy, engine_strategy({"context": 1, "tensor": 8}, "", "gathered"))
        for setting in [setting_of("llama3-70b", "h100:8x1", kind="prefill", batch=1)]
        for derived in [setting.derived(at)]
        for layer in [next(block for block in derived.blocks if block.is_layer)]
    )
    turned = 80 * (64 * 128 + 28672) * 8192 // 8 * 2
    assert turned <= moved - one < 1.01 * turned


def test_products_of_gathered_rows_are_joined():
    """mixtral-8x7b, 4 x 2 on TPUs: the 2 x 2,048 slots of a device's tokens, half as many again for uneven loads, whose
    gates are 14,336 / 2 wide, are made a shard at a time."""
    setting = setting_of("mixtral-8x7b", "v6e:2x4", kind="prefill", batch=8)
    strategy = Strategy(mesh=make_mesh({"expert": 4, "tensor": 2}), assignment=standard_assignment(zero=0))
    derived, sizes = setting.derived(strategy), setting.sizes(strategy)
    layer = next(block for block in derived.blocks if block.is_layer)
    apart = msgspec.structs.replace(layer, forward=tuple(s for s in layer.forward if "C" not in s.result.dims))
    whole, without = (float(copied_bytes(block, derived, sizes)) for block in (layer, apart))
    assert whole - without == 1.5 * 2 * 2048 * 7168 * 2
