"""How often layers run again, against a walk that counts every layer of every backward pass."""

import numpy as np
import pytest

from meshwright.algebra.rewrites.reruns import Rerun
from meshwright.spec.strategy import ALL_LAYERS

PAIR = ("local", "whole")


def walked(num_layers, segment):
    """The layers that run again before the backward passes of all layers, one list for each, last layer first."""
    return [list(range(layer // segment * segment, layer)) for layer in reversed(range(num_layers))]


@pytest.mark.parametrize("num_layers", [1, 2, 7, 32])
@pytest.mark.parametrize("segment", [1, 2, 3, 8, ALL_LAYERS])
def test_a_walk_counts_as_many(num_layers, segment):
    found = Rerun("layer", ("layer",) * num_layers, segment).times(num_layers)
    assert found == sum(map(len, walked(num_layers, segment)))
    if segment == ALL_LAYERS:
        assert found == num_layers * (num_layers - 1) / 2
    elif num_layers % segment == 0:
        kept = num_layers // segment
        assert found == num_layers * (segment - 1) / 2 == num_layers**2 / (2 * kept) - num_layers / 2


@pytest.mark.parametrize(
    ("segment", "local", "whole"), [(ALL_LAYERS, 5 + 3 + 1, 4 + 2 + 0), (2, 3, 0), (3, 3, 0), (4, 5, 2)]
)
def test_of_two_kinds_the_first_of_a_segment_runs_most_often(segment, local, whole):
    """Six layers in turn; a segment has whole pairs: of 4 layers and then 2, the first kind has 3 + 1 and 1."""
    found = [Rerun(name, PAIR * 3, segment).times(3) for name in PAIR]
    assert found == [local, whole]


def test_every_run_of_a_pipeline_has_its_own_segments():
    """32 layers in 1, 4 and 5 runs: the longest of five has 7 layers, of which 21 run again, so 3 for each layer."""
    runs = np.array([1, 4, 5, 4])
    found = Rerun("layer", ("layer",) * 32, ALL_LAYERS).times(32, runs)
    np.testing.assert_array_equal(found, [32 * 31 / 2, 4 * 8 * 7 / 2, 32 * 3, 4 * 8 * 7 / 2])
