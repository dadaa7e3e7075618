"""Rates of published fleets against what their sources print, and files that are refused by line."""

import pytest

from meshwright.core.errors import InputError
from meshwright.spec.faults.rates import NEVER_S, FaultTimes, load_rates, published_rates, rates_for_chip


def test_llama3_table_5():
    rates = load_rates("llama3")
    counts = {component.name: component.count for component in rates.components}
    assert sum(counts.values()) == 466
    assert sum(counts.values()) - counts["planned"] == 419
    assert rates.mtbf_s(16384, 2048) / 3600 == pytest.approx(54 * 24 / 466)
    assert sum(rates.per_hour(16384, 2048)) * 54 * 24 == pytest.approx(466)
    assert sum(rates.per_hour(8192, 1024)) * 54 * 24 == pytest.approx(233)


def test_rsc_rates_are_per_node():
    assert load_rates("rsc1").mtbf_s(16384, 2048) / 3600 == pytest.approx(1.8, abs=0.01)
    assert load_rates("rsc1").mtbf_s(131072, 16384) / 3600 == pytest.approx(0.23, abs=0.01)
    assert load_rates("rsc2").mtbf_s(8, 1) / 86400 == pytest.approx(1000 / 2.34, rel=1e-3)


@pytest.mark.parametrize("name", published_rates())
def test_ranges_have_two_ends(name):
    rates = load_rates(name)
    assert "restart_s" in rates.ranges
    assert all(low < high for low, high in rates.ranges.values())
    low, middle, high = (rates.times_at(share) for share in (0.0, 0.5, 1.0))
    assert low.restart_s < middle.restart_s < high.restart_s
    assert rates.times_at(0.5, {"restart_s": 7.0}).restart_s == 7


def test_rates_of_a_chip_or_the_default():
    assert rates_for_chip("h100") == ("llama3", True)
    assert rates_for_chip("a100") == ("rsc1", True)
    assert rates_for_chip("v5p") == ("llama3", False)


def test_nothing_fails():
    assert load_rates("llama3").mtbf_s(0, 0) == NEVER_S


COMPONENT = '[[components]]\nname = "x"\nkind = "host"\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (COMPONENT + "per_chip_hour = 1e-5", "needs the field 'source'"),
        ('source = "x"\n' + COMPONENT + "per_chip_hours = 1e-5", "did you mean 'per_chip_hour'"),
        ('source = "x"\ncomponents = []', "have no components"),
        ('source = "x"\n' + COMPONENT, "needs one of count, per_chip_hour, per_node_hour"),
        ('source = "x"\n' + COMPONENT + "per_chip_hour = 1\nper_node_hour = 1", "needs one of count"),
        ('source = "x"\n' + COMPONENT + "count = 3", "a component with a count needs num_chips and days"),
        ('source = "x"\n' + COMPONENT + "per_chip_hour = -1", "give a number of at least 0"),
        (
            'source = "x"\n' + COMPONENT.replace("host", "fire") + "per_chip_hour = 1",
            "process, link, host, reboot, hang",
        ),
        ('source = "x"\n' + COMPONENT + "per_chip_hour = 1\n[times]\nsafe_s = 1", "did you mean 'save_s'"),
        ('source = "x"\n' + COMPONENT + "per_chip_hour = 1\n[times]\nsave_s = [-3, 9]", "at least 0"),
        ('source = "x"\n' + COMPONENT + "per_chip_hour = 1\n[times]\nsave_s = [9, 3]", "give the lower bound first"),
        ('source = "x"\n' + COMPONENT + "per_chip_hour = 1\n[times]\nsave_s = -1", "at least 0"),
        ('source = "x"\n' + COMPONENT + "per_chip_hour = 1\n[times]\nslowdown = 0.5", "at least 1"),
        ("source", "not valid TOML"),
    ],
)
def test_files_that_are_refused(tmp_path, text, said):
    path = tmp_path / "rates.toml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load_rates(str(path))
    assert said.lower() in str(caught.value).lower()
    assert str(caught.value).startswith(str(path))


def test_a_users_file(tmp_path):
    path = tmp_path / "rates.toml"
    path.write_text('source = "ours"\n' + COMPONENT + "per_node_hour = 1e-3\n[times]\nsave_s = 3")
    rates = load_rates(str(path))
    assert rates.mtbf_s(800, 100) == 36000
    assert rates.times_at() == FaultTimes(save_s=3)


def test_names_that_are_not_known():
    with pytest.raises(InputError, match=r"rates 'lama3' are not known\. Did you mean 'llama3'"):
        load_rates("lama3")
    with pytest.raises(InputError, match=r"nowhere\.toml"):
        load_rates("nowhere.toml")
