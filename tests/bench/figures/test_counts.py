"""What the programs of a benchmark compute: FLOPs as counted, every round of it, and predictions worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.bench.chip import chip_of_kind
from meshwright.bench.devices import Bench, Block
from meshwright.bench.figures.attention import counted_flops
from meshwright.bench.figures.batch import ROUNDS, _layers, layer_flops, weight_blocks
from meshwright.bench.figures.collectives import (
    Group,
    datasheet_seconds,
    groups_of,
    local_elements,
    rate_of,
    repeated,
    run_collective,
)
from meshwright.bench.figures.distance import l1_distance, log_space, predicted_seconds
from meshwright.bench.figures.elementwise import doubling_repeats, multiply_adds, vector_peak
from meshwright.bench.figures.matmul import filled_share, product_flops, repeated_product
from meshwright.bench.fit import fit_line
from meshwright.bench.run import MEASURES, WEIGHTS, BenchReport, make_bench
from meshwright.core.dims import COLLECTIVES
from meshwright.core.errors import CannotRunError, InputError
from meshwright.spec.chip import chip


@pytest.fixture(scope="module")
def two():
    return make_bench(jax.devices()[:2])


def test_every_part_has_a_share_a_place_and_a_measure():
    assert set(WEIGHTS) == set(MEASURES)
    assert set(WEIGHTS) <= set(BenchReport.__struct_fields__)


def counted(body, *shapes):
    """FLOPs that XLA counts in a program."""
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(body).lower(*arrays).cost_analysis()["flops"]


def test_flops_of_a_product_are_those_that_xla_counts():
    assert counted(lambda a, b: a @ b, (64, 96), (96, 32)) == product_flops(64, 96, 32)


def test_flops_of_a_layer_are_those_of_its_products():
    sizes = {"D": 32, "F": 64, "N": 4, "K": 2, "H": 8}
    shapes = [block.shape for block in weight_blocks(sizes, "fp32")]
    products = [counted(lambda a, b: a @ b, (16, shape[0]), shape) for shape in shapes]
    assert layer_flops(sizes, 16) == sum(products)
    out = jax.eval_shape(_layers, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in [(16, 32), *shapes]))
    assert out.shape == (16, 32)
    assert ROUNDS > 1


def test_attention_counts_the_keys_that_are_seen():
    whole = 14 * 2 * 128 * 128 * 8 * 32
    assert counted_flops((2, 128, 8, 4, 32), causal=False) == whole
    assert counted_flops((2, 128, 8, 4, 32), causal=True) == whole / 2


def test_rounds_of_a_product_stay_in_the_loop(two):
    """A product that the compiler takes out of the loop is made once, whatever the number of rounds."""
    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    text = jax.jit(repeated_product("fp32", "cpu", 5)).lower(shape, shape).compile().as_text()
    inside = text[: text.index("ENTRY")]
    assert "while(" in text
    assert inside.count(" dot(") + inside.count("custom-call(") >= 1


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_the_product_is_the_product(two, dtype):
    call = two.call(repeated_product(dtype, "cpu", 1), [Block(shape=(32, 32), dtype=dtype)] * 2)
    a, b = call.arguments(0)
    out = np.asarray(call.run(a, b)).reshape(2, 32, 32)
    wide = np.int64 if dtype == "int8" else np.float64
    expected = np.asarray(a).reshape(2, 32, 32).astype(wide) @ np.asarray(b).reshape(2, 32, 32).astype(wide)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("emulated", [True, False])
def test_data_is_as_asked_and_new_for_every_number(two, emulated, monkeypatch):
    """Drawn by the host for emulated devices, on the devices for others."""
    monkeypatch.setattr(Bench, "emulated", emulated)
    blocks = [Block(shape=(256, 8), contents=what) for what in ("zeros", "ones", "uniform", "normal")]
    zeros, ones, uniform, normal = (np.asarray(x) for x in two.data(blocks)(1))
    assert zeros.shape == (512, 8)
    assert not zeros.any()
    assert (ones == 1).all()
    assert 0 <= uniform.min() < uniform.max() < 1
    assert abs(normal.std() - 1) < 0.1
    assert (np.asarray(two.data(blocks)(2)[3]) != normal).any()
    whole, narrow = (Block(shape=(64, 8), dtype=dtype) for dtype in ("int8", "fp8"))
    integers, eighths = (np.asarray(x) for x in two.data([whole, narrow])(0))
    assert integers.dtype == np.int8
    assert integers.min() < -100 < 100 < integers.max()
    assert 0.8 < eighths.astype(np.float32).std() < 1.2


def test_a_chain_is_that_many_multiply_adds():
    x, ab = jnp.arange(4.0), jnp.array([500.0, 3.0])
    expected = np.arange(4.0)
    for _ in range(3):
        expected = expected * 0.5 + 3
    np.testing.assert_allclose(multiply_adds(3)(x, ab), expected, rtol=1e-6)
    assert counted(multiply_adds(7), (1000,), (2,)) == pytest.approx(7 * 2 * 1000, rel=0.01)


def test_multiply_adds_that_double_the_time():
    # 10 TFLOP/s, 2 TB/s, 8 bytes moved: 4 us of memory for 1e6 elements, 8 us are 40 multiply-adds.
    assert doubling_repeats(10e12, 2e12) == pytest.approx(2 * 8 / 2e12 / (2 / 10e12))
    assert doubling_repeats(10e12, 2e12) == pytest.approx(40)


def test_vector_rates_of_data_sheets():
    assert vector_peak(chip("v5p-book")) == 7e12
    assert vector_peak(chip("h100")) == pytest.approx(132 * 128 * 2 * 1.83e9)
    assert vector_peak(chip("cpu")) is None


def test_distances_and_their_predictions():
    a, b = (np.random.default_rng(seed).standard_normal((8, 8)).astype(np.float32) for seed in (0, 1))
    np.testing.assert_allclose(log_space(a, b), np.log(np.exp(a) @ np.exp(b)), rtol=1e-5)
    np.testing.assert_allclose(l1_distance(a, b), np.abs(a[:, :, None] - b[None]).sum(1), rtol=1e-5)
    found = predicted_seconds(100, matmul=1e9, vector=1e8)
    assert found == {"matmul": 2e-3, "log-space": pytest.approx(0.12), "L1 distance": pytest.approx(0.06)}
    assert predicted_seconds(100, matmul=None, vector=None)["log-space"] is None


def test_whole_tiles():
    assert filled_share(256, 128) == 1
    assert filled_share(257, 128) == pytest.approx((257 / 384) ** 3)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_collectives_are_over_arrays_of_the_size_they_are_priced_by(kind):
    bench = make_bench(jax.devices()[:4])
    group = Group(axis="group", size=2, mesh={"others": 2, "group": 2})
    block = Block(shape=(local_elements(kind, 2, 4096),))
    (given,) = bench.data([block], group.mesh)(0)
    out = bench.program(lambda x: run_collective(kind, x, "group"), group.mesh)(given)
    whole = {"all_gather": out, "reduce_scatter": given, "all_reduce": out, "all_to_all": out, "permute": out}[kind]
    each = whole.nbytes / 4 * (2 if kind == "all_to_all" else 1)
    assert each == 4096
    assert bench.program(repeated(kind, group), group.mesh)(given).shape == given.shape


def test_collectives_of_switched_chips_are_predicted_by_their_data_sheet():
    bench = make_bench(jax.devices()[:8], chip="h100")
    (group, *_) = groups_of(8, {})
    seconds = datasheet_seconds(bench, "all_gather", group)
    assert seconds(8e9) == pytest.approx(7 / 8 * 8e9 / chip("h100").nvlink_bytes_per_s)
    assert datasheet_seconds(make_bench(jax.devices()[:8]), "all_gather", group)(8e9) is None


def test_groups_are_powers_of_two_or_the_axes_of_a_mesh():
    assert [group.size for group in groups_of(8, {})] == [8, 4, 2]
    assert [group.size for group in groups_of(6, {})] == [2]
    assert [(group.axis, group.size) for group in groups_of(8, {"fsdp": 4, "tensor": 2, "data": 1})] == [
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
    with pytest.raises(CannotRunError, match="mesh fsdp=4 has 4 devices and there are 2"):
        make_bench(jax.devices()[:2], axes={"fsdp": 4})
