"""Rates of the machine at hand: all of them measured, plausible, and kept in a file that is read back."""

import os
import platform

import pytest
from msgspec.structs import replace

from meshwright.bench import machine
from meshwright.bench.machine import measure_machine
from meshwright.bench.workloads import COLLECTIVE_FUNCTIONS
from meshwright.spec.calibration import Calibration


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


def test_the_speed_of_the_machine_is_its_product_now_over_then(monkeypatch):
    """Twice the seconds of a calibrated product is half of its speed; rates of other machines say nothing."""
    work = machine.mlp_workload(machine.EMULATED.mlps[0], "fp32").work
    monkeypatch.setattr(machine, "sweep_medians", lambda calls, seconds_each: dict.fromkeys(calls, 0.5))
    here = f"{platform.machine()}, {os.cpu_count()} cores"
    rates = Calibration(name="n", chip="cpu", machine=here, devices=1, matmul_flops_per_s={"fp32": 4 * work})
    assert machine.machine_speed(rates) == pytest.approx(0.5)
    assert machine.machine_speed(replace(rates, machine="another, 4 cores")) is None
    assert machine.machine_speed(None) is None
