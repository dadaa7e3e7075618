"""Seconds of single kernels, against times worked out by hand."""

import numpy as np
import pytest

from meshwright.core.errors import InputError
from meshwright.cost.work.kernel_times import (
    attention_s,
    collective_s,
    gated_s,
    grouped_s,
    kernel_rates,
    loss_s,
    padded,
    product_s,
)
from meshwright.spec.calibration import datasheet_calibration
from meshwright.spec.chip import chip

NUMBERS = {
    "compute": 0.5, "narrow": 0.8, "start_s": 1e-5, "call_s": 2e-5, "power": 1.0, "head_half": 32.0,
    "head_half_backward": 64.0, "block": 1024.0, "attention_bytes": 0.0, "link": 0.5, "collective_s": 4e-6,
    "member_s": 1e-6, "ramp_s": 0.0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _datasheet(monkeypatch):
    """Data-sheet memory bandwidth and no penalty for a short contraction, so that hand-worked times stay."""
    monkeypatch.setattr("meshwright.cost.work.kernel_times.fitted_calibration", datasheet_calibration)


def rates(name, *, cores=None, **numbers):
    return kernel_rates(chip(name), NUMBERS | numbers, cores=cores)


def test_a_large_product_takes_flops_over_half_the_peak():
    assert product_s({"M": 8192, "K": 8192, "N": 8192}, rates("h100")) == pytest.approx(
        2 * 8192**3 / (989.4e12 / 2) + 1e-5
    )


def test_a_thin_product_takes_its_bytes():
    moved = 2 * (128 * 8192 + 8192 * 8192 + 128 * 8192)
    assert product_s({"M": 128, "K": 8192, "N": 8192}, rates("h100")) == pytest.approx(moved / 3.35e12 + 1e-5)


def test_the_last_wave_of_an_fp8_product_takes_as_long_as_the_first():
    """16 x 9 tiles of 128 x 256 on 132 SMs are two waves, though 1.09 are filled."""
    shape = {"M": 2048, "K": 8192, "N": 2304}
    full = 2 * 2048 * 8192 * 2304 / (1979e12 * 0.5 * 0.8)
    assert product_s(shape, rates("h100"), narrow=True) == pytest.approx(full * 2 * 132 / 144 + 2e-5)


def test_heads_are_padded_to_the_matrix_unit_and_causal_blocks_rounded():
    """Heads of 128 on a unit of 256 take twice as long; a causal query sees (4096 + 1024) / 2 keys."""
    shape = {"B": 1, "T": 4096, "N": 8, "G": 8, "H": 128, "causal": 1}
    flops = 4 * 8 * 4096 * 2560 * 256
    assert attention_s(shape, rates("v6e")) == pytest.approx(flops / (918e12 / 2) + 1e-5)
    assert padded(128, 256) == 256
    assert padded(100, 0) == 100


def test_softmax_adds_to_the_width_of_heads_on_gpus_and_more_in_the_backward_pass():
    shape = {"B": 2, "T": 2048, "N": 16, "G": 16, "H": 64, "causal": 0}
    scores = 2 * 16 * 2048 * 2048
    forward, backward = attention_s(shape, rates("h100")), attention_s(shape, rates("h100"), phase="backward")
    assert forward == pytest.approx(4 * scores * 96 / (989.4e12 / 2) + 1e-5)
    assert backward == pytest.approx(4 * 2.5 * scores * 128 / (989.4e12 / 2) + 1e-5)


def test_groups_on_a_tpu_run_on_one_core_with_a_tile_more_each():
    """A v5p has two cores of half its peak: 8 groups add 128 rows each."""
    shape = {"M": 65536, "K": 4096, "N": 4096, "G": 8}
    expected = 2 * (65536 + 8 * 128) * 4096**2 / (459e12 / 2) * 2 + 1e-5
    assert grouped_s(shape, rates("v5p")) == pytest.approx(expected)


def test_an_unfused_gate_writes_and_reads_both_results():
    shape = {"M": 65536, "K": 1024, "N": 4096}
    more = gated_s(shape, rates("h100"), fused=False) - gated_s(shape, rates("h100"), fused=True)
    assert more == pytest.approx(16 * 65536 * 4096 / 3.35e12)


def test_a_loss_writes_and_reads_its_logits():
    shape = {"M": 8192, "K": 4096, "N": 128256}
    product, logits = 2 * 8192 * 4096 * 128256 / (989.4e12 / 2), 4 * 8192 * 128256 / 3.35e12
    assert loss_s(shape, rates("h100")) == pytest.approx(product + logits + 1e-5)
    assert loss_s(shape, rates("h100"), phase="backward") == pytest.approx(3 * product + logits + 1e-5)


def test_an_all_reduce_sends_twice_and_ramps_up():
    shape = {"op": np.array(["all_gather", "all_reduce"]), "n": np.array([8, 8]), "bytes": np.array([8e8, 8e8])}
    sent_s = 7e8 / (450e9 / 2)
    assert collective_s(shape, rates("h100")) == pytest.approx([sent_s + 11e-6, 2 * sent_s + 18e-6])
    ramped = collective_s(shape, rates("h100", ramp_s=1e-4)) - collective_s(shape, rates("h100"))
    assert ramped == pytest.approx([(1e-4 * sent_s) ** 0.5, (2e-4 * sent_s) ** 0.5])


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
    with pytest.raises(InputError, match=r"the kernel numbers lack 'start_s'. Fit them again"):
        product_s({"M": 1, "K": 1, "N": 1}, kernel_rates(chip("h100"), {"compute": 1.0}))
