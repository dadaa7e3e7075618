"""The rules of one sharded einsum, one by one (How to Scale Your Model, section 3)."""

import pytest

from meshwright.algebra.einsum import align, einsum_steps, product_steps, reshard
from meshwright.algebra.notation import parse_array
from meshwright.calculators.sharding.parsing import parse_einsum
from meshwright.core.errors import InputError


def lines(steps):
    return [str(step) for step in steps]


def product(text, **options):
    return lines(einsum_steps(*parse_einsum(text), **options))


def moved(text):
    source, target = map(parse_array, text.split(" -> "))
    return lines(reshard(source, target))


@pytest.mark.parametrize("keeps", ["I", "K"])
def test_of_two_dims_on_one_axis_the_one_that_the_output_drops_is_gathered(keeps):
    gathered = {"I": "B[J, K] = AllGather_X(B[J, K_X])", "K": "A[I, J] = AllGather_X(A[I_X, J])"}[keeps]
    out = {"I": "C[I_X,K]", "K": "C[I,K_X]"}[keeps]
    steps = product(f"A[I_X,J] * B[J,K_X] -> {out}")
    assert steps[0] == gathered
    assert len(steps) == 2


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        # an axis that neither output dim keeps stays on the output dim of the left
        (
            "A[I,J_X] * B[J,K_X] -> C[I,K]",
            ["A[I, J] = AllGather_X(A[I, J_X])", "C[I, K_X] = A[I, J] * B[J, K_X]", "C[I, K] = AllGather_X(C[I, K_X])"],
        ),
        # giving up an axis gathers what is minor to it too: only a minor suffix can be gathered without permuting
        (
            "A[I_XY,J] * B[J,K_X] -> C[I,K_X]",
            ["A[I, J] = AllGather_XY(A[I_XY, J])", "C[I, K_X] = A[I, J] * B[J, K_X]"],
        ),
        (
            "A[I_YX,J] * B[J,K_X] -> C[I_Y,K_X]",
            ["A[I_Y, J] = AllGather_X(A[I_YX, J])", "C[I_Y, K_X] = A[I_Y, J] * B[J, K_X]"],
        ),
        # an axis that changes dim within an operand, or within the result, moves by all-to-all
        (
            "A[B,J_X] * W[B_X,J,K] -> C[B_X,K]",
            ["A[B_X, J] = AllToAll_X:J->B(A[B, J_X])", "C[B_X, K] = A[B_X, J] * W[B_X, J, K]"],
        ),
        (
            "A[I_X,J] * B[J,K] -> C[I,K_X]",
            ["C[I_X, K] = A[I_X, J] * B[J, K]", "C[I, K_X] = AllToAll_X:I->K(C[I_X, K])"],
        ),
        # a contracted dim split on one side is gathered
        ("A[I,J_X] * B[J,K] -> C[I,K]", ["A[I, J] = AllGather_X(A[I, J_X])", "C[I, K] = A[I, J] * B[J, K]"]),
        # a batch dim that the output keeps is sliced for free
        (
            "A[B_X,I] * W[B,K] -> C[B_X,I,K]",
            ["W[B_X, K] = Slice_X(W[B, K])", "C[B_X, I, K] = A[B_X, I] * W[B_X, K]"],
        ),
        # a dim summed in one operand alone leaves the result unreduced
        (
            "A[I,J_X] * B[I,K] -> C[I,K]",
            ["C[I, K]{U_X} = A[I, J_X] * B[I, K]", "C[I, K] = AllReduce_X(C[I, K]{U_X})"],
        ),
    ],
)
def test_steps_of_a_product(text, steps):
    assert product(text) == steps


@pytest.mark.parametrize(
    ("text", "first"),
    [
        # also where the output is whole: an all-to-all of A and a gather of C, not a gather of W
        ("A[B,J_X] * W[B_X,J,K] -> C[B,K]", "A[B_X, J] = AllToAll_X:J->B(A[B, J_X])"),
        # a batch dim that the output drops is gathered
        ("A[B_X,I] * W[B,K] -> C[B,I,K]", "A[B, I] = AllGather_X(A[B_X, I])"),
        # an unreduced operand is summed first
        ("A[I,J]{U_X} * B[J_X,K] -> C[I,K]", "A[I, J] = AllReduce_X(A[I, J]{U_X})"),
        ("A[I,J]{U_X} * B[J,K] -> C[I,K_X]", "A[I, J] = AllReduce_X(A[I, J]{U_X})"),
    ],
)
def test_what_a_product_begins_with(text, first):
    assert product(text)[0] == first


def test_or_else_the_other_side_is_sliced_and_the_result_reduced():
    assert product("A[I,J_X] * B[J,K] -> C[I,K]", slice_axes=("X",)) == [
        "B[J_X, K] = Slice_X(B[J, K])",
        "C[I, K]{U_X} = A[I, J_X] * B[J_X, K]",
        "C[I, K] = AllReduce_X(C[I, K]{U_X})",
    ]
    # slicing leaves other axes alone
    assert product("A[I,J_X] * B[J,K] -> C[I,K]", slice_axes=("Y",)) == product("A[I,J_X] * B[J,K] -> C[I,K]")


def test_a_contracted_dim_split_alike_leaves_the_result_unreduced():
    left, right, out = parse_einsum("A[I,J_XY] * B[J_XY,K] -> C[I,K]")
    assert lines(product_steps(left, right, out)) == ["C[I, K]{U_XY} = A[I, J_XY] * B[J_XY, K]"]


def test_split_alike_but_in_another_order_is_gathered_down_to_what_is_alike():
    left, right = align(*parse_einsum("A[I,J_XYZ] * B[J_XZY,K] -> C[I,K]"))
    assert (str(left), str(right)) == ("A[I, J_X]", "B[J_X, K]")


