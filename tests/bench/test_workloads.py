"""What the programs of a benchmark compute: FLOPs as counted, every round of it, and predictions worked out by hand."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.algebra.notation import parse_array
from meshwright.algebra.ops.attention import Attention
from meshwright.algebra.sizes import OpSizes
from meshwright.algebra.steps import Step
from meshwright.bench import workloads
from meshwright.bench.devices import Bench, Shard, Workload
from meshwright.bench.elementwise import _doubling, _fastest, doubling_repeats, predicted_seconds
from meshwright.bench.fit import fit_line
from meshwright.bench.links import datasheet_seconds, rate_of
from meshwright.bench.products import filled_share
from meshwright.bench.results import BenchReport, ChainTime, Copy, CopyPart, Group, Timing
from meshwright.bench.run import PARTS, make_bench
from meshwright.core.errors import CannotRunError, InputError
from meshwright.cost.formulas.roofline import vector_peak
from meshwright.cost.work.ops import op_flops
from meshwright.spec.chip import chip, chip_of_kind


@pytest.fixture(scope="module")
def two():
    return make_bench(jax.devices()[:2])


def test_every_part_has_its_place_in_the_report():
    assert set(PARTS) <= set(BenchReport.__struct_fields__)


def counted(body, *shapes):
    """FLOPs that XLA counts in a program."""
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(body).lower(*arrays).cost_analysis()["flops"]


def test_flops_of_a_product_are_those_that_xla_counts():
    assert counted(lambda a, b: a @ b, (64, 96), (96, 32)) == workloads.product_flops(64, 96, 32)


def test_flops_of_a_layer_are_those_of_its_products():
    sizes = {"D": 32, "F": 64, "N": 4, "K": 2, "H": 8}
    shapes = [shard.shape for shard in workloads.weight_shards(sizes, "fp32")]
    products = [counted(lambda a, b: a @ b, (16, shape[0]), shape) for shape in shapes]
    workload = workloads.layer_workload(sizes, 16, "fp32")
    assert workload.work == workloads.layer_flops(sizes, 16) == sum(products)
    assert [shard.shape for shard in workload.shards] == [(16, 32), *shapes]
    assert jax.eval_shape(workload.body, *shaped(workload)).shape == (16, 32)
    assert workload.rounds == workloads.LAYER_ROUNDS > 1


def shaped(workload):
    return [jax.ShapeDtypeStruct(shard.shape, jnp.float32) for shard in workload.shards]


def test_an_mlp_gives_its_output_and_all_gradients():
    workload = workloads.mlp_workload((16, 8, 32), "fp32")
    assert [one.shape for one in jax.eval_shape(workload.body, *shaped(workload))] == [
        (16, 8),
        (16, 8),
        (8, 32),
        (8, 32),
        (32, 8),
    ]
    assert workload.work == 9 * workloads.product_flops(16, 8, 32)


def test_attention_counts_what_cost_counts():
    shape = (2, 128, 8, 4, 32)
    both, forward = (workloads.attention_workload(shape, "fp32", both=one) for one in (True, False))
    assert both.work == 14 * 2 * 128 * 128 * 8 * 32
    sizes = OpSizes(dims=dict(zip("BTNKH", shape, strict=True)), mesh={}, state="fp32")
    q, k, positions = (parse_array(text) for text in ("q[B,T,N,H]", "k[B,T,K,H]", "positions[B,T]"))
    inputs = (q, k, k, positions, positions)
    step = Step(op="attention", inputs=inputs, result=q, details=Attention())
    backward = Step(op="attention_backward", inputs=(q, q, q, *inputs), result=q, details=Attention())
    assert forward.work == op_flops(step, sizes)
    assert both.work == op_flops(step, sizes) + op_flops(backward, sizes)


def test_rounds_of_a_product_stay_in_the_loop(two):
    """A product that the compiler takes out of the loop is made once, whatever the number of rounds."""
    workload = workloads.product_workload(two, "fp32", 64, 5)
    text = jax.jit(workload.body).lower(*shaped(workload)).compile().as_text()
    inside = text[: text.index("ENTRY")]
    assert "while(" in text
    assert inside.count(" dot(") + inside.count("custom-call(") >= 1


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_the_product_is_the_product(two, dtype):
    call = two.call(workloads.product_workload(two, dtype, 32, 1))
    a, b = call.arguments(0)
    out = np.asarray(call.run(a, b)).reshape(2, 32, 32)
    wide = np.int64 if dtype == "int8" else np.float64
    expected = np.asarray(a).reshape(2, 32, 32).astype(wide) @ np.asarray(b).reshape(2, 32, 32).astype(wide)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


def data(bench, number, *shards):
    return [np.asarray(x) for x in bench.data(Workload(body=None, shards=shards, work=0.0), number)]


@pytest.mark.parametrize("emulated", [True, False])
def test_data_is_as_asked_and_new_for_every_number(two, emulated, monkeypatch):
    """Repeated by the host for emulated devices, on the devices for others."""
    monkeypatch.setattr(Bench, "emulated", emulated)
    shards = [Shard(shape=(256, 8), contents=what) for what in ("zeros", "ones", "uniform", "normal")]
    zeros, ones, uniform, normal = data(two, 1, *shards)
    assert zeros.shape == (512, 8)
    assert not zeros.any()
    assert (ones == 1).all()
    assert 0 <= uniform.min() < uniform.max() < 1
    assert abs(normal.std() - 1) < 0.1
    assert (data(two, 2, *shards)[3] != normal).any()
    whole, narrow = (Shard(shape=(64, 8), dtype=dtype) for dtype in ("int8", "fp8"))
    integers, eighths = data(two, 0, whole, narrow)
    assert integers.dtype == np.int8
    assert integers.min() < -100 < 100 < integers.max()
    assert 0.8 < eighths.astype(np.float32).std() < 1.2


@pytest.mark.parametrize("emulated", [True, False])
def test_large_blocks_repeat_what_was_drawn(two, emulated, monkeypatch):
    monkeypatch.setattr(Bench, "emulated", emulated)
    monkeypatch.setattr("meshwright.bench.devices.DRAWN", 5)
    (found,) = data(two, 0, Shard(shape=(4, 3)))
    np.testing.assert_array_equal(found[:4].ravel(), np.resize(found[:4].ravel()[:5], 12))
    np.testing.assert_array_equal(found[:4], found[4:])
    assert len(set(found.ravel())) == 5


def test_results_in_place_are_the_next_arguments(two):
    workload = workloads.chain_workload(8, 2, fused=False)
    kept: list = []
    call = two.call(workload, kept)
    x, ab = (np.asarray(one) for one in call.arguments(0))
    out = np.asarray(call.run(*call.arguments(0)))
    factor, added = ab[0] * np.float32(1e-3), ab[1]
    np.testing.assert_allclose(out, (x * factor + added) * factor + added, rtol=1e-6)
    assert kept[0] is call.arguments(1)[0]
    assert workload.work == 2 * 2 * 8


def test_a_chain_is_that_many_multiply_adds():
    x, ab = jnp.arange(4.0), jnp.array([500.0, 3.0])
    expected = np.arange(4.0)
    for _ in range(3):
        expected = expected * 0.5 + 3
    np.testing.assert_allclose(workloads.chain_workload(4, 3).body(x, ab), expected, rtol=1e-6)
    assert counted(workloads.chain_workload(1000, 7).body, (1000,), (2,)) == pytest.approx(7 * 2 * 1000, rel=0.01)


def test_copies_are_made_in_every_round():
    zeros = jnp.zeros(4)
    np.testing.assert_array_equal(workloads.copy_workload("copy", 16, 5).body(zeros), np.full(4, 5.0))
    assert workloads.copy_workload("copy", 16, 5).work == 2 * 16
    assert workloads.copy_workload("silu", 16, 5).arrays == "same"


def test_multiply_adds_that_double_the_time():
    # 10 TFLOP/s, 2 TB/s, 8 bytes moved: 4 us of memory for 1e6 elements, 8 us are 40 multiply-adds.
    assert doubling_repeats(10e12, 2e12) == pytest.approx(2 * 8 / 2e12 / (2 / 10e12))
    assert doubling_repeats(10e12, 2e12) == pytest.approx(40)


@pytest.mark.parametrize(("seconds", "rate"), [((1, 2, 4), 2.0), ((1, 2.6, 2.5), 3.2), ((1, 1.5, 1.9), None)])
def test_the_vector_rate_is_that_of_the_fastest_chain_once_memory_does_not_hide_it(seconds, rate):
    chains = [
        ChainTime(
            repeats=n,
            fused=True,
            seconds=Timing(median_s=s, low_s=s, high_s=s, repeats=1),
            flops_per_s=2 * n / s,
            bytes_per_s=8 / s,
        )
        for n, s in zip((1, 2, 4), seconds, strict=True)
    ]
    assert _fastest(chains) == rate


def test_vector_rates_of_data_sheets():
    assert vector_peak(chip("v5p-book")) == 7e12
    assert vector_peak(chip("h100")) == pytest.approx(132 * 128 * 2 * 1.83e9)
    assert vector_peak(chip("cpu")) is None


def test_distances_and_their_predictions():
    a, b = (np.random.default_rng(seed).standard_normal((8, 8)).astype(np.float32) for seed in (0, 1))
    log_space, l1_distance = (workloads.DISTANCES[what][0](a, b) for what in ("log-space", "L1 distance"))
    np.testing.assert_allclose(log_space, np.log(np.exp(a) @ np.exp(b)), rtol=1e-5)
    np.testing.assert_allclose(l1_distance, np.abs(a[:, :, None] - b[None]).sum(1), rtol=1e-5)
    last = workloads.distance_workload("L1 distance", 8).body(jnp.asarray(a), jnp.asarray(b))
    np.testing.assert_allclose(last, l1_distance, rtol=1e-4)
    found = predicted_seconds(100, "cuda", matmul=1e9, vector=1e8)
    assert found == {"matmul": 2e-3, "log-space": pytest.approx(0.26), "L1 distance": pytest.approx(0.06)}
    assert predicted_seconds(100, "tpu", matmul=None, vector=1e8)["log-space"] == pytest.approx(0.12)
    assert predicted_seconds(100, "cpu", matmul=None, vector=None)["log-space"] is None


def chain(repeats, seconds):
    timing = Timing(median_s=seconds, low_s=seconds, high_s=seconds, repeats=3)
    return ChainTime(
        repeats=repeats, fused=True, seconds=timing, flops_per_s=2e6 * repeats / seconds, bytes_per_s=8e6 / seconds
    )


def test_the_vector_rate_is_the_highest_that_a_chain_shows():
    """A chain too long for the registers is slower, and says nothing about the rate of those before it."""
    found = _doubling([chain(1, 1e-3), chain(8, 1e-3), chain(16, 1.6e-3), chain(32, 6e-3)], chip("cpu"))
    assert found["vector_flops_per_s"] == 2e6 * 16 / 1.6e-3
    assert found["predicted_at"] == pytest.approx(20)
    assert _doubling([chain(1, 1e-3), chain(8, 1e-3)], chip("cpu"))["predicted_at"] is None


def test_weights_are_read_as_fast_as_a_copy_of_their_size():
    timing = chain(1, 1.0).seconds
    part = CopyPart(
        copies=tuple(
            Copy(kind="copy", array_bytes=size, seconds=timing, bytes_per_s=1e9 / size) for size in (4, 16, 64)
        )
    )
    assert [part.of_size(size).array_bytes for size in (3, 5, 16, 100)] == [4, 16, 16, 64]
    assert CopyPart().of_size(3) is None


def test_whole_tiles():
    assert filled_share(256, 128) == 1
    assert filled_share(257, 128) == pytest.approx((257 / 384) ** 3)


@pytest.mark.parametrize("kind", workloads.COLLECTIVE_FUNCTIONS)
def test_collectives_are_over_arrays_of_the_size_they_are_priced_by(kind):
    bench = make_bench(jax.devices()[:4])
    group = Group(axis="group", size=2, mesh={"others": 2, "group": 2})
    workload = workloads.collective_workload(kind, group, 4096)
    once = replace(workload, body=lambda x: workloads.COLLECTIVE_FUNCTIONS[kind](x, "group"))
    (given,) = bench.data(workload, 0)
    out = bench.program(once)(given)
    whole = {"all_gather": out, "reduce_scatter": given, "all_reduce": out, "all_to_all": out, "permute": out}[kind]
    each = whole.nbytes / 4 * (2 if kind == "all_to_all" else 1)
    assert each == 4096
    assert bench.program(workload)(given).shape == given.shape
    assert workload.rounds == workloads.ROUNDS


def test_collectives_of_switched_chips_are_predicted_by_their_data_sheet():
    bench = make_bench(jax.devices()[:8], chip="h100")
    (group, *_) = workloads.groups_of(8, {})
    assert datasheet_seconds(bench, "all_gather", group, 8e9) == pytest.approx(
        7 / 8 * 8e9 / chip("h100").nvlink_bytes_per_s
    )
    assert datasheet_seconds(make_bench(jax.devices()[:8]), "all_gather", group, 8e9) is None


def test_groups_are_powers_of_two_or_the_axes_of_a_mesh():
    assert [group.size for group in workloads.groups_of(8, {})] == [8, 4, 2]
    assert [group.size for group in workloads.groups_of(6, {})] == [2]
    assert [(group.axis, group.size) for group in workloads.groups_of(8, {"fsdp": 4, "tensor": 2, "data": 1})] == [
        ("fsdp", 4),
        ("tensor", 2),
    ]


def test_the_rate_of_a_fitted_line():
    sizes = [1e3, 1e4, 1e5, 1e6, 1e7]
    rate = rate_of("all_gather", 4, fit_line(sizes, [3e-6 + size * 0.75 / 4e9 for size in sizes]))
    assert rate.latency_s == pytest.approx(3e-6)
    assert rate.bytes_per_s == pytest.approx(4e9)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("TPU v4", "v4p"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5e", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU v6e", "v6e"),
        ("TPU7x", "tpu7x"),
        ("cpu", "cpu"),
    ],
)
def test_devices_are_found_in_the_catalogue(kind, name):
    assert chip_of_kind(kind).name == name


@pytest.mark.parametrize("kind", ["NVIDIA GH200 480GB", "NVIDIA H100 NVL", "NVIDIA L4", "TPU v4 lite"])
def test_a_device_that_is_not_there_is_named(kind):
    with pytest.raises(InputError, match=rf"{kind}.*--chip h200"):
        chip_of_kind(kind)


def test_bad_choices_are_refused():
    with pytest.raises(InputError, match=r"'bf61' is no element type of products\. Did you mean 'bf16'"):
        make_bench(jax.devices()[:1], dtypes=["bf61"])
    with pytest.raises(CannotRunError, match="fsdp=4 has 4 devices and there are 2"):
        make_bench(jax.devices()[:2], axes={"fsdp": 4})
