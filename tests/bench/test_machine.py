"""Rates of the machine at hand: all of them measured, plausible, and kept in a file that is read back."""

import pytest

from meshwright.bench.machine import measure_machine
from meshwright.bench.workloads import COLLECTIVE_FUNCTIONS


@pytest.fixture(scope="module")
def measured():
    return measure_machine(4, matmul_shape=(64, 64, 64), seconds_per_figure=0.02)


def test_every_figure_is_there_with_its_source(measured):
    assert {(r.kind, r.group_size) for r in measured.collectives} == {
        (k, n) for k in COLLECTIVE_FUNCTIONS for n in (2, 4)
    }
    assert measured.machine
    assert measured.date
    assert set(measured.sources) >= {"matmul_flops_per_s", "memory_bytes_per_s", "collectives"}


def test_rates_are_those_of_a_real_machine(measured):
    assert 1e7 < measured.matmul_flops_per_s["fp32"] < 1e15
    assert 1e7 < measured.memory_bytes_per_s < 1e13
    for rate in measured.collectives:
        assert 1e-7 <= rate.latency_s < 1
        assert rate.bytes_per_s > 1e5
