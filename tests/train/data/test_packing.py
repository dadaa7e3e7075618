import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.train.data.rows import NO_LABEL, Rows
from meshwright.train.data.token_store import TokenStore, split
from tests.train.small import store_of

some = settings(max_examples=60, deadline=None)
LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=30)
SEQ_LEN = st.integers(1, 20)


def document_numbers(lengths):
    """Which document each token is of, worked out the long way."""
    return [number for number, length in enumerate(lengths) for _ in range(length)]


def all_rows(rows):
    return [rows.read(number, np.arange(rows.seq_len)) for number in range(len(rows))]


@some
@given(LENGTHS, SEQ_LEN)
def test_packing_loses_and_repeats_no_token(lengths, seq_len):
    store = store_of(lengths)
    rows = Rows(store, seq_len)
    found = np.concatenate([np.empty(0, np.int32), *(row.tokens for row in all_rows(rows))])[: len(store)]
    np.testing.assert_array_equal(found, np.arange(len(found)))
    # Only a last row without any label is left out, or a text that does not fill one row.
    left = np.arange(len(found), len(store))
    assert len(left) < seq_len
    if len(left) and len(rows):
        documents = document_numbers(lengths)
        assert all(i + 1 == len(store) or documents[i] != documents[i + 1] for i in left)


@some
@given(LENGTHS, SEQ_LEN)
def test_each_token_predicts_the_next_of_its_document_and_the_last_nothing(lengths, seq_len):
    documents, rows = document_numbers(lengths), Rows(store_of(lengths), seq_len)
    for number, row in enumerate(all_rows(rows)):
        for position, label in enumerate(row.labels):
            place = number * seq_len + position
            goes_on = place + 1 < len(documents) and documents[place + 1] == documents[place]
            assert label == (place + 1 if goes_on else NO_LABEL)
        assert rows.num_labels(number) == np.count_nonzero(row.labels != NO_LABEL)


@some
@given(LENGTHS, SEQ_LEN)
def test_what_sees_each_other_is_of_one_document(lengths, seq_len):
    documents = document_numbers(lengths)
    for number, row in enumerate(all_rows(Rows(store_of(lengths), seq_len))):
        real = [documents[i] for i in range(number * seq_len, min((number + 1) * seq_len, len(documents)))]
        # Padding sees only padding.
        real += [-1] * (seq_len - len(real))
        same = np.equal.outer(row.documents, row.documents)
        np.testing.assert_array_equal(same, np.equal.outer(real, real))
        np.testing.assert_array_equal(np.unique(row.documents), np.arange(row.documents.max() + 1))
        assert row.documents[0] == 0
        # A code of a position is one more than the one before it, and 0 where a document begins or goes on. Padding
        # counts on: it must come after all else where attention goes by positions alone.
        begins = (np.diff(row.documents, prepend=-1) != 0) & (np.array(real) >= 0)
        assert (row.positions[begins] == 0).all()
        assert (np.diff(row.positions)[~begins[1:]] == 1).all()


@some
@given(LENGTHS, SEQ_LEN, st.data())
def test_any_positions_in_any_order_are_those_of_the_row(lengths, seq_len, data):
    for packing in (True, False):
        rows = Rows(store_of(lengths), seq_len, packing=packing)
        chosen = np.array(data.draw(st.lists(st.integers(0, seq_len - 1), max_size=9)), np.int64)
        for number, whole in enumerate(all_rows(rows)):
            for found, expected in zip(rows.read(number, chosen), whole, strict=True):
                assert found.dtype == np.int32
                np.testing.assert_array_equal(found, expected[chosen])


@some
@given(LENGTHS, st.floats(0, 0.95), SEQ_LEN)
def test_packing_of_a_part_is_that_of_its_own_documents(lengths, share, seq_len):
    """Spans of a store count as one run: the rows are those of a store that holds only them."""
    whole = store_of(lengths)
    for part in split(whole, share):
        kept = np.concatenate([np.empty(0, int), *(np.arange(*span) for span in part.spans)])
        documents = np.array(document_numbers(lengths), int)[kept]
        breaks = np.flatnonzero((np.diff(documents) != 0) | (np.diff(kept) != 1)) + 1
        starts = np.unique([0, *breaks, len(kept)]).astype(np.uint64)
        copy = TokenStore(kept.astype(np.uint32), starts if len(kept) else np.array([0], np.uint64))
        assert part.num_documents == copy.num_documents
        for found, expected in zip(all_rows(Rows(part, seq_len)), all_rows(Rows(copy, seq_len)), strict=True):
            np.testing.assert_array_equal(found, expected)


def test_windows_are_blind_to_documents():
    rows = Rows(store_of([3, 4, 6]), 4, packing=False)
    assert len(rows) == 3
    first, second, third = all_rows(rows)
    np.testing.assert_array_equal(second.tokens, [4, 5, 6, 7])
    np.testing.assert_array_equal(second.labels, [5, 6, 7, 8])
    np.testing.assert_array_equal(third.labels, [9, 10, 11, 12])
    np.testing.assert_array_equal(first.positions, [0, 1, 2, 3])
    assert not first.documents.any()
    assert rows.num_labels(0) == 4
    # The last window needs a label after it.
    assert len(Rows(store_of([12]), 4, packing=False)) == 2
    assert len(Rows(store_of([4]), 4, packing=False)) == 0


@pytest.mark.parametrize(
    ("lengths", "count", "last"),
    [
        ([8], 2, [3]),  # fills its rows
        ([9], 2, [4]),  # the end-of-text token alone would be a row without a label
        ([10], 3, [1]),
        ([8, 1, 1], 2, [3]),
        ([8, 1, 2], 3, [1]),
        ([3], 0, []),
    ],
)
def test_the_last_row_is_padded_where_it_has_a_label(lengths, count, last):
    rows = Rows(store_of(lengths), 4)
    assert len(rows) == count
    assert [rows.num_labels(len(rows) - 1)] == last if count else last == []
