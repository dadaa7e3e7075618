"""Rates of this machine that were kept: taken where they are whole, measured again where they are not."""

import pytest

from meshwright.api import rates as machine
from meshwright.spec.cluster import parse_cluster


@pytest.mark.parametrize("kept", [None, "product_flops_per_s = 1.0\n", "not toml at all", 'name = "x"\nchip = "cpu"\n'])
def test_what_another_version_kept_is_measured_again(kept, tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    file = tmp_path / "calibration-cpu-2.toml"
    if kept is not None:
        file.write_text(kept, encoding="utf-8")
    monkeypatch.setattr(machine, "measure", lambda cluster, *, keep: (cluster.num_chips, keep))
    assert machine.rates_for(parse_cluster("cpu:2"), None) == (2, file)
