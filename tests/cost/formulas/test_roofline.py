"""Rooflines of local operations, and anatomy and budget figures that no worked answer covers."""

import numpy as np
import pytest

from meshwright.core.errors import InputError
from meshwright.cost.formulas import anatomy, roofline, training_budget
from meshwright.spec.chip import chip
from meshwright.spec.cluster import parse_cluster


def matmul(act="bf16", weight="bf16", out="bf16"):
    return [roofline.Operand(("B", "D"), act), roofline.Operand(("D", "F"), weight)], roofline.Operand(("B", "F"), out)


def test_critical_batches_of_experts_and_repeats():
    """How to Scale Your Model, exercise 4.8."""
    assert roofline.critical_batch(240, 1, weight_bytes=1, num_experts=256, active_experts=8) == 3840
    assert roofline.critical_repeats(10e12, 2e12, bytes_per_element=8) == 40


def test_critical_size_counts_every_byte():
    operands, out = matmul("int8", "int8", "int8")
    sizes = {"D": 4096, "F": 16384}
    found = roofline.critical_size(operands, out, sizes, dim="B", peak_flops=3.94e14, bytes_per_s=8.1e11)
    assert found == pytest.approx(262.7, abs=0.05)
    exact = roofline.chip_roofline(
        roofline.einsum_work(operands, out, {**sizes, "B": found}), chip("v5e-book"), dtype="int8"
    )
    assert exact.math_s == pytest.approx(exact.transfer_s)
    never = roofline.critical_size(operands, out, {"D": 64, "F": 64}, dim="B", peak_flops=3.94e14, bytes_per_s=8.1e11)
    assert never == float("inf")


def test_bounds_and_what_binds():
    small = roofline.chip_roofline(
        roofline.einsum_work(*matmul(weight="int8"), {"B": 16, "D": 8192, "F": 32768}), chip("v5e"), dtype="bf16"
    )
    assert small.peak_flops == 197e12
    assert small.bound_by == "hbm"
    assert small.lower_s == small.transfer_s < small.upper_s <= 2 * small.lower_s
    assert small.reached_flops_per_s == pytest.approx(small.work.intensity * 819e9)
    work = roofline.einsum_work(*matmul(), {"B": 4096, "D": 8192, "F": 32768})
    large = roofline.chip_roofline(work, chip("v5e"), dtype="bf16")
    assert (large.bound_by, large.reached_flops_per_s) == ("compute", pytest.approx(197e12))
    through = roofline.chip_roofline(work, chip("v5e"), dtype="bf16", channel="pcie")
    assert through.bound_by == "pcie"
    assert roofline.chip_roofline(small.work, chip("v5e"), dtype="bf16", channel="vmem").lower_s < small.lower_s


def test_scalar_equals_array():
    batches = np.array([1.0, 64.0, 240.0, 4096.0])
    sizes = {"B": batches, "D": 4096, "F": 16384}
    many = roofline.chip_roofline(roofline.einsum_work(*matmul(), sizes), chip("v5e"), dtype="bf16")
    for i, batch in enumerate(batches):
        one = roofline.chip_roofline(
            roofline.einsum_work(*matmul(), {**sizes, "B": float(batch)}), chip("v5e"), dtype="bf16"
        )
        assert (many.lower_s[i], many.upper_s[i]) == (one.lower_s, one.upper_s)
        assert many.bound_by[i] == one.bound_by


def test_refusals():
    with pytest.raises(InputError, match=r"no size for F. Give every dim: --dims F="):
        roofline.einsum_work(*matmul(), {"B": 1, "D": 2})
    with pytest.raises(InputError, match=r"unknown dtype 'bf61'. Did you mean 'bf16'"):
        roofline.einsum_work(*matmul(act="bf61"), {"B": 1, "D": 2, "F": 3})
    work = roofline.einsum_work(*matmul(), {"B": 1, "D": 2, "F": 3})
    with pytest.raises(InputError, match=r"unknown channel 'hmb'. Did you mean 'hbm'"):
        roofline.chip_roofline(work, chip("v5e"), dtype="bf16", channel="hmb")
    with pytest.raises(InputError, match="no array has the dim 'Q'"):
        roofline.critical_size(*matmul(), {"D": 1, "F": 1}, dim="Q", peak_flops=1, bytes_per_s=1)


def test_anatomy_reproduces_peaks():
    assert anatomy.mxu_flops_per_cycle(128) == 2 * 8 * 128 * 128 / 8
    assert anatomy.tpu_peak_from_anatomy(chip("v5e")) == pytest.approx(197e12, rel=3e-3)
    assert anatomy.gpu_peak_from_anatomy(chip("h100")) == pytest.approx(989.4e12, rel=1e-3)
    assert anatomy.mxu_flops_per_cycle(256) / anatomy.mxu_flops_per_cycle(128) == 4


def test_tiles():
    assert anatomy.padded_shape((3, 5), (2, 2)) == (4, 6)
    assert anatomy.tile_expansion((3, 5), (2, 2)) == 1.6
    assert anatomy.padded_shape((7, 3, 5), (8, 128)) == (7, 8, 128)
    with pytest.raises(InputError, match="needs sizes of 1 or more"):
        anatomy.padded_shape((3,), (2, 2))


def test_gpus_have_no_cores_to_count():
    assert anatomy.pod_totals(parse_cluster("h100:8x2"))["num_cores"] is None


def test_training_budget():
    assert training_budget.cost_usd(3600, num_chips=10, price_usd_per_hour=4.2) == 42
    assert training_budget.power_w(16000, 700) == 11.2e6
    assert training_budget.energy_kwh(3600, num_chips=1, watts_per_chip=700) == pytest.approx(0.7)
