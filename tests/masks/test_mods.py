"""Masks against loops over pairs that are written from their definitions, and score rules against their formulas."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.errors import InputError
from meshwright.masks import mods
from meshwright.masks.names import MASKS, SCORES

BATCH, HEADS, LENGTH = 2, 3, 24
RNG = np.random.default_rng(1)


def pairs_of(mask, length=LENGTH, batch=BATCH):
    """The pairs that a mask allows in one call, [B, T, T]."""
    rows = np.arange(length, dtype=np.int32)
    at = np.arange(batch)[:, None, None, None], np.zeros((1, 1, 1, 1), int), rows[:, None], rows
    return np.broadcast_to(mask(*at), (batch, 1, length, length))[:, 0]


def by_pairs(allowed, length=LENGTH, batch=BATCH):
    """The pairs for which ``allowed(b, i, j)`` is true of plain integers."""
    positions = range(length)
    return np.array([[[bool(allowed(b, i, j)) for j in positions] for i in positions] for b in range(batch)])


DOCUMENTS = np.sort(RNG.integers(0, 4, (BATCH, LENGTH)), axis=1).astype(np.int32)
PREFIX, LENGTHS = np.array([5, 0], np.int32), np.array([24, 11], np.int32)
GLOBAL = (RNG.random((BATCH, LENGTH)) < 0.2).astype(np.int32)
DISTANCES = RNG.integers(0, 9, (BATCH, LENGTH, LENGTH)).astype(np.int32)
SPANS = np.array([[0] * 4 + [1] * 6 + [0] * 2 + [2] * 8 + [0] * 4, [3] * 5 + [0] * 19], np.int32)
PARENTS = np.array([[-1, *(int(RNG.integers(-1, at)) for at in range(1, LENGTH))] for _ in range(BATCH)])
# the first sequence: a prompt of 6, answers of 5 and 4, a prompt of 5 and an answer of 4; the second: two prompts
SHARED = np.array([[0] * 6 + [1] * 5 + [2] * 4 + [3] * 5 + [4] * 4, [0] * 10 + [1] * 14], np.int32)
PREFIX_OF = np.array([[0, 0, 0, 3, 3], [0, 1, 2, 3, 4]], np.int32)
STARTS = np.array([[0, 6, 11, 15, 20, 24], [0, 10, 24, 24, 24, 24]], np.int32)
OWNER = np.array([[3, -1, 0, 5, 1, 2], [0, 1, 2, -1, -1, -1]], np.int32)


def is_ancestor(b, i, j):
    while i >= 0 and i != j:
        i = PARENTS[b, i]
    return i == j


def nearest_keys(at, length, kernel):
    """The ``kernel`` positions of a sequence that lie closest to one, as a window that stays inside."""
    return min(
        (range(first, first + kernel) for first in range(length - kernel + 1)),
        key=lambda window: (at not in window, abs(window[kernel // 2] - at)),
    )


def near_2d(i, j, width, height, kernel):
    (row, column), (other_row, other_column) = divmod(i, width), divmod(j, width)
    return other_row in nearest_keys(row, height, kernel) and other_column in nearest_keys(column, width, kernel)


def shares_prefix(b, i, j):
    own, other = SHARED[b, i], SHARED[b, j]
    return (own == other and j <= i) or (own != other and other == PREFIX_OF[b, own])


def in_pages(b, i, j):
    page, within = divmod(j, 4)
    return OWNER[b, page] >= 0 and OWNER[b, page] * 4 + within <= i


CASES = {
    "noop": (mods.noop(), lambda b, i, j: True),
    "causal": (mods.causal(), lambda b, i, j: j <= i),
    "sliding_window": (mods.sliding_window(5), lambda b, i, j: j in range(i - 4, i + 1)),
    "window": (mods.window(5), lambda b, i, j: j > i - 5),
    "chunked": (mods.chunked(5), lambda b, i, j: j in range(i // 5 * 5, i + 1)),
    "local": (mods.local(3), lambda b, i, j: j in range(i - 3, i + 4)),
    "prefix_lm": (mods.prefix_lm(PREFIX), lambda b, i, j: j <= i or j < PREFIX[b]),
    "document": (mods.document(DOCUMENTS), lambda b, i, j: DOCUMENTS[b, i] == DOCUMENTS[b, j]),
    "jagged": (mods.jagged(LENGTHS), lambda b, i, j: max(i, j) < LENGTHS[b]),
    "padded": (mods.padded(LENGTHS), lambda b, i, j: j < LENGTHS[b]),
    "global_sliding": (
        mods.global_sliding(GLOBAL, 2),
        lambda b, i, j: j in range(i - 2, i + 3) or GLOBAL[b, i] or GLOBAL[b, j],
    ),
    "tree": (mods.tree(*mods.tree_walk(PARENTS)), is_ancestor),
    "graph": (mods.graph(DISTANCES, 4), lambda b, i, j: DISTANCES[b, i, j] < 5),
    "neighbourhood": (mods.neighbourhood(LENGTH, 7), lambda b, i, j: j in nearest_keys(i, LENGTH, 7)),
    "neighbourhood_2d": (mods.neighbourhood_2d(6, 4, 3), lambda b, i, j: near_2d(i, j, 6, 4, 3)),
    "shared_prefix": (mods.shared_prefix(SHARED, STARTS, PREFIX_OF), shares_prefix),
    "transfusion": (mods.transfusion(SPANS), lambda b, i, j: j <= i or SPANS[b, i] == SPANS[b, j] > 0),
    "paged": (mods.paged(mods.causal(), OWNER, 4), in_pages),
    "and_masks": (mods.and_masks(mods.local(3), mods.document(DOCUMENTS), mods.causal()),
                  lambda b, i, j: i - 3 <= j <= i and DOCUMENTS[b, i] == DOCUMENTS[b, j]),
    "or_masks": (mods.or_masks(mods.sliding_window(2), mods.document(DOCUMENTS)),
                 lambda b, i, j: j in (i, i - 1) or DOCUMENTS[b, i] == DOCUMENTS[b, j]),
}  # fmt: skip


def test_every_mask_of_the_catalogue_has_a_case():
    assert set(MASKS) <= set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_mask_allows_the_pairs_of_its_definition(name):
    mask, allowed = CASES[name]
    expected = by_pairs(allowed)
    assert np.array_equal(pairs_of(mask), expected)
    assert expected.any(axis=(1, 2)).all()
    assert name == "noop" or not expected.all()


def test_arrays_of_jax_give_the_same_pairs():
    rows = jnp.arange(LENGTH)
    at = (
        jnp.arange(BATCH)[:, None, None, None],
        jnp.zeros((1, 1, 1, 1), int),
        rows[None, None, :, None],
        rows[None, None, None],
    )
    for mask in (
        mods.document(DOCUMENTS),
        mods.shared_prefix(SHARED, STARTS, PREFIX_OF),
        mods.neighbourhood(LENGTH, 7),
    ):
        assert np.array_equal(np.broadcast_to(mask(*at), (BATCH, 1, LENGTH, LENGTH))[:, 0], pairs_of(mask))


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_any_forest_is_walked_to_its_ancestors(data):
    length = data.draw(st.integers(1, 16))
    parents = [data.draw(st.integers(-1, at - 1)) for at in range(length)]

    def ancestor(b, i, j):
        while i > j:
            i = parents[i]
        return i == j

    found = pairs_of(mods.tree(*mods.tree_walk(np.array([parents]))), length, 1)
    assert np.array_equal(found, by_pairs(ancestor, length, 1))


def test_a_parent_after_its_child_is_refused():
    with pytest.raises(InputError, match="a parent comes at or after its child"):
        mods.tree_walk(np.array([[-1, 0, 2]]))


def test_tiles_of_a_canvas_are_the_same_pairs_in_another_order():
    width, height, tile = 8, 12, 4
    # the token at each place of the canvas, counted tile by tile
    number = np.arange(width * height).reshape(height // tile, width // tile, tile, tile)
    token = number.transpose(0, 2, 1, 3).reshape(-1)
    tiled = pairs_of(mods.neighbourhood_2d(width, height, 5, tile), width * height, 1)[0]
    plain = pairs_of(mods.neighbourhood_2d(width, height, 5), width * height, 1)[0]
    assert np.array_equal(tiled[np.ix_(token, token)], plain)
    assert not np.array_equal(tiled, plain)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mods.neighbourhood(8, 4), r"kernel=4 must be odd and at most 8"),
        (lambda: mods.neighbourhood(8, 9), r"kernel=9 must be odd and at most 8"),
        (lambda: mods.neighbourhood_2d(9, 4, 5), r"kernel=5 must be odd and at most 4"),
        (lambda: mods.neighbourhood_2d(8, 6, 3, 4), r"tile=4 does not divide a canvas of 8 x 6"),
    ],
)
def test_windows_that_do_not_fit_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()


SLOPES, BIAS = np.array([0.5, 0.25, 0.125], np.float32), np.array([1.0, -2.0, 3.0], np.float32)
TABLE, EDGES = RNG.normal(size=(HEADS, 9)).astype(np.float32), RNG.normal(size=(HEADS, 2, 4)).astype(np.float32)
KINDS = RNG.integers(0, 4, (BATCH, LENGTH, LENGTH, 2))
COUNTS = RNG.integers(0, 3, (BATCH, LENGTH, LENGTH))


def edge_mean(s, b, h, i, j):
    steps = range(COUNTS[b, i, j])
    return s + sum(EDGES[h, step, KINDS[b, i, j, step]] for step in steps) / max(len(steps), 1)


RULES = {
    "relative": (mods.relative(0.5), lambda s, b, h, i, j: s + 0.5 * (i - j)),
    "alibi": (mods.alibi(SLOPES), lambda s, b, h, i, j: s - SLOPES[h] * (i - j)),
    "softcap": (mods.softcap(2.0), lambda s, b, h, i, j: 2 * math.tanh(s / 2)),
    "head_bias": (mods.head_bias(BIAS), lambda s, b, h, i, j: s + BIAS[h]),
    "graph_bias": (mods.graph_bias(TABLE, DISTANCES), lambda s, b, h, i, j: s + TABLE[h, DISTANCES[b, i, j]]),
    "edge_bias": (mods.edge_bias(EDGES, KINDS, COUNTS), edge_mean),
    "then": (mods.then(mods.alibi(SLOPES), mods.softcap(2.0)),
             lambda s, b, h, i, j: 2 * math.tanh((s - SLOPES[h] * (i - j)) / 2)),
}  # fmt: skip


def test_every_score_rule_of_the_catalogue_has_a_case():
    assert set(SCORES) <= set(RULES)


@pytest.mark.parametrize("name", RULES)
def test_a_score_rule_is_its_formula(name):
    rule, formula = RULES[name]
    scores = RNG.normal(size=(BATCH, HEADS, LENGTH, LENGTH))
    at = np.ix_(*map(np.arange, scores.shape))
    expected = [formula(scores[place], *place) for place in np.ndindex(*scores.shape)]
    np.testing.assert_allclose(rule(scores, *at), np.reshape(expected, scores.shape), rtol=1e-6, atol=1e-6)


def test_slopes_of_alibi():
    assert mods.alibi_slopes(8).tolist() == [2.0**-n for n in range(1, 9)]
