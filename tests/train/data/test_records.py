"""Records of tokens with what a mask reads of them: rows, labels, and what is wrong with a record."""

import json

import numpy as np
import pytest

from meshwright.core.errors import InputError
from meshwright.masks.names import mask_named
from meshwright.train.data.batches import Batches, open_data
from meshwright.train.settings import TrainSettings
from tests.train.data.chats import PLAIN, TEMPLATES, write_records, write_tokenizer

VOCAB, SEQ_LEN = 300, 8
TREE = {"tokens": [10, 11, 12, 13, 14], "parents": [-1, 0, 1, 0, 3]}
"""10 has two branches, 11 12 and 13 14."""
IMAGES = {"tokens": [20, 21, 22, 23, 24, 25], "spans": [[1, 3], [4, 6]]}


def rows_of(tmp_path, mask, records, **changes):
    """All rows with what the mask reads, sorted by their first token."""
    given = {"held_out": 0.0, "data": write_records(tmp_path / "data.jsonl", records), **changes}
    seq_len = given.pop("seq_len", SEQ_LEN)
    rule = mask_named(mask)
    data = open_data(TrainSettings(**given), vocab_size=VOCAB, folder=tmp_path, mask=rule)
    number = len(data.train[0].rows(seq_len))
    rows = Batches(data.train, batch_seqs=number, seq_len=seq_len, seed=0).rows(0, data=rule.data)
    order = np.argsort(rows["tokens"][:, 0], kind="stable")
    return {name: array[order].tolist() for name, array in rows.items()}


def test_a_prefix_has_a_row_of_its_own_and_no_labels(tmp_path):
    records = [{"tokens": [1, 2, 3, 4, 5], "prefix": 3}, {"tokens": [6, 7], "prefix": 0}]
    rows = rows_of(tmp_path, "prefix_lm", records)
    assert rows["tokens"] == [[1, 2, 3, 4, 5, 0, 0, 0], [6, 7, 0, 0, 0, 0, 0, 0]]
    assert rows["labels"] == [[-1, -1, 4, 5, -1, -1, -1, -1], [7, *[-1] * 7]]
    assert rows["prefix"] == [3, 0]
    assert rows["documents"] == [[0] * 5 + [1] * 3, [0] * 2 + [1] * 6]


def test_a_prompt_is_the_prefix_of_its_completion(tmp_path):
    tokenizer = str(write_tokenizer(tmp_path / "llama", TEMPLATES["llama"]))
    rows = rows_of(tmp_path, "prefix_lm", PLAIN, tokenizer=tokenizer, seq_len=64)
    assert len(rows["prefix"]) == len(PLAIN)
    for labels, prefix in zip(rows["labels"], rows["prefix"], strict=True):
        assert prefix > 1
        assert next(at for at, label in enumerate(labels) if label >= 0) == prefix - 1
    with pytest.raises(InputError, match="tokens and prefix, or a prompt and a completion"):
        rows_of(tmp_path, "prefix_lm", PLAIN, tokenizer=tokenizer, loss_on="all")


def test_tokens_of_images_are_seen_by_all_of_them_and_not_predicted(tmp_path):
    rows = rows_of(tmp_path, "transfusion", [IMAGES, {"tokens": [1, 2], "spans": []}])
    assert rows["tokens"] == [[20, 21, 22, 23, 24, 25, 1, 2]]
    assert rows["spans"] == [[0, 1, 1, 0, 2, 2, 0, 0]]
    assert rows["labels"] == [[21, -1, 23, 24, -1, -1, 2, -1]]
    assert rows["documents"] == [[0] * 6 + [1] * 2]


def test_a_cut_record_keeps_what_its_mask_reads(tmp_path):
    rows = rows_of(tmp_path, "transfusion", [IMAGES], seq_len=5)
    assert rows["spans"] == [[0, 1, 1, 0, 2]]
    assert rows_of(tmp_path, "prefix_lm", [{"tokens": [1, 2, 3, 4], "prefix": 2}], seq_len=3)["prefix"] == [2]


def test_branches_of_a_tree_see_their_ancestors_and_the_first_alone_is_predicted(tmp_path):
    rows = rows_of(tmp_path, "tree", [TREE, {"tokens": [1, 2], "parents": [-1, 0]}])
    assert rows["labels"] == [[11, 12, -1, 14, -1, 2, -1, -1]]
    arrays = {name: np.array(rows[name]) for name in ("enter", "leave")}
    at, found = np.arange(5), mask_named("tree").make(*arrays.values())
    seen = {0: [0], 1: [0, 1], 2: [0, 1, 2], 3: [0, 3], 4: [0, 3, 4]}
    assert {q: np.flatnonzero(found(0, 0, q, at)).tolist() for q in range(5)} == seen


