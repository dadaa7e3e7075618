"""Collectives over growing clusters."""

import itertools

import pytest

from meshwright.cli.verbs.sweep_bandwidth import SWEPT, bandwidth_sweep
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.efficiency import fitted_calibration

LARGE = 1e12
"""Bytes beside which no latency counts."""


def rates(text, num_bytes=LARGE, calibration=None):
    found = bandwidth_sweep([parse_cluster(text)], num_bytes, calibration=calibration)
    return {point["collective"]: point["bytes_per_s"] for point in found}


def test_inside_a_domain_every_chip_has_its_port():
    assert rates("h100:8x1") == pytest.approx(dict.fromkeys(SWEPT, 450e9), rel=1e-3)


def test_across_nodes_gathers_use_all_nics_and_an_all_to_all_only_its_own():
    """Eight NICs of 50e9 feed a node; a chip's own exchange has one."""
    found = rates("h100:8x64")
    assert found["all_gather"] == pytest.approx(8 * 50e9, rel=0.03)
    assert found["all_to_all"] == pytest.approx(50e9, rel=0.03)


def test_a_torus_gathers_over_all_axes():
    """Three rings of 1.8e11 both ways; an all-to-all has a quarter of the time of one axis's gather.

    A reduce-scatter crosses two rings, then the third with a 64th of the array.
    """
    found = rates("v5p:8x8x8")
    assert found["all_gather"] == pytest.approx(3 * 1.8e11, rel=5e-3)
    assert found["reduce_scatter"] == pytest.approx(1.8e11 / (1 / 2 + 1 / 64), rel=5e-3)
    assert found["all_reduce"] == pytest.approx(found["all_gather"])
    assert found["all_to_all"] == pytest.approx(4 * 1.8e11 / 8, rel=5e-3)


def test_no_sum_is_faster_than_the_port_and_it_slows_with_nodes():
    """450 GB/s through NVLink where 8 cards of 50 GB/s bring less than half of the array, then the cards bind."""
    for calibration in (None, fitted_calibration(parse_cluster("h100:8x1").chip)):
        found = [rates(f"h100:8x{nodes}", calibration=calibration)["all_reduce"] for nodes in (1, 2, 4, 8, 16, 32, 64)]
        port = 450e9 * (calibration.efficiency.nvlink if calibration else 1)
        assert found[0] == pytest.approx(port, rel=1e-3)
        assert all(more <= less * (1 + 1e-3) for less, more in itertools.pairwise(found))
        assert found[-1] < 0.92 * found[0]


def test_small_collectives_are_bound_by_latency():
    points = bandwidth_sweep([parse_cluster("h100:8x64")], 1e3)
    assert {point["bound_by"] for point in points if point["collective"] != "all_to_all"} == {"latency"}
    assert rates("h100:8x64", 1e3)["all_gather"] < 0.01 * rates("h100:8x64")["all_gather"]


def test_a_calibration_takes_its_share():
    fitted = fitted_calibration(parse_cluster("h100:8x1").chip)
    ratio = rates("h100:8x1", calibration=fitted)["all_gather"] / rates("h100:8x1")["all_gather"]
    assert ratio == pytest.approx(fitted.efficiency.nvlink, rel=1e-3)


def test_one_chip_sends_nothing():
    assert bandwidth_sweep([parse_cluster("h100:1x1")], 1e9) == []
