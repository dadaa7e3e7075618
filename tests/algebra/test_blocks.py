"""Blocks on devices: numbering, who holds what, and each collective on arrays small enough to check by eye."""

import numpy as np
import pytest

from meshwright.algebra.blocks import (
    block_of,
    coordinates,
    execute,
    groups,
    holders,
    join,
    num_devices,
    split,
)
from meshwright.algebra.notation import ShardedArray, parse_array
from meshwright.algebra.steps import Step
from meshwright.core.errors import InputError

X2Y3 = {"X": 2, "Y": 3}


def step(op, source, result, **fields):
    return Step(op=op, inputs=(parse_array(source),), result=parse_array(result), **fields)


def run(done, blocks, mesh):
    """What each device holds after one step, as lists."""
    made = execute([done], {done.inputs[0]: [np.array(b) for b in blocks]}, mesh)
    return [block.tolist() for block in made[done.result]]


def test_devices_are_numbered_row_major_over_the_axes_as_given():
    assert num_devices(X2Y3) == 6
    assert [tuple(coordinates(X2Y3, d).values()) for d in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert coordinates({"Y": 3, "X": 2}, 1) == {"Y": 0, "X": 1}
    assert (num_devices({}), coordinates({}, 0)) == (1, {})


def test_several_axes_on_a_dim_count_major_to_minor():
    blocks = [block_of(parse_array("A[I_XY, J]"), X2Y3, d)[0] for d in range(6)]
    assert blocks == [0, 1, 2, 3, 4, 5]
    blocks = [block_of(parse_array("A[I_YX, J]"), X2Y3, d)[0] for d in range(6)]
    assert blocks == [0, 2, 4, 1, 3, 5]


def test_groups_differ_only_along_their_axes_and_follow_their_order():
    assert groups(X2Y3, ("Y",)) == [[0, 1, 2], [3, 4, 5]]
    assert groups(X2Y3, ("X",)) == [[0, 3], [1, 4], [2, 5]]
    assert groups(X2Y3, ("Y", "X")) == [[0, 3, 1, 4, 2, 5]]
    assert groups(X2Y3, ()) == [[0], [1], [2], [3], [4], [5]]


def test_who_holds_which_block():
    """Figure 7 of How to Scale Your Model: a 2 x 2 mesh; then copies over the axis that is not used."""
    assert holders(parse_array("A[I_X, J_Y]"), {"X": 2, "Y": 2}) == {(0, 0): [0], (0, 1): [1], (1, 0): [2], (1, 1): [3]}
    assert holders(parse_array("A[I_X, J]"), {"X": 2, "Y": 2}) == {(0, 0): [0, 1], (1, 0): [2, 3]}
    assert holders(parse_array("A[I, J]"), {"X": 2, "Y": 2}) == {(0, 0): [0, 1, 2, 3]}
    assert holders(parse_array("A[I_YX]"), {"X": 2, "Y": 2}) == {(0,): [0], (1,): [2], (2,): [1], (3,): [3]}


def test_split_deals_blocks_out():
    value = np.arange(12).reshape(2, 6)
    blocks = split(value, parse_array("A[I_X, J_Y]"), X2Y3)
    assert [b.tolist() for b in blocks] == [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]], [[8, 9]], [[10, 11]]]


def test_the_addends_of_an_unreduced_array_differ_and_sum_to_it():
    value = np.arange(1, 7)
    array = parse_array("A[I_X]{U_Y}")
    blocks = split(value, array, X2Y3)
    assert sum(blocks[:3]).tolist() == [1, 2, 3]
    assert len({tuple(b.tolist()) for b in blocks}) == 6
    assert join(blocks, array, X2Y3).tolist() == value.tolist()


@pytest.mark.parametrize(
    "text", ["A[I, J]", "A[I_X, J]", "A[I_YX, J]", "A[I_Y, J_X]", "A[I, J_X]{U_Y}", "A[I, J]{U_YX}"]
)
def test_join_undoes_split(text):
    value = np.arange(72).reshape(6, 12)
    array = parse_array(text)
    assert np.array_equal(join(split(value, array, X2Y3), array, X2Y3), value)


def test_join_of_a_scalar():
    loss = ShardedArray("loss", (), (), ("Y",))
    assert join(split(np.array(7), loss, X2Y3), loss, X2Y3) == 7


def test_copies_that_differ_are_noticed():
    array = parse_array("A[I_X]")
    blocks = [b.astype(float) for b in split(np.arange(4), array, X2Y3)]
    blocks[4][1] += 1e-6
    with pytest.raises(AssertionError, match=r"devices 3 and 4 differ in block \(1,\) of A\[I_X\]"):
        join(blocks, array, X2Y3)
    assert join(blocks, array, X2Y3, rel_tol=1e-6).tolist() == [0, 1, 2, 3]
    with pytest.raises(AssertionError, match="differ"):
        join(blocks, array, X2Y3, rel_tol=1e-8)


