"""Worked answers on hardware: peaks from anatomy, links, and the catalogue's "book" entries."""

import pytest

from meshwright.calculators.sharding.parsing import parse_einsum
from meshwright.cost.formulas.anatomy import mxu_flops_per_cycle, tpu_peak_from_anatomy
from meshwright.cost.formulas.roofline import Operand, channel_rate, einsum_work
from meshwright.spec.chip import chip, known, peak
from tests.oracles.worked import Answers, Inputs, row

COLUMNS = {
    "hbm_bw": "hbm_bytes_per_s",
    "hbm_cap": "hbm_bytes",
    "pod_chips": "max_chips",
    "chips_per_host": "chips_per_host",
}
"""Further columns of the book's table of chips: key of the row -> figure of a Chip."""


def bf16_peak(i: Inputs) -> float:
    """The catalogue's bf16 rate of the row's chip, in the book's variant."""
    return peak(chip(f"{i['chip']}-book"), "bf16")


def ici_both_ways(i: Inputs) -> float:
    """Both directions of one ICI link of the row's chip."""
    return known(chip(f"{i['chip']}-book"), "ici_axis_bytes_per_s")


def product_flops(rows: int, inner: int, columns: int) -> float:
    """FLOPs of the product that a systolic array works through."""
    lhs, rhs, out = (Operand(array.dims, "bf16") for array in parse_einsum("A[M,K] * B[K,N] -> C[M,N]"))
    return einsum_work((lhs, rhs), out, {"M": rows, "K": inner, "N": columns}).flops


ANSWERS: Answers = {
    "book-2.1-mxu-flops": lambda i: (
        product_flops(i["rows"], i["k"], i["n"]) / i["cycles"] * known(chip("v5e-book"), "clock_hz")
    ),
    "book-2.1-pcie-v4": lambda i: channel_rate(chip("v4p"), "hbm") / channel_rate(chip("v4p"), "pcie"),
    "book-2.1-v5e-4mxu": lambda i: tpu_peak_from_anatomy(chip("v5e-book")),
    "book-2.2-dcn-perchip": lambda i: channel_rate(chip("v5e-book"), "dcn"),
    "book-2.3-v3-ici": ici_both_ways,
    "book-2.3-v4p-ici": ici_both_ways,
    "book-2.3-v4p-spec": bf16_peak,
    "book-2.3-v5e-ici": ici_both_ways,
    "book-2.3-v5e-spec": bf16_peak,
    "book-2.3-v5p-ici": ici_both_ways,
    "book-2.3-v5p-spec": bf16_peak,
    "book-2.3-v6e-spec": bf16_peak,
    "book-2.4-pcie-v6e": lambda i: channel_rate(chip("v6e"), "pcie") / channel_rate(chip("v5e"), "pcie"),
    "book-2.5-v6e-mxu4x": lambda i: (
        mxu_flops_per_cycle(known(chip("v6e"), "mxu_dim")) / mxu_flops_per_cycle(known(chip("v5e"), "mxu_dim"))
    ),
    "book-2.5.2-alus": lambda i: known(chip("v5e"), "mxu_dim") ** 2,
    "s000-mxu": lambda i: product_flops(i["m"], i["k"], i["n"]) / i["cycles"],
    "s001-h100-peak": lambda i: peak(chip("h100"), "bf16"),
}


@pytest.mark.parametrize("identity", [identity for identity in ANSWERS if identity.endswith("-spec")])
def test_the_other_columns_of_the_row(identity):
    given = row(identity).inputs
    found = chip(f"{given['chip']}-book")
    assert peak(found, "int8") == given["int8"]
    assert {key: getattr(found, figure) for key, figure in COLUMNS.items()} == {key: given[key] for key in COLUMNS}