def test_a_sum_that_is_wanted_undone_is_left_undone():
    assert moved("C[I,K]{U_XY} -> C[I,K]{U_X}") == ["C[I, K]{U_X} = AllReduce_Y(C[I, K]{U_XY})"]
    assert product("A[I,J_X] * B[J,K] -> C[I,K]{U_X}")[-1] == "C[I, K]{U_X} = A[I, J_X] * B[J_X, K]"


def test_what_cannot_be_left_unreduced_is_refused():
    with pytest.raises(InputError, match=r"has nothing left to sum over X, which C.* leaves unreduced"):
        product("A[I,J] * B[J,K] -> C[I,K]{U_X}")


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("A[I_X,J] -> A[I_X,J]", []),
        # a sum is scattered into the dim that the output splits, or else made whole
        ("C[I,K]{U_X} -> C[I,K]", ["C[I, K] = AllReduce_X(C[I, K]{U_X})"]),
        ("C[I,K]{U_X} -> C[I_X,K]", ["C[I_X, K] = ReduceScatter_X(C[I, K]{U_X})"]),
        ("C[I,K]{U_X} -> C[I,K_X]", ["C[I, K_X] = ReduceScatter_X(C[I, K]{U_X})"]),
        # sums over several axes each go where they can
        (
            "C[I_X,K]{U_YZ} -> C[I_XZ,K]",
            ["C[I_XZ, K]{U_Y} = ReduceScatter_Z(C[I_X, K]{U_YZ})", "C[I_XZ, K] = AllReduce_Y(C[I_XZ, K]{U_Y})"],
        ),
        # a sum whose place is taken is made whole first
        (
            "C[I_Z,K]{U_X} -> C[I_YX,K]",
            [
                "C[I_Z, K] = AllReduce_X(C[I_Z, K]{U_X})",
                "C[I, K] = AllGather_Z(C[I_Z, K])",
                "C[I_YX, K] = Slice_YX(C[I, K])",
            ],
        ),
        ("A[I_X,J] -> A[I,J]", ["A[I, J] = AllGather_X(A[I_X, J])"]),
        ("A[I,J] -> A[I_XY,J]", ["A[I_XY, J] = Slice_XY(A[I, J])"]),
        ("A[I_XY,J] -> A[I_X,J]", ["A[I_X, J] = AllGather_Y(A[I_XY, J])"]),
        ("A[I_X,J] -> A[I,J_X]", ["A[I, J_X] = AllToAll_X:I->J(A[I_X, J])"]),
        # The minor axis moves, the major one is gathered: less than gathering both.
        (
            "A[I_XY,J] -> A[I,J_Y]",
            ["A[I_X, J_Y] = AllToAll_Y:I->J(A[I_XY, J])", "A[I, J_Y] = AllGather_X(A[I_X, J_Y])"],
        ),
        # Y stands where X only has to move to, so Y goes first.
        (
            "A[I_X,J_Y] -> A[I,J_X]",
            ["A[I_X, J] = AllGather_Y(A[I_X, J_Y])", "A[I, J_X] = AllToAll_X:I->J(A[I_X, J])"],
        ),
        # Two axes that want each other's places: one has to be gathered.
        (
            "A[I_X,J_Y] -> A[I_Y,J_X]",
            [
                "A[I, J_Y] = AllGather_X(A[I_X, J_Y])",
                "A[I_Y, J] = AllToAll_Y:J->I(A[I, J_Y])",
                "A[I_Y, J_X] = Slice_X(A[I_Y, J])",
            ],
        ),
        # An axis cannot become minor or major in place.
        (
            "A[I_XY,J] -> A[I_YX,J]",
            ["A[I, J] = AllGather_XY(A[I_XY, J])", "A[I_YX, J] = Slice_YX(A[I, J])"],
        ),
        (
            "x[B,T_{context,tensor},D] -> x[B,T_context,D]",
            ["x[B, T_context, D] = AllGather_tensor(x[B, T_{context,tensor}, D])"],
        ),
    ],
)
def test_steps_of_a_move(text, steps):
    assert moved(text) == steps


def test_the_backward_of_a_gather_is_a_reduce_scatter_and_conversely():
    """C = A * B with A gathered over Y: dA = dC * B comes back reduce-scattered (section 3.3.2)."""
    forward = product("In[B,D_Y] * Win[D,F_Y] -> Tmp[B,F_Y]")
    backward = product("dTmp[B,F_Y] * Win[D,F_Y] -> dIn[B,D_Y]")
    assert forward[0] == "In[B, D] = AllGather_Y(In[B, D_Y])"
    assert backward[-1] == "dIn[B, D_Y] = ReduceScatter_Y(dIn[B, D]{U_Y})"
    assert product("Tmp[B,F_Y] * Wout[F_Y,D] -> Out[B,D_Y]")[-1].startswith("Out[B, D_Y] = ReduceScatter_Y")
    assert product("dOut[B,D_Y] * Wout[F_Y,D] -> dTmp[B,F_Y]")[0] == "dOut[B, D] = AllGather_Y(dOut[B, D_Y])"


def test_the_larger_array_of_a_collective_is_the_one_that_enters_the_ring_formulas():
    (gather,) = reshard(parse_array("B[J_X,K_Y]"), parse_array("B[J,K_Y]"))
    assert str(gather.full) == "B[J, K_Y]"
    (scatter,) = reshard(parse_array("C[I,K]{U_X}"), parse_array("C[I,K_X]"))
    assert str(scatter.full) == "C[I, K]"
    (move,) = reshard(parse_array("A[I_X,J_Y]"), parse_array("A[I,J_YX]"))
    assert str(move.full) == "A[I, J_Y]"