def test_an_uneven_split_is_refused():
    with pytest.raises(InputError, match=r"I=4 of A.* does not divide by Y=3"):
        split(np.arange(4), parse_array("A[I_Y]"), X2Y3)


def test_all_gather():
    gather = step("all_gather", "A[I_Y]", "A[I]", axes=("Y",), dim="I")
    assert run(gather, [[0], [1], [2], [3], [4], [5]], X2Y3) == [[0, 1, 2]] * 3 + [[3, 4, 5]] * 3


def test_all_gather_over_two_axes_keeps_the_order_of_the_dim():
    gather = step("all_gather", "A[I_YX]", "A[I]", axes=("Y", "X"), dim="I")
    assert run(gather, [[0], [2], [4], [1], [3], [5]], X2Y3) == [[0, 1, 2, 3, 4, 5]] * 6


def test_all_gather_along_a_later_dim():
    gather = step("all_gather", "A[I, J_X]", "A[I, J]", axes=("X",), dim="J")
    assert run(gather, [[[0], [2]], [[1], [3]]], {"X": 2}) == [[[0, 1], [2, 3]]] * 2


def test_reduce_scatter():
    scatter = step("reduce_scatter", "A[I]{U_X}", "A[I_X]", axes=("X",), dim="I")
    assert run(scatter, [[1, 2], [10, 20]], {"X": 2}) == [[11], [22]]


def test_reduce_scatter_over_two_axes_is_major_to_minor():
    scatter = step("reduce_scatter", "A[I]{U_XY}", "A[I_YX]", axes=("Y", "X"), dim="I")
    assert run(scatter, [[0, 1, 2, 3, 4, 5]] * 6, X2Y3) == [[0], [12], [24], [6], [18], [30]]


def test_all_reduce_of_sums_and_of_largest():
    total = step("all_reduce", "A[I]{U_X}", "A[I]", axes=("X",))
    assert run(total, [[1, 5], [3, 4]], {"X": 2}) == [[4, 9], [4, 9]]
    largest = step("all_reduce", "A[I]{U_X}", "A[I]", axes=("X",), reduction="max")
    assert run(largest, [[1, 5], [3, 4]], {"X": 2}) == [[3, 5], [3, 5]]


def test_all_to_all():
    """The blocks of a 2 x 2 array, split by rows, then by columns."""
    move = step("all_to_all", "A[I_X, J]", "A[I, J_X]", axes=("X",), dim="I", to_dim="J")
    assert run(move, [[[0, 1]], [[2, 3]]], {"X": 2}) == [[[0], [2]], [[1], [3]]]


def test_slice():
    cut = step("slice", "A[I]", "A[I_YX]", axes=("Y", "X"), dim="I")
    assert run(cut, [[0, 1, 2, 3, 4, 5]] * 6, X2Y3) == [[0], [2], [4], [1], [3], [5]]


def test_local_ops_and_accumulation():
    left, right, out = (parse_array(t) for t in ("A[I, J]", "B[J]", "C[I]"))
    values = {left: [np.array([[1, 2], [3, 4]])], right: [np.array([10, 1])]}
    times = Step(op="einsum", inputs=(left, right), result=out)
    again = Step(op="einsum", inputs=(left, right), result=out, accumulates=True)
    copied = Step(op="copy", inputs=(out,), result=parse_array("D[I]"))
    added = Step(op="add", inputs=(out, copied.result), result=parse_array("E[I]"))
    made = execute([times, again, copied, added], values, {})
    assert made[out][0].tolist() == [24, 68]
    assert made[added.result][0].tolist() == [48, 136]


def test_large_products_give_the_same_numbers():
    left, right, out = (parse_array(t) for t in ("A[B, I, J]", "B[J, B, K]", "C[B, K, I]"))
    random = np.random.default_rng(0)
    values = {left: random.integers(-4, 5, (3, 40, 50)), right: random.integers(-4, 5, (50, 3, 20))}
    steps = [Step(op="einsum", inputs=(left, right), result=out)]
    made = execute(steps, {array: [value] for array, value in values.items()}, {})
    assert np.array_equal(made[out][0], np.einsum("bij,jbk->bki", values[left], values[right]))


def test_what_was_not_made_cannot_be_used():
    with pytest.raises(AssertionError, match=r"nothing has made A\[I_X\]"):
        execute([step("all_gather", "A[I_X]", "A[I]", axes=("X",), dim="I")], {}, {"X": 2})


def test_other_ops_are_refused_by_name():
    with pytest.raises(AssertionError, match="attention is not executed on NumPy blocks"):
        run(step("attention", "A[I]", "C[I]"), [[1]], {})
