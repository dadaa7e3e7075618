"""Rooflines of local operations, and anatomy and budget figures that no worked answer covers."""

import numpy as np
import pytest

from meshwright.calculators.chips import anatomy
from meshwright.core.errors import InputError
from meshwright.cost.formulas import training_budget
from meshwright.cost.formulas.roofline import (
    Operand,
    chip_roofline,
    compute_time,
    critical_batch,
    critical_repeats,
    critical_size,
    einsum_roofline,
    einsum_work,
    elementwise_work,
    transfer_time,
)
from meshwright.spec.chip import chip
from meshwright.spec.cluster import parse_cluster


def matmul(act="bf16", weight="bf16", out="bf16"):
    return [Operand(("B", "D"), act), Operand(("D", "F"), weight)], Operand(("B", "F"), out)


def test_critical_batches_of_experts_and_repeats():
    """How to Scale Your Model, exercise 4.8."""
    assert critical_batch(240, 1, weight_bytes=1, num_experts=256, active_experts=8) == 3840
    assert critical_repeats(10e12, 2e12, bytes_per_element=8) == 40


def test_critical_size_counts_every_byte():
    operands, out = matmul("int8", "int8", "int8")
    sizes = {"D": 4096, "F": 16384}
    found = critical_size(operands, out, sizes, dim="B", peak_flops=3.94e14, bytes_per_s=8.1e11)
    assert found == pytest.approx(262.7, abs=0.05)
    exact = chip_roofline(einsum_work(operands, out, {**sizes, "B": found}), chip("v5e-book"), dtype="int8")
    assert exact.math_s == pytest.approx(exact.transfer_s)
    never = critical_size(operands, out, {"D": 64, "F": 64}, dim="B", peak_flops=3.94e14, bytes_per_s=8.1e11)
    assert never == float("inf")


def test_bounds_and_what_binds():
    small = einsum_roofline(*matmul(weight="int8"), {"B": 16, "D": 8192, "F": 32768}, chip=chip("v5e"))
    assert small.peak_flops == 197e12
    assert small.bound_by == "hbm"
    assert small.lower_s == small.transfer_s < small.upper_s <= 2 * small.lower_s
    assert small.reached_flops_per_s == pytest.approx(small.work.intensity * 819e9)
    large = einsum_roofline(*matmul(), {"B": 4096, "D": 8192, "F": 32768}, chip=chip("v5e"))
    assert (large.bound_by, large.reached_flops_per_s) == ("compute", pytest.approx(197e12))
    through = einsum_roofline(*matmul(), {"B": 4096, "D": 8192, "F": 32768}, chip=chip("v5e"), channel="pcie")
    assert through.bound_by == "pcie"
    assert chip_roofline(small.work, chip("v5e"), dtype="bf16", channel="vmem").lower_s < small.lower_s


def test_scalar_equals_array():
    batches = np.array([1.0, 64.0, 240.0, 4096.0])
    sizes = {"B": batches, "D": 4096, "F": 16384}
    many = einsum_roofline(*matmul(), sizes, chip=chip("v5e"))
    for i, batch in enumerate(batches):
        one = einsum_roofline(*matmul(), {**sizes, "B": float(batch)}, chip=chip("v5e"))
        assert (many.lower_s[i], many.upper_s[i]) == (one.lower_s, one.upper_s)
        assert many.bound_by[i] == one.bound_by
    widths = {"D": np.array([64.0, 4096.0]), "F": np.array([64.0, 16384.0])}
    found = critical_size(*matmul(), widths, dim="B", peak_flops=1.97e14, bytes_per_s=8.1e11)
    one = critical_size(*matmul(), {"D": 4096, "F": 16384}, dim="B", peak_flops=1.97e14, bytes_per_s=8.1e11)
    assert found.tolist() == [np.inf, one]


def test_refusals():
    with pytest.raises(InputError, match=r"no size for F. Give every dim: --dims F="):
        einsum_work(*matmul(), {"B": 1, "D": 2})
    with pytest.raises(InputError, match=r"unknown dtype 'bf61'. Did you mean 'bf16'"):
        einsum_work(*matmul(act="bf61"), {"B": 1, "D": 2, "F": 3})
    with pytest.raises(InputError, match=r"unknown channel 'hmb'. Did you mean 'hbm'"):
        einsum_roofline(*matmul(), {"B": 1, "D": 2, "F": 3}, chip=chip("v5e"), channel="hmb")
    with pytest.raises(InputError, match="dim 'Q' is in none"):
        critical_size(*matmul(), {"D": 1, "F": 1}, dim="Q", peak_flops=1, bytes_per_s=1)


def test_elementwise_and_transfers():
    add = elementwise_work(1e6, flops_per_element=1, bytes_per_element=12)
    assert add.intensity == pytest.approx(1 / 12)
    assert transfer_time(15e9, 4.5e10, num_links=2) == pytest.approx(1 / 6)
    assert compute_time(6.3e24, 4.59e14, num_chips=8960, utilization=0.4) / 86400 == pytest.approx(44.3, rel=1e-2)


def test_cycles_and_gigabits():
    assert anatomy.product_flops_per_cycle(8, 128, 128, cycles=8) == anatomy.mxu_flops_per_cycle(128) == 32768
    assert anatomy.bytes_per_s(3200) == 4e11


def test_tiles():
    assert anatomy.padded_shape((3, 5), (2, 2)) == (4, 6)
    assert anatomy.tile_expansion((3, 5), (2, 2)) == 1.6
    assert anatomy.padded_shape((7, 3, 5), (8, 128)) == (7, 8, 128)
    with pytest.raises(InputError, match="does not fit"):
        anatomy.padded_shape((3,), (2, 2))


def test_gpus_have_no_cores_to_count():
    assert anatomy.pod_totals(parse_cluster("h100:8x2")).num_cores is None


def test_training_budget():
    assert training_budget.mfu_from_step(1e15, 1.0, num_chips=2, peak_flops=1e15) == 0.5
    assert training_budget.cost_usd(3600, num_chips=10, price_usd_per_hour=4.2) == 42
    assert training_budget.power_w(16000, 700) == 11.2e6
    assert training_budget.energy_kwh(3600, num_chips=1, watts_per_chip=700) == pytest.approx(0.7)
    assert training_budget.num_devices(tensor=8, context=16, pipeline=16, data=8) == 16384
