"""A ring in one direction: rates, hops, and what crosses a link."""

import pytest

from meshwright.calculators.verbs.transfer import is_ring, link_bytes, one_way_rates
from meshwright.core.errors import InputError
from meshwright.cost.network.collectives import leg_rates
from tests.torus_legs import ring


def test_half_the_rate_and_all_the_hops():
    legs = (ring(16, 45e9),)
    one, both = one_way_rates(legs), leg_rates(legs)
    assert one["all_gather"].seconds_per_byte == pytest.approx(2 * both["all_gather"].seconds_per_byte)
    assert one["all_to_all"].seconds_per_byte == pytest.approx(4 * both["all_to_all"].seconds_per_byte)
    assert one["all_gather"].floor_s == pytest.approx(15e-6)
    assert both["all_gather"].floor_s == pytest.approx(8e-6)


def test_shares_of_the_array_over_a_link():
    legs = (ring(4, 1.0),)
    assert link_bytes("all_gather", 1.0, legs, two_way=False) == 3 / 4
    assert link_bytes("all_to_all", 1.0, legs, two_way=False) == 3 / 8
    assert link_bytes("all_to_all", 1.0, legs, two_way=True) == 1 / 8
    assert link_bytes("permute", 1.0, legs, two_way=True) == 1


def test_a_line_is_no_ring():
    line = (ring(4, 1.0, wraps=False),)
    assert not is_ring(line)
    assert not is_ring((*line, *line))
    assert link_bytes("all_gather", 1.0, line, two_way=True) is None
    with pytest.raises(InputError, match="needs a ring"):
        one_way_rates(line)
