"""Which layers a stage runs: every layer once, in order, in stages of one pattern."""

import math

from hypothesis import given
from hypothesis import strategies as st

from meshwright.algebra.rewrites.pipeline import stage_layers

NAMES = st.one_of(
    st.lists(st.sampled_from(["layer", "layer_moe", "layer_local"]), min_size=1, max_size=12),
    st.integers(1, 40).map(lambda count: ["layer"] * count),
    st.integers(1, 20).map(lambda count: ["layer_local", "layer"] * count),
)


@given(names=NAMES.map(tuple), stages=st.integers(1, 8))
def test_every_layer_has_one_place_of_its_block(names, stages):
    pattern, places = stage_layers(names, stages)
    assert len(places) == stages
    assert [layer for stage in places for layer in stage if layer >= 0] == list(range(len(names)))
    assert all(len(stage) == len(pattern) for stage in places)
    for stage in places:
        assert all(names[layer] == block for layer, block in zip(stage, pattern, strict=True) if layer >= 0)


@given(count=st.integers(1, 60), stages=st.integers(1, 16))
def test_layers_of_one_kind_are_shared_out_evenly(count, stages):
    pattern, places = stage_layers(("layer",) * count, stages)
    held = [sum(layer >= 0 for layer in stage) for stage in places]
    assert len(pattern) == math.ceil(count / stages)
    assert max(held) - min(held) <= 1


def test_the_pattern_is_no_longer_than_it_must_be():
    dense_first = ("layer",) * 3 + ("layer_moe",) * 58
    assert len(stage_layers(dense_first, 2).pattern) == 32
    turns = ("layer_local", "layer") * 13
    assert len(stage_layers(turns, 2).pattern) == 14
    assert stage_layers(turns, 13).pattern == ("layer_local", "layer")
