"""Sight told of whole blocks never contradicts the rule for single pairs; a zigzag gives ranks the same work."""

import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.core.errors import InputError
from meshwright.nn.attention.visibility import (
    EVERYTHING,
    NOTHING,
    SOME,
    TokenPositions,
    block_visibility,
    visible,
    zigzag_order,
)


def test_the_rule_of_sight():
    query = TokenPositions(jnp.array([5, 5, 5, 5, 5]), jnp.array([1, 1, 1, 1, 2]))
    key = TokenPositions(jnp.array([5, 6, 3, 2, 5]), jnp.array([1, 1, 1, 1, 1]))
    assert visible(query, key, window=3).tolist() == [True, False, True, False, False]
    assert visible(query, key, window=None).tolist() == [True, False, True, True, False]


@pytest.mark.parametrize("window", [None, 1, 7, 100])
@pytest.mark.parametrize("kind", ["in order", "shuffled", "documents", "zigzag"])
def test_sight_of_blocks_agrees_with_sight_of_pairs(kind, window):
    rng = np.random.default_rng(0)
    length, query_block, key_block = 48, 6, 8
    order = {"shuffled": rng.permutation(length), "zigzag": zigzag_order(length, 4)}.get(kind, np.arange(length))
    document = jnp.asarray(np.sort(rng.integers(0, 5, (2, length)), axis=1)) if kind == "documents" else None
    places = TokenPositions(jnp.asarray(np.stack([order, order])), document)
    sight = np.asarray(block_visibility(places, places, window=window, query_block=query_block, key_block=key_block))
    pairs = np.asarray(visible(places.over_keys(), places.over_queries(), window=window))
    found = pairs.reshape(2, length // query_block, query_block, length // key_block, key_block)
    assert np.all(found.all(axis=(0, 2, 4))[sight == EVERYTHING])
    assert not np.any(found.any(axis=(0, 2, 4))[sight == NOTHING])
    assert np.any(sight == SOME)
    if kind == "in order":
        # In order it is exact: a block that may be seen is, and one that is whole needs no mask.
        assert np.array_equal(sight == NOTHING, ~found.any(axis=(0, 2, 4)))
        assert np.array_equal(sight == EVERYTHING, found.all(axis=(0, 2, 4)))


def test_rows_that_fill_up_are_never_seen():
    top = np.iinfo(np.int32).max
    query, key = TokenPositions(jnp.array([-1, -1], jnp.int32)), TokenPositions(jnp.array([0, top], jnp.int32))
    assert not visible(query.over_keys(), key.over_queries(), window=3).any()
    assert block_visibility(query, key, window=3, query_block=2, key_block=2).tolist() == [[NOTHING]]


def test_a_zigzag_deals_out_the_two_ends():
    assert zigzag_order(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert sorted(zigzag_order(24, 4)) == list(range(24))
    with pytest.raises(InputError, match=r"the length is 12. Use a multiple of 8"):
        zigzag_order(12, 4)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_zigzag_gives_every_rank_the_same_work(num_ranks):
    length = 16 * num_ranks
    seen = zigzag_order(length, num_ranks).reshape(num_ranks, -1) + 1
    work = seen.sum(axis=1)
    assert np.all(work == work[0])
    in_order = (np.arange(length).reshape(num_ranks, -1) + 1).sum(axis=1)
    assert in_order.max() / in_order.mean() > 1.4
