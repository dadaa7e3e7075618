"""Sources with their targets, and text with spans of noise, as rows of an encoder and a decoder."""

import json

import numpy as np
import pytest

from meshwright.core.errors import InputError
from meshwright.train.data.batches import Batches, open_data
from meshwright.train.data.pairs import PairForm, SpanRows, corrupted, pair_arrays
from meshwright.train.data.sources import Source
from meshwright.train.data.token_store import TokenStore
from meshwright.train.data.tokenizer import save_tokenizer, train_tokenizer
from tests.train.small import settings, write_text

END, START = 0, 9
FORM = PairForm(source_len=6, target_len=4, start_token=START, noise_density=0.15, mean_span=3.0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """One token for each byte, and the end token 0."""
    file = tmp_path_factory.mktemp("bytes") / "tokenizer.json"
    save_tokenizer(train_tokenizer((), vocab_size=257), file)
    return str(file)


def opened(folder, records, form=FORM, **changes):
    file = folder / "pairs.jsonl"
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    given = settings(str(file), held_out=0.0, **changes)
    return open_data(given, vocab_size=300, folder=folder / "tokens", form=form)


def in_order(data, *, num_rows, form=FORM):
    """The arrays of the rows of a source, in the order of its records."""
    (source,) = data.train
    rows = source.rows(form.target_len)
    return pair_arrays([rows.pair(row, (0, row)) for row in range(num_rows)], form)


def test_tokens_of_pairs_are_padded_and_cut_and_the_decoder_reads_them_one_later(tmp_path):
    records = [{"source": [5, 6, 7], "target": [3, 2]}, {"source": [*range(1, 9)], "target": [8, 7, 6, 5, 4]}]
    data = opened(tmp_path, records)
    assert data.is_padded
    assert not data.several_documents
    arrays = in_order(data, num_rows=2)
    assert arrays["encoder_tokens"].tolist() == [[5, 6, 7, 0, 0, 0], [1, 2, 3, 4, 5, 6]]
    assert arrays["encoder_lengths"].tolist() == [3, 6]
    assert arrays["labels"].tolist() == [[3, 2, -1, -1], [8, 7, 6, 5]]
    assert arrays["tokens"].tolist() == [[START, 3, 0, 0], [START, 8, 7, 6]]
    (samples,) = Batches(data.train, batch_seqs=2, seq_len=4, seed=0).samples
    assert samples.rows.summary == "2 pairs in rows of 6 and 4, 75% and 75% filled; 1 sources and 1 targets cut"
    assert [samples.rows.num_labels(row) for row in range(2)] == [2, 4]


def test_texts_of_pairs_and_prompts_with_completions_end_with_the_end_token(tmp_path, tokenizer):
    form = FORM._replace(source_len=4)
    of_pairs = opened(tmp_path, [{"source": "ab", "target": "ba"}], form, tokenizer=tokenizer)
    found = in_order(of_pairs, num_rows=1, form=form)
    source, target = found["encoder_tokens"][0], found["labels"][0]
    assert source[2:].tolist() == [END, 0]
    assert found["encoder_lengths"].tolist() == [3]
    assert target.tolist() == [source[1], source[0], END, -1]
    of_prompts = opened(tmp_path, [{"prompt": "ab", "completion": "ba"}], form, tokenizer=tokenizer)
    for name, array in in_order(of_prompts, num_rows=1, form=form).items():
        np.testing.assert_array_equal(array, found[name])


def test_sources_of_features_are_files(tmp_path, tokenizer, monkeypatch):
    """By their names, as given; a target that begins with the start token has it once."""
    monkeypatch.chdir(tmp_path)
    values = np.random.default_rng(0).normal(size=(2, 3, 12)).astype(np.float32)
    for name, array in (
        ("a.npy", values[0]),
        ("ü.npy", values[1:].astype(np.float64)),
        ("long.npy", values[0].T),
        ("big.npy", values[0].astype(np.float64) * 1e300),
    ):
        np.save(name, array)
    plain = opened(tmp_path, [{"source": "s", "target": "ab"}], tokenizer=tokenizer)
    (start, *_), letters = in_order(plain, num_rows=1)["encoder_tokens"][0], in_order(plain, num_rows=1)["labels"][0]
    form = FORM._replace(features=3, dtype="bfloat16", start_token=int(start))
    records = [{"source": "a.npy", "target": "ab"}, {"source": "ü.npy", "target": "sab"}]
    data = opened(tmp_path, records, form, tokenizer=tokenizer)
    assert not data.is_padded
    arrays = in_order(data, num_rows=2, form=form)
    assert arrays.keys() == {"encoder_features", "encoder_positions", "tokens", "labels", "positions"}
    assert arrays["encoder_features"].dtype.name == "bfloat16"
    np.testing.assert_array_equal(arrays["encoder_features"], values.astype("bfloat16"))
    assert arrays["labels"].tolist() == [letters.tolist()] * 2
    assert arrays["tokens"].tolist() == [[start, *letters[:2], 0]] * 2
    (samples,) = Batches(data.train, batch_seqs=2, seq_len=4, seed=0).samples
    assert samples.rows.summary == "2 pairs in rows of 6 and 4, 100% and 75% filled; 0 sources and 0 targets cut"
    for record, words in (
        (
            {"source": "none.npy", "target": "a"},
            "pairs.jsonl line 1: the source '.*/none.npy' is no file. Give JSON lines",
        ),
        ({"source": "big.npy", "target": "a"}, "pairs.jsonl line 1: big.npy has values that are not finite in float32"),
        ({"source": [1, 2], "target": [3]}, "has no pairs, and the encoder reads features. Give JSON lines"),
        ({"text": "a text" * 50}, "has no pairs"),
        ({"source": "long.npy", "target": "a"}, r"long.npy has features \[12, 3\], but the encoder reads \[3, 12\]"),
        ({"source": "pairs.jsonl", "target": "a"}, "pairs.jsonl is not a NumPy file"),
    ):
        with pytest.raises(InputError, match=words):
            opened(tmp_path, [record], form, tokenizer=tokenizer)
    bad_too = opened(
        tmp_path, [*records, {"source": "big.npy", "target": "a"}], form, tokenizer=tokenizer, skip_bad_records=True
    )
    assert bad_too.skipped_records == 1
    (tmp_path / "a.npy").unlink()
    with pytest.raises(InputError, match=r"a.npy: No such file"):
        in_order(data, num_rows=1, form=form)


def test_noise_is_that_of_t5():
    """Lengths are those of its ``random_spans_helper``; of the parts, text comes first and both alternate."""
    t5 = FORM._replace(source_len=512, target_len=114, sentinel=32099, end_id=1)
    spans = t5.spans_of(t5.text_len)
    assert (spans.tokens, spans.source_len, spans.target_len) == (568, 512, 114)
    shorter = t5._replace(target_len=60)
    assert shorter.spans_of(shorter.text_len).target_len == 60
    text = np.arange(100, 668)
    pair = corrupted(text, t5, (0, 7))
    assert (len(pair.source), len(pair.target), pair.source[-1], pair.target[-1]) == (512, 114, 1, 1)
    sentinels = 32099 - np.arange(spans.spans)
    places = [np.flatnonzero(side >= 10000) for side in pair]
    assert [side[at].tolist() for side, at in zip(pair, places, strict=True)] == [sentinels.tolist()] * 2
    kept, noise = (np.split(side[:-1], at) for side, at in zip(pair, places, strict=True))
    parts = [kept[0], *(x for n, k in zip(noise[1:], kept[1:], strict=True) for x in (n[1:], k[1:]))]
    np.testing.assert_array_equal(np.concatenate(parts), text)
    assert all(len(part) for part in parts[:-1])
    np.testing.assert_array_equal(corrupted(text, t5, (0, 7)).source, pair.source)
    assert not np.array_equal(corrupted(text, t5, (0, 8)).source, pair.source)


def test_text_is_read_with_noise_that_only_seed_and_sample_determine(tmp_path):
    form = FORM._replace(source_len=48, target_len=16)
    data = open_data(settings(write_text(tmp_path)), vocab_size=300, folder=tmp_path / "tokens", form=form)
    made = data.train[0].form
    num_spans = form.spans_of(form.text_len).spans
    assert made.sentinel == 299
    assert max(data.tokenizer.get_vocab().values()) < 300 - num_spans

    def reader(batch_seqs=8):
        return Batches(data.train, batch_seqs=batch_seqs, seq_len=16, seed=3)

    whole = reader().pairs(16)
    assert isinstance(reader().samples[0].rows, SpanRows)
    assert (whole["labels"] >= 0).sum() == reader().num_labels(16)
    assert (whole["encoder_tokens"] == 299).sum() == 8  # the first sentinel is in every row
    parts = [reader(2).pairs(first) for first in range(16, 24, 2)]
    later = reader()
    later.go_on(reader().phase, 16)
    parts_of_mesh = [later.pairs(16, slice(row, row + 4)) for row in (0, 4)]
    for name, array in whole.items():
        np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), array)
        np.testing.assert_array_equal(np.concatenate([part[name] for part in parts_of_mesh]), array)
    epoch = len(reader().samples[0].rows)
    again = reader(1)
    found = {again.find(sample)[1]: again.pairs(sample)["encoder_tokens"] for sample in range(epoch)}
    repeated = {again.find(sample)[1]: again.pairs(sample)["encoder_tokens"] for sample in range(epoch, 2 * epoch)}
    assert any(not np.array_equal(found[row], repeated[row]) for row in found)


