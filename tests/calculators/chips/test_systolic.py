"""The systolic array: right products, cycles that the formula gives, and what snapshots show."""

import numpy as np
import pytest

from meshwright.calculators.chips.systolic import simulate, systolic_cycles
from meshwright.calculators.verbs.systolic import REACH, frames, telling_cycles
from meshwright.core.errors import InputError

CASES = [
    (16, 8, 8, 8, 8),
    (3, 4, 4, 4, 4),
    (1, 4, 6, 4, 6),
    (5, 9, 7, 4, 3),
    (2, 12, 12, 4, 4),
    (9, 8, 8, 4, 2),
    (1, 1, 1, 1, 1),
    (7, 3, 5, 1, 1),
]


def matrices(num_inputs: int, depth: int, width: int):
    rng = np.random.default_rng(num_inputs)
    return rng.integers(-9, 10, (num_inputs, depth)), rng.integers(-9, 10, (depth, width))


@pytest.mark.parametrize(("num_inputs", "depth", "width", "rows", "cols"), CASES)
def test_the_machine_multiplies_in_the_cycles_of_the_formula(num_inputs, depth, width, rows, cols):
    inputs, weights = matrices(num_inputs, depth, width)
    product, busy = simulate(inputs, weights, rows=rows, cols=cols)
    counted = systolic_cycles(num_inputs, depth, width, rows=rows, cols=cols)
    np.testing.assert_array_equal(product, inputs @ weights)
    assert len(busy) == counted.total == counted.load + counted.fill + counted.stream + counted.drain
    # the last cycle is needed: the far cell works in it
    assert busy[-1] == 1
    assert sum(busy) == num_inputs * counted.num_tiles * rows * cols
    if depth % rows == 0 and width % cols == 0:
        assert sum(busy) / (rows * cols * len(busy)) == pytest.approx(counted.useful_share)


def test_an_mxu_takes_eight_cycles_for_eight_rows_once_it_is_full():
    # How to Scale Your Model, section 2.5.2: bf16[8,128] x bf16[128,128] every 8 cycles
    few, more = (systolic_cycles(n, 128, 128, rows=128, cols=128) for n in (1024, 1032))
    assert more.total - few.total == 8
    assert few.total == 128 + 1024 + 254


def test_the_bubble_goes_with_larger_batches_and_comes_back_with_narrow_matrices():
    shares = [systolic_cycles(n, 128, 128, rows=128, cols=128).useful_share for n in (8, 128, 1024, 65536)]
    assert shares == sorted(shares)
    assert shares[-1] > 0.99
    narrow = systolic_cycles(65536, 64, 128, rows=128, cols=128)
    assert narrow.useful_share == pytest.approx(shares[-1] / 2)
    # new weights take 128 cycles to move in: eight inputs a tile keep one sixteenth of the array busy
    assert systolic_cycles(8, 12800, 128, rows=128, cols=128).steady_share == 8 / 128


def test_snapshots_show_the_diagonals():
    inputs, weights = matrices(6, 4, 4)
    shown = frames(inputs, weights, rows=4, cols=4)
    counted = systolic_cycles(6, 4, 4, rows=4, cols=4)
    assert len(shown) == counted.total
    assert [frame.num_busy for frame in shown] == list(simulate(inputs, weights, rows=4, cols=4)[1])
    second = shown[1]  # two weights of the first column are in, one of the second
    there = [[weight is not None for weight in row] for row in second.weights]
    assert there == [[True, True, False, False], [True, False, False, False], [False] * 4, [False] * 4]
    first_product = shown[4]
    assert first_product.activations[0][0] == inputs[0, 0]
    assert first_product.weights[0][0] == weights[0, 0]
    assert {one.distance for frame in shown for one in (*frame.inputs, *frame.results)} == set(range(1, REACH + 1))


def test_results_leave_below_in_order():
    inputs, weights = matrices(6, 4, 4)
    seen = [one for frame in frames(inputs, weights, rows=4, cols=4) for one in frame.results if one.distance == 1]
    product = inputs @ weights
    for col in range(4):
        values = [one.value for one in seen if one.lane == col]
        assert values == list(product[: len(values), col])
        assert len(values) >= 5  # the last one leaves as the array stops


def test_telling_cycles_are_few_and_real():
    for case in CASES:
        counted = systolic_cycles(*case[:3], rows=case[3], cols=case[4])
        chosen = telling_cycles(counted)
        assert len(chosen) == min(9, counted.total)
        assert chosen[-1] == counted.total - 1


def zeros(rows: int, cols: int):
    return np.zeros((rows, cols), dtype=np.int64)


def test_what_is_too_large_or_empty():
    with pytest.raises(InputError, match="too many to run"):
        simulate(zeros(2, 1000), zeros(1000, 1000), rows=1000, cols=1000)
    with pytest.raises(InputError, match="inputs 0 must be at least 1"):
        systolic_cycles(0, 8, 8, rows=8, cols=8)
