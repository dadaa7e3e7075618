"""Inside a GPU: what floor sweeping leaves of a die, and the peaks that follow, against the data sheets."""

import pytest

from meshwright.cost.formulas import anatomy
from meshwright.cost.formulas.roofline import vector_peak
from meshwright.spec.chip import chip, chips, peak
from meshwright.spec.cluster import parse_cluster

GPUS = [name for name, found in chips().items() if anatomy.gpu_anatomy(found)]
CUT = [name for name in GPUS if anatomy.full_die(chip(name))]


@pytest.mark.parametrize("name", CUT)
def test_what_is_sold_is_cut_from_a_die(name):
    sold, die = anatomy.gpu_anatomy(chip(name)), anatomy.full_die(chip(name))
    assert sold.sms == sold.tpcs * chip(name).sms_per_tpc
    assert 0.75 * die.sms < sold.sms < die.sms
    assert die.tpcs == die.sms // 2


def test_the_gh100():
    """Full die, SXM and PCIe boards. Source: NVIDIA H100 Tensor Core GPU Architecture."""
    die, sxm, pcie = (anatomy.full_die(chip("h100")), *map(anatomy.gpu_anatomy, (chip("h100"), chip("h100-pcie"))))
    assert [one.sms for one in (die, sxm, pcie)] == [144, 132, 114]
    assert [one.fp32_lanes for one in (die, sxm, pcie)] == [18432, 16896, 14592]
    assert [one.tensor_cores for one in (die, sxm, pcie)] == [576, 528, 456]
    assert (die.l2_bytes, sxm.l2_bytes) == (60e6, 50e6)
    assert (sxm.tensor_flops_per_sm_cycle, sxm.fp32_flops_per_sm_cycle) == (4096, 256)


@pytest.mark.parametrize("name", [name for name in GPUS if chip(name).tensor_core_flops_per_cycle])
def test_tensor_peaks_follow_from_the_anatomy(name):
    dtype = "bf16" if "bf16" in chip(name).peak_flops else "fp16"
    assert anatomy.gpu_peak_from_anatomy(chip(name)) == pytest.approx(peak(chip(name), dtype), rel=3e-3)


@pytest.mark.parametrize("name", ["k40", "p100", "v100", "a100"])
def test_fp32_peaks_follow_from_the_anatomy(name):
    assert vector_peak(chip(name)) == pytest.approx(peak(chip(name), "fp32"), rel=3e-3)


def test_amdahl():
    assert anatomy.share_after_speedup(0.15, 10) == pytest.approx(0.638, rel=1e-3)
    assert anatomy.share_after_speedup(0.15, 1) == pytest.approx(0.15)


def test_totals_of_a_gpu_cluster():
    totals = anatomy.pod_totals(parse_cluster("h100:8x2x192x8"))
    assert (totals["num_chips"], totals["num_hosts"], totals["num_sms"]) == (24576, 3072, 24576 * 132)
    assert totals["num_fp32_lanes"] == pytest.approx(415e6, rel=1e-3)
    assert totals["num_tensor_cores"] == pytest.approx(13e6, rel=5e-3)
    assert anatomy.pod_totals(parse_cluster("v5e:4x4"))["num_sms"] is None
    assert anatomy.pod_totals(parse_cluster("b200:8x2"))["num_tensor_cores"] is None
