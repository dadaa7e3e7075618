"""What a step says of itself: the array whose bytes count, and how often a permute sends it."""

import numpy as np
import pytest

from meshwright.algebra.notation import parse_array
from meshwright.algebra.rewrites.rings import Round, num_moves
from meshwright.algebra.sizes import OpSizes
from meshwright.algebra.steps import Step


def permute(details=None):
    return Step(
        op="permute",
        inputs=(parse_array("k[B, T_X, K, H]"),),
        result=parse_array("k[B, T_X, K, H]"),
        axes=("X",),
        details=details,
    )


def test_a_permute_sends_the_block_and_a_gather_the_whole():
    assert permute().full == parse_array("k[B, T_X, K, H]")
    gather = Step(op="all_gather", inputs=permute().inputs, result=parse_array("k[B, T, K, H]"), axes=("X",), dim="T")
    assert gather.full == parse_array("k[B, T, K, H]")


@pytest.mark.parametrize(
    ("ring", "window", "expected"),
    [
        ("past", None, [0, 1, 3, 7]),
        ("home", None, [0, 1, 3, 7]),
        # 100 positions reach ceil(100 X / 1024) of the devices before
        ("past", 100, [0, 1, 1, 1]),
        ("home", 100, [0, 1, 1, 1]),
        ("past", 300, [0, 1, 2, 3]),
    ],
)
def test_blocks_go_past_every_device_or_come_home(ring, window, expected):
    step = permute(Round(ring=ring, window=window))
    sizes = np.array([1, 2, 4, 8])
    assert (
        np.asarray(num_moves(step, OpSizes(dims={"T": 1024.0}, mesh={"X": sizes}, state="fp32"))).tolist() == expected
    )


def test_a_permute_alone_moves_once():
    assert num_moves(permute(), OpSizes(dims={}, mesh={"X": 4}, state="fp32")) == 1
