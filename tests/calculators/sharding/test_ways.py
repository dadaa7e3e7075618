"""Every way of one product: which there are, by name. That each computes it: test_einsum_properties.py."""

import pytest

from meshwright.algebra.einsum import einsum_steps
from meshwright.calculators.sharding.einsum_cost import all_ways
from meshwright.calculators.sharding.parsing import parse_einsum


def names(text):
    return list(all_ways(*parse_einsum(text)))


def test_gather_or_slice_and_reduce():
    assert names("A[I,J_X] * B[J,K] -> C[I,K]") == ["gather J of A over X", "slice J of B over X; sum C over X"]


@pytest.mark.parametrize(
    ("out", "rules", "other_side"),
    [
        ("C[I,K_X]", "gather I of A over X", "gather K of B over X; move X of C from I to K"),
        ("C[I_X,K]", "gather K of B over X", "gather I of A over X; move X of C from K to I"),
    ],
)
def test_either_side_of_a_conflict(out, rules, other_side):
    ways = names(f"A[I_X,J] * B[J,K_X] -> {out}")
    assert ways[:2] == [rules, other_side]
    assert "gather I of A over X; gather K of B over X" in ways[2]


def test_a_sum_scattered_into_place_or_made_whole_and_sliced():
    ways = names("A[I,J_X] * B[J_X,K] -> C[I,K_X]")
    assert ways[:2] == ["sum C over X, scattered into K", "sum C over X; slice K of C over X"]
    assert "gather J of A over X; gather J of B over X; slice K of C over X" in ways
    assert "gather J of A over X; move X of B from J to K" in ways


def test_an_output_dim_gathered_before_or_after():
    assert names("A[I_X,J] * B[J,K] -> C[I,K]") == ["gather I of C over X", "gather I of A over X"]


def test_an_output_dim_sliced_before_or_after():
    assert set(names("A[I,J] * B[J,K] -> C[I_X,K]")) == {"slice I of C over X", "slice I of A over X"}


def test_nothing_to_move_is_one_way():
    assert names("A[I,J] * B[J,K] -> C[I,K]") == ["no communication"]


def test_the_way_of_the_rules_is_first_then_fewest_collectives():
    arrays = parse_einsum("In[B_X,D_Y] * Win[D_X,F_Y] -> Tmp[B_X,F_Y]")
    ways = all_ways(*arrays)
    first, *others = ways
    assert ways[first] == einsum_steps(*arrays)
    assert first == "gather D of In over Y; gather D of Win over X"
    counts = [sum(step.is_collective for step in ways[name]) for name in others]
    assert counts == sorted(counts)


def test_every_way_ends_in_the_wanted_sharding():
    for text in ("In[B,D_XYZ] * W[D_X,F_YZ] -> T[B,F_YZ]", "A[I,J_XY] * B[J_X,K_Y] -> C[I_Y,K]{U_X}"):
        *_, out = arrays = parse_einsum(text)
        assert {steps[-1].result for steps in all_ways(*arrays).values()} == {out}


def test_axes_with_long_names_are_named_in_full():
    assert names("x[B_{data,fsdp},D] * w[D,F] -> y[B,F]")[0] == "gather B of y over data,fsdp"
