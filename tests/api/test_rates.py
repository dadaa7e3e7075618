"""Rates of this machine: what was measured is kept when measuring is ended."""

import msgspec
import pytest

from meshwright.api.rates import rates_for
from meshwright.core.errors import InputError
from meshwright.spec.calibration import HostRates, Pace, load_calibration, matmul_rate
from meshwright.spec.chip import chip
from meshwright.spec.cluster import parse_cluster
from tests.cli.made_rates import write_rates


def test_what_was_measured_is_kept_when_measuring_is_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    made, calls = msgspec.structs.replace(load_calibration(write_rates(tmp_path)), devices=4), []

    def measured(num_devices, *, say):
        calls.append("rates")
        return made

    def ended(found, say):
        calls.append("step")
        raise KeyboardInterrupt

    def finished(found, say):
        calls.append("step")
        return msgspec.structs.replace(found, host=HostRates(product=Pace(), stream=Pace(), ops={}, loop_byte=0.0))

    monkeypatch.setattr("meshwright.bench.machine.measure_machine", measured)
    monkeypatch.setattr("meshwright.bench.machine.with_host_rates", ended)
    monkeypatch.setattr("meshwright.parallel.mesh.emulate_devices", lambda num: None)
    with pytest.raises(KeyboardInterrupt):
        rates_for(parse_cluster("cpu:4"), None)
    monkeypatch.setattr("meshwright.bench.machine.with_host_rates", finished)
    found = rates_for(parse_cluster("cpu:4"), None)
    assert calls == ["rates", "step", "step"]
    assert (found.collectives, found.host is None) == (made.collectives, False)
    assert rates_for(parse_cluster("cpu:4"), None) == found
    assert len(calls) == 3


def test_rates_of_one_device_are_kept_too(tmp_path, monkeypatch):
    """They have no collectives."""
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    made = msgspec.structs.replace(load_calibration(write_rates(tmp_path)), devices=1, collectives=())
    host, calls = HostRates(product=Pace(), stream=Pace(), ops={}, loop_byte=0.0), []
    monkeypatch.setattr("meshwright.bench.machine.measure_machine", lambda num, say: calls.append(num) or made)
    monkeypatch.setattr(
        "meshwright.bench.machine.with_host_rates", lambda found, say: msgspec.structs.replace(found, host=host)
    )
    monkeypatch.setattr("meshwright.parallel.mesh.emulate_devices", lambda num: None)
    assert rates_for(parse_cluster("cpu:1"), None) == rates_for(parse_cluster("cpu:1"), None)
    assert calls == [1]


def test_a_state_that_was_not_measured_names_the_measurement(tmp_path):
    rates = msgspec.structs.replace(load_calibration(write_rates(tmp_path)), devices=4)
    with pytest.raises(InputError, match="bench --on cpu:4 --dtypes bf16,fp32 -o FILE, then --calibration FILE"):
        matmul_rate(chip("cpu"), rates, "bf16")
