"""Rates of this machine that were kept: taken where they are whole, measured again where they are not."""

import msgspec
import pytest

from meshwright.api import rates as machine
from meshwright.core.errors import InputError
from meshwright.spec.calibration import load_calibration, save_calibration
from meshwright.spec.cluster import parse_cluster
from tests.cli.made_rates import write_rates


@pytest.mark.parametrize("kept", [None, "product_flops_per_s = 1.0\n", "not toml at all", 'name = "x"\nchip = "cpu"\n'])
def test_what_another_version_kept_is_measured_again(kept, tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    file = tmp_path / "calibration-cpu-2.toml"
    if kept is not None:
        file.write_text(kept, encoding="utf-8")
    monkeypatch.setattr(machine, "measure", lambda cluster, *, keep, begun: (cluster.num_chips, keep))
    assert machine.rates_for(parse_cluster("cpu:2"), None) == (2, file)


def test_rates_of_another_number_of_emulated_devices_are_refused(tmp_path):
    made = load_calibration(write_rates(tmp_path))
    file = tmp_path / "eight.toml"
    save_calibration(msgspec.structs.replace(made, devices=8), file)
    assert machine.rates_for(parse_cluster("cpu:8"), file).devices == 8
    with pytest.raises(InputError, match=r"rates of 8 emulated devices, but cpu:1 emulates 1.*bench --on cpu:1 -o"):
        machine.rates_for(parse_cluster("cpu:1"), file)
