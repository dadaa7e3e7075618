"""What a chain of products is, and which shardings its arrays may have."""

import pytest

from meshwright.algebra.notation import parse_array
from meshwright.calculators.sharding.chain import parse_chain, shardings
from meshwright.core.errors import InputError

TWO = ("A[I,J] * B[J,K] -> C[I,K]", "C[I,K] * D[K,L] -> E[I,L]")
DIMS = {"I": 8, "J": 8, "K": 8, "L": 8}
MESH = {"X": 2, "Y": 2}


def texts(found):
    return [str(array) for array in found]


def test_every_sharding_of_an_array():
    found = texts(shardings(parse_array("A[I,J]"), {"I": 8, "J": 8}, MESH))
    assert found == [
        "A[I, J]",
        "A[I_Y, J]", "A[I, J_Y]",
        "A[I_X, J]", "A[I_XY, J]", "A[I_YX, J]", "A[I_X, J_Y]",
        "A[I, J_X]", "A[I_Y, J_X]", "A[I, J_XY]", "A[I, J_YX]",
    ]  # fmt: skip


def test_splits_are_even_and_axes_of_one_device_split_nothing():
    found = texts(shardings(parse_array("A[I,J]"), {"I": 6, "J": 9}, {"X": 2, "Y": 3, "Z": 1}))
    assert set(found) == {
        "A[I, J]", "A[I_X, J]", "A[I_Y, J]", "A[I_XY, J]", "A[I_YX, J]", "A[I_X, J_Y]", "A[I, J_Y]",
    }  # fmt: skip


def test_a_chain():
    chain = parse_chain(TWO, dims=DIMS, mesh=MESH, fixed=["D[K_Y,L]"])
    assert chain.inputs == ("A", "B", "D")
    assert tuple(chain.choices) == ("A", "B", "C", "D", "E")
    assert texts(chain.choices["D"]) == ["D[K_Y, L]"]
    assert len(chain.choices["C"]) == 11
    assert all(a.dtype == "bf16" for found in chain.choices.values() for a in found)


def test_an_array_written_with_an_axis_is_fixed_and_the_carried_one_may_stand_right():
    chain = parse_chain(("W[J,K] * x[I_X,J] -> C[I,K]", "D[K,L] * C[I,K] -> E[I,L]"), dims=DIMS, mesh=MESH)
    assert chain.fixed == {"x"}
    assert texts(chain.choices["x"]) == ["x[I_X, J]"]
    assert [p.swapped for p in chain.products] == [False, True]
    assert chain.products[1].carried.name == "C"


@pytest.mark.parametrize(
    ("products", "fixed", "message"),
    [
        ((TWO[0], "A[I,J] * D[J,L] -> E[I,L]"), (), "does not take C, the result of the product before"),
        ((TWO[0], "C[K,I] * D[K,L] -> E[I,L]"), (), "Write the same dims in one order"),
        ((TWO[0], "C[I,K] * B[K,L] -> E[I,L]"), (), "array B is used in more than one place"),
        (TWO, ("Z[I,J]",), "is no array of the chain"),
        (TWO, ("D[K_Q,L]",), "uses mesh axis Q, which the mesh lacks"),
        (TWO, ("D[L,K]",), "Write the same dims"),
        ((TWO[0], "C[I_X,K] * D[K,L] -> E[I,L]"), ("C[I,K]",), ""),
        (("bf16[I,J] * bf16[J,K] -> C[I,K]",), (), "a name of its own"),
        (("A[I,J_X] * B[J_X,K] -> C[I,K]{U_X}",), (), "nothing unreduced"),
    ],
)
def test_what_is_no_chain(products, fixed, message):
    if not message:
        # what is said by --fixed goes before what the text says
        assert texts(parse_chain(products, dims=DIMS, mesh=MESH, fixed=fixed).choices["C"]) == ["C[I, K]"]
        return
    with pytest.raises(InputError, match=message):
        parse_chain(products, dims=DIMS, mesh=MESH, fixed=fixed)


def test_two_shardings_of_one_array_and_too_many_axes():
    with pytest.raises(InputError, match="Give it one sharding"):
        parse_chain(("A[I,J] * B[J,K] -> C[I_X,K]", "C[I,K_X] * D[K,L] -> E[I,L]"), dims=DIMS, mesh=MESH)
    with pytest.raises(InputError, match="on at most 3"):
        parse_chain(TWO, dims=DIMS, mesh={"X": 2, "Y": 2, "Z": 2, "Q": 2})
    with pytest.raises(InputError, match="dim L of D"):
        parse_chain(TWO, dims={"I": 8, "J": 8, "K": 8}, mesh=MESH)
