"""Corpora that others have tokenised: written here byte by byte as their programs do."""

import struct

import numpy as np
import pytest

from meshwright.core.errors import InputError
from meshwright.train.data.batches import Batches, open_data
from meshwright.train.data.token_files import open_tokens
from meshwright.train.settings import TrainSettings

DOCUMENTS = [[[5, 6, 7], [8]], [[9]], [[1, 2, 3, 4], [5], [299]]]
"""Documents of sequences, as Megatron has them."""
TOKENS = [token for document in DOCUMENTS for sequence in document for token in sequence]
CODES = {"uint16": 8, "int32": 4, "uint8": 1}


def write_megatron(stem, dtype="uint16", documents=DOCUMENTS):
    sequences = [sequence for document in documents for sequence in document]
    lengths, size = [len(one) for one in sequences], np.dtype(dtype).itemsize
    firsts = np.cumsum([0, *map(len, documents)])
    with open(f"{stem}.idx", "wb") as index:
        index.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, CODES[dtype], len(sequences), len(firsts)))
        index.write(np.array(lengths, "<i4").tobytes())
        index.write((np.cumsum([0, *lengths])[:-1] * size).astype("<i8").tobytes())
        index.write(firsts.astype("<i8").tobytes())
    np.array([token for one in sequences for token in one], dtype).tofile(f"{stem}.bin")
    return stem


def tokens_of(store):
    return store.read(np.arange(len(store))).tolist()


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
@pytest.mark.parametrize("ending", ["", ".bin", ".idx"])
def test_megatrons_pair_says_where_documents_start(dtype, ending, tmp_path):
    write_megatron(tmp_path / "corpus.v1", dtype)
    store = open_tokens(tmp_path / f"corpus.v1{ending}", vocab_size=300)
    assert tokens_of(store) == TOKENS
    assert store.starts.tolist() == [0, 4, 5, 11]
    assert not store.is_records


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32", "int64"])
def test_a_folder_of_arrays_is_one_corpus_in_order_of_names(dtype, tmp_path):
    for name, part in (("b", [3, 4, 5, 6]), ("a", [1, 2]), ("c", [299])):
        np.save(tmp_path / f"{name}.npy", np.array(part, dtype))
    store = open_tokens(tmp_path, vocab_size=300)
    assert tokens_of(store) == [1, 2, 3, 4, 5, 6, 299]
    assert store.starts.tolist() == [0, 2, 6, 7]
    assert store.tokens[-1] == 299


@pytest.mark.parametrize(("head", "dtype"), [((), "<u2"), ((20240520, 1), "<u2"), ((20240801, 7), "<u4")])
def test_bin_files_of_llm_c_and_nanogpt(head, dtype, tmp_path):
    header = np.array([*head, len(TOKENS)] + [0] * (255 - len(head)), "<i4").tobytes() if head else b""
    (tmp_path / "train.bin").write_bytes(header + np.array(TOKENS, dtype).tobytes())
    assert tokens_of(open_tokens(tmp_path / "train.bin", vocab_size=300)) == TOKENS


def test_texts_are_no_tokens(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    assert open_tokens(tmp_path, vocab_size=300) is None
    assert open_tokens(tmp_path / "a.txt", vocab_size=300) is None
    assert open_tokens(tmp_path / "absent", vocab_size=300) is None


def test_the_vocabulary_is_checked_at_once_and_as_tokens_are_read(tmp_path, monkeypatch):
    write_megatron(tmp_path / "corpus")
    with pytest.raises(InputError, match=r"corpus\.bin has the token 299, but the model has vocab_size=299") as caught:
        open_tokens(tmp_path / "corpus", vocab_size=299)
    assert "not a corpus" not in str(caught.value)
    monkeypatch.setattr("meshwright.train.data.token_store.CHECKED", 4)
    store = open_tokens(tmp_path / "corpus", vocab_size=299)
    assert store.read(np.arange(10)).tolist() == TOKENS[:10]
    with pytest.raises(InputError, match="has the token 299"):
        store.read(np.arange(11))


def break_index(path, at, value):
    raw = bytearray(path.read_bytes())
    raw[at] = value
    path.write_bytes(bytes(raw))


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda folder: break_index(folder / "c.idx", 0, 0), "c.idx is not a Megatron index"),
        (lambda folder: break_index(folder / "c.idx", 9, 2), "c.idx is not a Megatron index"),
        (lambda folder: break_index(folder / "c.idx", 17, 6), "with integer tokens"),
        (lambda folder: (folder / "c.idx").write_bytes((folder / "c.idx").read_bytes()[:60]), "c.idx is cut short"),
        (
            lambda folder: (folder / "c.bin").write_bytes((folder / "c.bin").read_bytes()[:8]),
            "does not hold the sequences",
        ),
        (lambda folder: break_index(folder / "c.idx", 34 + 6 * 4, 2), "does not hold the sequences that c.idx lists"),
        (lambda folder: (folder / "c.bin").unlink(), "No such file"),
    ],
)
def test_damaged_pairs_are_refused(break_it, said, tmp_path):
    write_megatron(tmp_path / "c")
    break_it(tmp_path)
    with pytest.raises(InputError, match=said):
        open_tokens(tmp_path / "c", vocab_size=300)


@pytest.mark.parametrize(
    ("name", "raw", "said"),
    [
        ("a.npy", np.zeros((2, 2), int), r"has int64\[2, 2\], not a 1-D array of integers"),
        ("a.npy", np.zeros(4), r"has float64\[4\]"),
        ("a.bin", np.array([20240520, 1, 9, *[0] * 260], "<i4"), "does not have the 9 tokens that its header says"),
    ],
)
def test_files_that_are_no_row_of_tokens_are_refused(name, raw, said, tmp_path):
    np.save(tmp_path / name, raw) if name.endswith("npy") else raw.tofile(tmp_path / name)
    with pytest.raises(InputError, match=said):
        open_tokens(tmp_path, vocab_size=300)


def test_a_header_of_numpy_that_cannot_be_read_is_named(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(4, int))
    data = (tmp_path / "a.npy").read_bytes()
    for damaged in (
        data.replace(b"(4,), } ", b"(%d,), }" % 9),
        data.replace(b"(4,), }" + b" " * 30, b"(%d,), }" % 10**30),
    ):
        (tmp_path / "a.npy").write_bytes(damaged)
        with pytest.raises(InputError, match=r"is not a corpus of tokens: a\.npy is damaged"):
            open_tokens(tmp_path, vocab_size=300)


def test_tokens_need_no_tokenizer_and_have_the_rows_of_their_documents(tmp_path):
    write_megatron(tmp_path / "corpus")
    data = open_data(TrainSettings(data=str(tmp_path / "corpus"), held_out=0.0), vocab_size=300, folder=tmp_path)
    assert data.tokenizer is None
    batches = Batches(data.train, batch_seqs=1, seq_len=6, seed=0)
    row = batches.samples[0].rows.read(0, np.arange(6))
    assert row.tokens.tolist() == TOKENS[:6]
    assert row.labels.tolist() == [6, 7, 8, -1, -1, 2]
    assert row.documents.tolist() == [0, 0, 0, 0, 1, 2]
