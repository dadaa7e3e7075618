"""Shares of several sources, and phases of a run: no sample twice, none left out."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.errors import InputError
from meshwright.train.data.batches import Batches, open_data
from meshwright.train.data.rows import fill_rows
from meshwright.train.data.sources import Draw, Samples, Source, SourcePattern
from meshwright.train.settings import PYDOC, TrainSettings, data_sources
from tests.train.small import store_of, write_text

some = settings(max_examples=50, deadline=None)
LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=30)


def tokens_of(rows, number):
    """The tokens of a row that are not padding, in order; of a record all, also those beyond the cut."""
    return [token for span in rows.spans(number) for token in rows.store.read(np.arange(*span)).tolist()]


@some
@given(st.lists(st.one_of(st.integers(1, 9), st.floats(0.01, 1)), min_size=1, max_size=4), st.integers(0, 3000))
def test_each_source_has_its_share_at_even_distances(shares, samples):
    mixture = SourcePattern(shares)
    found = [mixture.find(number) for number in range(samples)]
    for source, share in enumerate(shares):
        own = [number for one, number in found if one == source]
        assert own == list(range(len(own)))
        assert mixture.drawn(samples)[source] == len(own)
        # Of any number of samples, within one and the rounding of a pattern of a thousand.
        assert abs(len(own) - samples * share / sum(shares)) <= 1 + len(shares) * (0.5 + samples / 1000)


@some
@given(
    LENGTHS,
    st.booleans(),
    st.booleans(),
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 3), st.floats(0, 1)), min_size=1, max_size=4),
)
def test_phases_of_other_lengths_repeat_and_skip_no_token_of_an_epoch(lengths, records, packing, phases):
    """Phases that together stay within one epoch: what they drew, and what they left, are all tokens, each once."""
    store, drawn, seen = store_of(lengths, records=records), [], []
    for seq_len, seed, share in phases:
        draw = Draw(seq_len=seq_len, packing=packing, seed=seed)
        samples = Samples(Source(store), draw, drawn)
        first = not drawn or not len(samples.rest)
        count = int(share * (len(samples.rows) if first else len(samples.rest)))
        if drawn and first:
            break
        rows = [samples.find(number) for number in range(count)]
        seen += [token for found, number in rows for token in tokens_of(found, number)]
        drawn.append(Draw(seq_len=seq_len, packing=packing, seed=seed, samples=count))
        left = samples.left(count)
        if not left:
            break
        rest = [token for span in left for token in store.tokens[slice(*span)].tolist()]
        signed = store.tokens.tolist()
        assert sorted(seen + rest) == sorted(signed)
        assert samples.epochs(count) <= 1


def test_after_what_was_left_whole_epochs_follow():
    store = store_of([7] * 12)
    drawn = [Draw(seq_len=4, packing=True, seed=0, samples=30)]  # an epoch of 21 rows, and 9 rows
    samples = Samples(Source(store), Draw(seq_len=12, packing=True, seed=1), drawn)
    assert len(samples.rest) == 4
    before = Samples(Source(store), drawn[0])
    nine = {token for i in range(21, 30) for token in tokens_of(*before.find(i))}
    four = {token for i in range(4) for token in tokens_of(*samples.find(i))}
    assert four == set(range(84)) - nine
    assert {samples.find(i)[0] for i in range(4, 11)} == {samples.rows}
    assert {token for i in range(4, 11) for token in tokens_of(*samples.find(i))} == set(range(84))
    assert [samples.epochs(i) for i in (0, 2, 4, 11)] == pytest.approx([30 / 21, 30 / 21 + 12 / 42, 2, 3])


@some
@given(st.lists(st.integers(1, 20), max_size=40), st.integers(20, 40))
def test_records_fill_rows_and_each_is_in_one(sizes, seq_len):
    sizes = np.array(sizes, int)
    rows = fill_rows(sizes, np.arange(len(sizes)), seq_len)
    assert sorted(number for row in rows for number in row) == list(range(len(sizes)))
    used = sorted(int(sizes[row].sum()) for row in rows)
    assert all(one <= seq_len for one in used)
    # Best fit leaves no two rows that would fit into one.
    assert len(used) < 2 or used[0] + used[1] > seq_len


def batches(shares, *, seq_len=8, seed=0, sizes=(11, 40), records=True):
    stores = [store_of([6, 3, 9] * size, records=records) for size in sizes]
    named = zip(stores, "ab", shares, strict=True)
    return Batches(
        [Source(store, True, name, share) for store, name, share in named], batch_seqs=4, seq_len=seq_len, seed=seed
    )


def test_batches_mix_sources_and_count_their_epochs():
    one = batches((3, 1))
    found = [one.samples.index(next(s for s in one.samples if s.rows is rows)) for rows, _ in map(one.find, range(400))]
    assert np.bincount(found).tolist() == [300, 100]
    expected = {"a": 300 / len(one.samples[0].rows), "b": 100 / len(one.samples[1].rows)}
    assert one.epochs(400) == pytest.approx(expected)
    again = batches((3, 1))
    np.testing.assert_array_equal(again.rows(36)["tokens"], one.rows(36)["tokens"])


def test_a_run_goes_on_in_its_phase_and_begins_another_where_the_draw_changes():
    first = batches((3, 1))
    same, other = batches((3, 1)), batches((1, 1), seq_len=16)
    same.go_on(first.phase, 20)
    assert same.phase == first.phase
    other.go_on(first.phase, 20)
    assert other.phase.first == 20
    assert {name: [one.samples for one in drawn] for name, drawn in other.phase.drawn.items()} == {"a": [15], "b": [5]}
    assert other.epochs(20) == pytest.approx(first.epochs(20))
    # The second phase goes on in itself, and a third knows both.
    again = batches((1, 1), seq_len=16)
    again.go_on(other.phase, 28)
    np.testing.assert_array_equal(again.rows(28)["tokens"], other.rows(28)["tokens"])
    third = batches((1, 1), seq_len=12)
    third.go_on(again.phase, 28)
    assert [one.samples for one in third.phase.drawn["a"]] == [15, 4]
    with pytest.raises(InputError, match="the run draws from 198 tokens of 'a', and now they are 180"):
        batches((1, 1), sizes=(10, 40)).go_on(first.phase, 20)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (PYDOC, {PYDOC: 1}),
        ("a.jsonl:0.7, b.jsonl#body:0.3", {"a.jsonl": 0.7, "b.jsonl#body": 0.3}),
        ("a.jsonl,b", {"a.jsonl": 1, "b": 1}),
        ("a:b.jsonl:2", {"a:b.jsonl": 2}),
        ("a:b.jsonl", {"a:b.jsonl": 1}),
    ],
)
def test_sources_are_named_with_their_shares(data, expected):
    assert data_sources(data) == expected


@pytest.mark.parametrize("data", ["a:0", "a:-1", "a:nan", "a:1,a:2", "a:inf"])
def test_a_wrong_share_is_refused(data):
    with pytest.raises(InputError, match=r"train\.data .* names a source twice or with a share that is not above 0"):
        data_sources(data)


def test_several_texts_have_one_tokenizer(tmp_path):
    text = write_text(tmp_path)
    one = open_data(TrainSettings(data=text), vocab_size=300, folder=tmp_path / "kept")
    data = open_data(TrainSettings(data=f"{text}:1,{PYDOC}:3"), vocab_size=300, folder=tmp_path / "kept")
    assert [(source.name, source.share) for source in data.train] == [(text, 1), (PYDOC, 3)]
    assert len(data.train[0].store) == len(one.train[0].store)
    assert data.tokenizer.to_str() == one.tokenizer.to_str()
