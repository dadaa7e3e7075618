"""Tables of blocks against all pairs, for compositions of masks drawn at random."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.errors import InputError
from meshwright.masks import mods
from meshwright.masks.ranges import NoRangesError
from meshwright.masks.table import FULL, NOTHING, PARTIAL, BlockTable, block_table, counted_table

BATCH, HEADS, MOST = 2, 2, 40
"""Sequences and heads of the masks, and the positions that their arrays have."""
RNG = np.random.default_rng(2)
DOCUMENTS = np.sort(RNG.integers(0, 4, (BATCH, MOST)), axis=1).astype(np.int32)
NUMBERS = RNG.integers(0, 200, (BATCH, MOST)).astype(np.uint8)
SHARED = np.repeat([[0, 1, 2, 3]], MOST // 4, axis=0).T.reshape(1, -1).repeat(BATCH, 0).astype(np.int32)
STARTS = np.array([[0, 10, 20, 30, 40]] * BATCH, np.int32)
WIDTHS = np.array([3, 12], np.int32)

RANGED = {
    "noop": mods.noop(),
    "causal": mods.causal(),
    "sliding_window": mods.sliding_window(7),
    "chunked": mods.chunked(7),
    "local": mods.local(4),
    "prefix_lm": mods.prefix_lm(np.array([9, 0], np.int32)),
    "document": mods.document(DOCUMENTS),
    "jagged": mods.jagged(np.array([31, 12], np.int32)),
    "padded": mods.padded(np.array([31, 12], np.int32)),
    "global": mods.global_sliding((DOCUMENTS == 2).astype(np.int32), 3),
    "tree": mods.tree(*mods.tree_walk(np.maximum(np.arange(MOST) - RNG.integers(1, 5, (BATCH, MOST)), -1))),
    "neighbourhood": mods.neighbourhood(MOST, 9),
    "canvas": mods.neighbourhood_2d(8, 5, 3),
    "transfusion": mods.transfusion(DOCUMENTS // 2),
    "paged": mods.paged(mods.causal(), np.array([[3, 0, -1, 1, 2, 5, 4, 6, 7, 8], [*range(10)]], np.int32), 4),
    "shared_prefix": mods.shared_prefix(SHARED, STARTS, np.array([[0, 0, 0, 3]] * BATCH, np.int32)),
    "width of a head": lambda b, h, q_idx, kv_idx: abs(q_idx - kv_idx) < jnp_or_numpy(h)[h],
    "parity": lambda b, h, q_idx, kv_idx: (q_idx + kv_idx) % 2 == 0,
    "steps": lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 2.5 <= 2,
    "other": lambda b, h, q_idx, kv_idx: ~(q_idx // 3 == kv_idx // 3),
    "truth": lambda b, h, q_idx, kv_idx: (q_idx * kv_idx).astype(np.float32) / 7 > 20,
}
POINTS_ONLY = {
    "graph": mods.graph(RNG.integers(0, 4, (BATCH, MOST, MOST)).astype(np.int32), 1),
    "unsigned": lambda b, h, q_idx, kv_idx: kv_idx - mods.take(NUMBERS, b, q_idx) > -30,
    "as Booleans": lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).astype(bool),
    "wraps": lambda b, h, q_idx, kv_idx: (kv_idx - q_idx).astype(np.uint8) < 9,
    "where": lambda b, h, q_idx, kv_idx: np.where(q_idx % 3 == 0, kv_idx < 9, kv_idx > q_idx),
}


def jnp_or_numpy(index):
    return jnp.asarray(WIDTHS) if isinstance(index, jax.Array) else WIDTHS


def indices(data, name):
    """Indices of rows or columns: all in order, or some in any order."""
    length = data.draw(st.integers(1, MOST), label=name)
    if data.draw(st.booleans(), label=f"{name} shuffled"):
        return np.random.default_rng(length).permutation(MOST).astype(np.int32)[:length]
    return np.arange(length, dtype=np.int32)


def composition(data, masks):
    names = data.draw(st.lists(st.sampled_from(sorted(masks)), min_size=1, max_size=3), label="masks")
    found = masks[names[0]]
    for name in names[1:]:
        found = data.draw(st.sampled_from([mods.and_masks, mods.or_masks]), label="join")(found, masks[name])
    return found


def true_kinds(mask, q_idx, kv_idx, q_block, kv_block):
    """The kind of each block, from all of its pairs; the last block of keys is full only if it is whole."""
    kinds = np.full((BATCH, HEADS, -(-len(q_idx) // q_block), -(-len(kv_idx) // kv_block)), -1)
    for b, h, i, j in np.ndindex(*kinds.shape):
        rows = q_idx[i * q_block : (i + 1) * q_block, None]
        columns = kv_idx[None, j * kv_block : (j + 1) * kv_block]
        seen = np.broadcast_to(mask(np.int32(b), np.int32(h), rows, columns), (len(rows), columns.shape[1]))
        whole = seen.all() and columns.shape[1] == kv_block
        kinds[b, h, i, j] = FULL if whole else PARTIAL if seen.any() else NOTHING
    return kinds


def drawn(data):
    """Indices and sizes of blocks."""
    blocks = data.draw(st.tuples(st.integers(1, 16), st.integers(1, 16)), label="block")
    return indices(data, "q_idx"), indices(data, "kv_idx"), blocks


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_an_exact_table_is_that_of_all_pairs(data):
    mask = composition(data, RANGED | POINTS_ONLY)
    q_idx, kv_idx, block = drawn(data)
    table = block_table(mask, q_idx=q_idx, kv_idx=kv_idx, block=block, batch=BATCH, heads=HEADS)
    expected = true_kinds(mask, q_idx, kv_idx, *block)
    assert np.array_equal(np.broadcast_to(table.kinds, expected.shape), expected)
    assert (table.q_len, table.kv_len) == (len(q_idx), len(kv_idx))
    assert table.count(PARTIAL) + table.count(FULL) + table.count(NOTHING) == table.kinds.size
    assert table.sparsity() == pytest.approx((expected == NOTHING).mean())


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_ranges_are_certain_of_full_and_empty_blocks(data):
    _check_ranges(np, data)


@given(data=st.data())
@settings(max_examples=4, deadline=None)
def test_ranges_of_jax_are_certain_too(data):
    _check_ranges(jnp, data)


def _check_ranges(xp, data):
    mask = composition(data, RANGED)
    q_idx, kv_idx, block = drawn(data)
    sizes = {"block": block, "batch": BATCH, "heads": HEADS, "exact": False}
    found = block_table(mask, q_idx=xp.asarray(q_idx), kv_idx=xp.asarray(kv_idx), **sizes).kinds
    expected = true_kinds(mask, q_idx, kv_idx, *block)
    found = np.broadcast_to(np.asarray(found), expected.shape)
    assert np.all((found == expected) | (found == PARTIAL))


@pytest.mark.parametrize("name", POINTS_ONLY)
def test_a_mask_without_ranges_has_no_table_from_them(name):
    with pytest.raises(NoRangesError):
        block_table(POINTS_ONLY[name], q_len=MOST, kv_len=MOST, block=8, batch=BATCH, exact=False)


@pytest.mark.parametrize("name", ["causal", "sliding_window", "local", "document", "jagged", "prefix_lm"])
def test_ranges_are_exact_where_indices_are_in_order(name):
    """So that a table made inside a program is as sparse as one made beforehand."""
    sizes = {"q_len": MOST, "kv_len": MOST, "block": 8, "batch": BATCH}
    exact, ranged = (block_table(RANGED[name], **sizes, exact=each).kinds for each in (True, False))
    assert np.array_equal(exact, ranged)
    assert {NOTHING, PARTIAL} <= {*exact.ravel()}


def test_a_dim_is_one_where_sequences_and_heads_agree():
    sizes = {"q_len": 32, "kv_len": 32, "block": 8, "batch": BATCH, "heads": HEADS}
    names = ("causal", "document", "width of a head", "graph")
    shapes = [block_table((RANGED | POINTS_ONLY)[name], **sizes).kinds.shape[:2] for name in names]
    assert shapes == [(1, 1), (2, 1), (1, 2), (2, 1)]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_lists_name_each_block_once_partial_ones_first(data):
    kinds = data.draw(
        st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 6), st.integers(1, 6)).flatmap(
            lambda shape: st.builds(
                lambda seed: np.random.default_rng(seed).integers(0, 3, shape).astype(np.int8), st.integers(0, 99)
            )
        )
    )
    table = BlockTable(kinds=kinds, q_block=4, kv_block=4, q_len=4 * kinds.shape[2], kv_len=4 * kinds.shape[3])
    for over, of in (("queries", kinds), ("keys", kinds.swapaxes(2, 3))):
        lists = table.lists(over)
        assert [x.dtype for x in lists[:3]] == [np.int32] * 3
        for at in np.ndindex(of.shape[:3]):
            partial, total = lists.partial[at], lists.total[at]
            assert lists.index[at][:partial].tolist() == np.flatnonzero(of[at] == PARTIAL).tolist()
            assert lists.index[at][partial:total].tolist() == np.flatnonzero(of[at] == FULL).tolist()


@pytest.mark.parametrize("block", [(4, 4), (16, 4), (4, 32), (16, 24), (12, 20), (64, 64)])
@pytest.mark.parametrize("length", [48, 43])
def test_a_resized_table_is_certain_and_larger_blocks_are_exact(block, length):
    mask = mods.and_masks(mods.causal(), mods.document(np.arange(length)[None] // 15))
    table = block_table(mask, q_len=length, kv_len=length, block=8)
    found, exact = table.resized(*block).kinds, block_table(mask, q_len=length, kv_len=length, block=block).kinds
    assert found.shape == exact.shape
    assert np.all((found == exact) | (found == PARTIAL))
    if not any(size % 8 for size in block):
        # a last block that is cut is never full
        assert np.array_equal(found == NOTHING, exact == NOTHING)
    assert NOTHING in found or block == (64, 64)


def test_a_reduced_table_is_partial_where_sequences_differ():
    kinds = np.array([[[[0, 1, 2, 0]]], [[[0, 1, 2, 2]]]], np.int8)
    table = BlockTable(kinds=kinds, q_block=8, kv_block=8, q_len=8, kv_len=32)
    assert table.reduced().kinds.tolist() == [[[[0, 1, 2, 1]]]]
    assert table.of(1, 5).kinds.tolist() == [[[[0, 1, 2, 2]]]]


@pytest.mark.parametrize("sizes", [{"q_len": 0}, {"kv_len": 0}, {"block": 0}, {"block": (4, -1)}, {"batch": 0}])
def test_sizes_below_one_are_refused(sizes):
    with pytest.raises(InputError, match=r"=-?\d+ must be at least 1"):
        block_table(mods.causal(), **{"q_len": 8, "kv_len": 8, "block": 4} | sizes)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_pairs_are_counted_one_by_one(data):
    mask = composition(data, RANGED | POINTS_ONLY)
    q_len, kv_len = data.draw(st.tuples(st.integers(1, MOST), st.integers(1, MOST)))
    block = data.draw(st.integers(1, 16))
    counted = counted_table(mask, q_len=q_len, kv_len=kv_len, block=block, batch=BATCH, heads=HEADS)
    at = np.ix_(*map(np.arange, (BATCH, HEADS, q_len, kv_len)))
    pairs = np.broadcast_to(mask(*at), (BATCH, HEADS, q_len, kv_len))
    assert counted.visible_pairs == pytest.approx(pairs.sum() / (BATCH * HEADS))
    assert np.array_equal(counted.points, pairs[0, 0])
    kinds = np.broadcast_to(counted.table.kinds, (BATCH, HEADS, *counted.table.kinds.shape[2:]))
    inside = kinds.repeat(block, 2).repeat(block, 3)[:, :, :q_len, :kv_len] != NOTHING
    assert counted.table.pairs() == pytest.approx(inside.sum() / (BATCH * HEADS))
    assert not (pairs & ~inside).any()


def test_text_of_few_blocks_and_of_many():
    few = block_table(mods.sliding_window(9), q_len=32, kv_len=32, block=8)
    assert few.text().splitlines() == ["░░······", "░░░░····", "··░░░░··", "····░░░░"]
    many = block_table(mods.causal(), q_len=800, kv_len=800, block=8)
    lines = many.text(width=20).splitlines()
    # a mark is 5 blocks of keys, and 10 of queries
    assert lines == ["█" * 2 * n + "░░" + "·" * (18 - 2 * n) for n in range(10)]
    long = block_table(mods.causal(), q_len=8, kv_len=8000, block=8)
    assert long.text(width=40) == "░" + "·" * 39
