"""The page on fleets: its tables are what the benchmark prints, its listing what it says; inputs have sources."""

from pathlib import Path

import pytest
from benchmarks.fleets import MOST_POINTS, published_fleets, written

from tests.blocks import run_listings

PAGE = (Path(__file__).parents[3] / "docs" / "fleets.md").read_text(encoding="utf-8")
FLEETS = {fleet.name: fleet for fleet in published_fleets()}
NOT_REPRODUCIBLE = {"OPT-175B", "HLAT, by hand"}


def test_the_tables_of_the_page():
    assert written(PAGE) == PAGE


def test_the_listing_of_the_page():
    [(match, output)] = run_listings(PAGE)
    assert output == match.group("said")


@pytest.mark.parametrize("name", FLEETS)
def test_every_input_has_a_source_and_every_other_fleet_a_reason(name):
    fleet = FLEETS[name]
    assert fleet.source
    assert all(one.source for one in fleet.inputs)
    assert bool(fleet.reason) == (name in NOT_REPRODUCIBLE)
    assert all(len(set(one.ends)) == len(one.ends) for one in fleet.inputs)


@pytest.mark.parametrize("name", FLEETS)
def test_published_figures_lie_in_narrow_intervals(name):
    low, high = FLEETS[name].simulated(20)
    assert FLEETS[name].is_met(low, high) == (name not in NOT_REPRODUCIBLE)
    assert low < high


def test_an_interval_that_says_nothing_is_not_met():
    llama = FLEETS["Llama 3 405B"]
    assert llama.is_met(0.86, 0.95)
    assert not llama.is_met(0.85, 0.85 + (MOST_POINTS + 0.1) / 100)
    assert not llama.is_met(0.80, 0.89)


def test_llama_3_has_as_many_interruptions():
    """466 in 54 days lie in the middle of what is drawn."""
    from meshwright.simulate.fleet.fleet import drawn_faults

    counts = [len(drawn_faults(FLEETS["Llama 3 405B"].fleet(0), 54 * 86400.0, seed)) for seed in range(20)]
    assert min(counts) < 466 < max(counts)
    assert sum(counts) / 20 == pytest.approx(466, rel=0.03)
