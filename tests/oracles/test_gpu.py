"""Worked answers on GPUs: what a die and the boards cut from it hold, and the rates of their units."""

import pytest

from meshwright.cost.formulas import anatomy
from meshwright.cost.formulas.roofline import Operand, einsum_work
from meshwright.spec.chip import chip, peak
from tests.oracles.worked import Answers, Inputs, row


def sold(name: str = "h100") -> anatomy.GpuAnatomy:
    """What a GPU of the catalogue has switched on."""
    found = anatomy.gpu_anatomy(chip(name))
    assert found is not None
    return found


def whole() -> anatomy.GpuAnatomy:
    """The full GH100."""
    found = anatomy.full_die(chip("h100"))
    assert found is not None
    return found


def product_flops(i: Inputs) -> float:
    """FLOPs of the small product that one tensor core works through, its sum with C left out as the text does."""
    operands = (Operand(("M", "K"), "bf16"), Operand(("K", "N"), "bf16"))
    return einsum_work(operands, Operand(("M", "N"), "fp32"), {"M": i["m"], "K": i["k"], "N": i["n"]}).flops


ANSWERS: Answers = {
    "book-2.5.1-cores": lambda i: sold().fp32_lanes / sold().sms,
    "book-2.5.1-sms": lambda i: sold().sms,
    "s003-15x": lambda i: anatomy.ratio(peak(chip("h100"), "bf16"), peak(chip("h100"), "fp32")),
    "s003-full-gh100-cores": lambda i: whole().fp32_lanes,
    "s003-full-gh100-tc": lambda i: whole().tensor_cores,
    "s003-full-sms": lambda i: whole().sms,
    "s003-h100-pcie-tc": lambda i: sold("h100-pcie").tensor_cores,
    "s003-h100-sxm-cores": lambda i: sold().fp32_lanes,
    "s003-nonmatmul": lambda i: anatomy.share_after_speedup(i["non_matmul"], i["speedup"]),
    "s003-pcie-sms": lambda i: sold("h100-pcie").sms,
    "s003-sxm-sms": lambda i: sold().sms,
    "s004-1000x": lambda i: anatomy.ratio(i["new"], i["old"]),
    "s004-a100-h100": lambda i: anatomy.ratio(peak(chip("h100"), "bf16"), peak(chip("a100"), "bf16")),
    "s004-clock": lambda i: anatomy.gpu_peak_from_anatomy(chip("h100")),
    "s004-fp32-sm": lambda i: sold().fp32_flops_per_sm_cycle,
    "s004-ratio": lambda i: anatomy.ratio(sold().tensor_flops_per_sm_cycle, sold().fp32_flops_per_sm_cycle),
    "s004-tc": product_flops,
    "s004-tc-sm": lambda i: sold().tensor_flops_per_sm_cycle,
}


def test_the_catalogue_has_the_units_of_the_rows():
    """The answers above take their figures from the catalogue: here they are those that the rows name."""
    for identity, name in (("s003-sxm-sms", "h100"), ("s003-pcie-sms", "h100-pcie")):
        given, found = row(identity).inputs, chip(name)
        assert (found.num_tpcs, found.sms_per_tpc) == (given["tpcs"], given["sms_per_tpc"])
    die, found = row("s003-full-sms").inputs, chip("h100")
    assert (found.die_gpcs, found.die_tpcs_per_gpc, found.sms_per_tpc) == (die["gpcs"], die["tpcs"], die["sms"])
    assert found.tensor_core_flops_per_cycle == product_flops(row("s004-tc").inputs)
    clocked = row("s004-clock").inputs
    assert (found.num_sms, found.clock_hz) == (clocked["sms"], clocked["clock"])


def test_the_oldest_gpu_of_the_comparison():
    """The text rounds a K40 to 5 TFLOP/s; its 5,000 of a B200 is that chip's 8-bit rate."""
    given = row("s004-1000x").inputs
    assert peak(chip("k40"), "fp32") == pytest.approx(given["old"], rel=0.01)
    assert peak(chip("b200"), "fp8") == pytest.approx(given["new"], rel=0.11)