def test_a_phase_of_other_lengths_draws_what_is_left_of_the_text():
    """Every token is in at most one row of an epoch."""

    def source(form):
        return Source(TokenStore(np.arange(1000, dtype=np.uint32)), packing=False, name="text", form=form)

    short, long = (FORM._replace(source_len=n, target_len=n, sentinel=2000, end_id=1999) for n in (16, 40))
    first, second = (Batches([source(form)], batch_seqs=1, seq_len=form.target_len, seed=0) for form in (short, long))
    seen = [first.pairs(sample) for sample in range(20)]
    second.go_on(first.phase, 20)
    assert second.phase.first == 20
    seen += [second.pairs(20 + sample) for sample in range(len(second.samples[0].rest))]
    tokens = np.concatenate([a[n][a[n] >= 0] for a in seen for n in ("encoder_tokens", "labels")])
    text = tokens[(tokens < 1000) & (tokens > 0)]
    assert len(text) == len(set(text.tolist())) > 700


def test_what_is_no_pair_says_so(tmp_path, tokenizer):
    with pytest.raises(InputError, match="records without a source"):
        in_order(opened(tmp_path, [{"tokens": [1, 2, 3]}]), num_rows=1)
    with pytest.raises(InputError, match=r"line 1 is no pair .* Give source and target"):
        opened(tmp_path, [{"messages": [{"role": "user", "content": "a"}]}], tokenizer=tokenizer)
    given, form = settings(write_text(tmp_path), tokenizer=tokenizer), FORM._replace(source_len=32, target_len=32)
    with pytest.raises(InputError, match=r"2 spans of noise, and the 257 tokens .* leave 1 .*model.vocab_size=259"):
        open_data(given, vocab_size=258, folder=tmp_path, form=form)
    with pytest.raises(InputError, match="rows of 2 and 4 tokens are too short"):
        FORM._replace(source_len=2).text_len  # noqa: B018