def test_global_tokens_and_lengths(tmp_path):
    record = {"tokens": [1, 2, 3], "is_global": [1, 0, 0]}
    rows = rows_of(tmp_path, "causal & global_sliding(2) & jagged", [record, record])
    assert (rows["is_global"], rows["lengths"]) == ([[1, 0, 0, 1, 0, 0, 0, 0]], [6])
    assert rows["labels"] == [[2, 3, -1, 2, 3, -1, -1, -1]]


def test_parquet_has_the_same_fields(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([IMAGES]), tmp_path / "data.parquet")
    rule = mask_named("transfusion")
    given = TrainSettings(data=str(tmp_path / "data.parquet"), held_out=0.0)
    data = open_data(given, vocab_size=VOCAB, folder=tmp_path, mask=rule)
    assert data.train[0].store.columns["spans"].tolist() == [0, 1, 1, 0, 2, 2]


@pytest.mark.parametrize(
    ("mask", "record", "said"),
    [
        ("prefix_lm", {"tokens": [1, 2]}, "line 2 has no prefix, which the mask of the model reads. Add it"),
        ("prefix_lm", {"tokens": [1, 2], "prefix": 3}, "line 2: prefix is 3, of 2 tokens. Use 0 to 2"),
        ("prefix_lm", {"tokens": [1, 300], "prefix": 1}, "line 2 has the token 300. Give tokens from 0 to 299"),
        ("prefix_lm", {"tokens": [], "prefix": 0}, "line 2 has no tokens. Give tokens"),
        ("prefix_lm", {"tokens": [1, "2"], "prefix": 1}, r"line 2: expected `int`, got `str` - at `\$.tokens\[1\]`"),
        ("tree", {"tokens": [1, 2], "parents": [-1]}, "line 2 has 2 tokens and 1 of parents. Give one for each"),
        ("tree", {"tokens": [1, 2], "parents": [-1, 1]}, "line 2: token 1 has the parent 1. Give an earlier one"),
        ("tree", {"tokens": [1, 2], "parents": [-2, 0]}, "line 2: token 0 has the parent -2"),
        ("causal & global_sliding(2)", {"tokens": [1], "is_global": [2]}, r"invalid enum value 2 - at `\$.is_global"),
        ("transfusion", {"tokens": [1, 2], "spans": [[0, 3]]}, r"line 2: span \[0, 3\) is empty, overlaps another or"),
        ("transfusion", {"tokens": [1, 2], "spans": [[1, 1]]}, r"line 2: span \[1, 1\) is empty"),
        ("transfusion", {"tokens": [1, 2, 3], "spans": [[0, 2], [1, 3]]}, r"line 2: span \[1, 3\) is empty, overlaps"),
    ],
)
def test_what_is_wrong_with_a_record_is_said_in_a_line(mask, record, said, tmp_path):
    good = {"tokens": [1, 2, 3], "prefix": 1, "parents": [-1, 0, 1], "spans": [[0, 1]], "is_global": [1, 0, 0]}
    with pytest.raises(InputError, match=said) as caught:
        rows_of(tmp_path, mask, [good, record])
    assert "\n" not in str(caught.value)
    data = write_records(tmp_path / "data.jsonl", [good, record])
    given = TrainSettings(data=data, held_out=0.0, skip_bad_records=True)
    found = open_data(given, vocab_size=VOCAB, folder=tmp_path, mask=mask_named(mask))
    assert (found.skipped_records, len(found.train[0].store)) == (1, 3)


def test_data_without_what_a_mask_reads_is_named(tmp_path):
    (tmp_path / "text.txt").write_text("some words " * 40)
    given = TrainSettings(data=str(tmp_path / "text.txt"))
    with pytest.raises(InputError, match=r"reads parents of each record, and data '.*text\.txt' has none"):
        open_data(given, vocab_size=VOCAB, folder=tmp_path, mask=mask_named("tree"))


def test_records_of_tokens_need_no_mask(tmp_path):
    (tmp_path / "data.jsonl").write_text(json.dumps(TREE) + "\n")
    given = TrainSettings(data=str(tmp_path / "data.jsonl"), held_out=0.0)
    data = open_data(given, vocab_size=VOCAB, folder=tmp_path)
    rows = Batches(data.train, batch_seqs=1, seq_len=6, seed=0).rows(0)
    assert rows["labels"].tolist() == [[11, 12, 13, 14, -1, -1]]
