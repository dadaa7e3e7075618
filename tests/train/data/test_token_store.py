import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from meshwright.core.digests import write_sums
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.progress import shown_by
from meshwright.train.data import store as data_store
from meshwright.train.data.store import Written, open_store, tokenise
from meshwright.train.data.text import open_corpus
from meshwright.train.data.token_store import TokenStore, checksums, split
from meshwright.train.data.tokenizer import END_ID, TextTokenizer
from tests.train.small import read_documents, store_of

END = 2
some = settings(max_examples=60, deadline=None)
LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=60)


def word_tokenizer():
    """Tells "a" (1) from every other word (0)."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "<eos>": END}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return TextTokenizer(tokenizer, END)


def write_lines(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return open_corpus(str(path))


def open_words(corpus, folder):
    return open_store(corpus, word_tokenizer(), vocab_size=3, folder=folder)


def visible(folder):
    return sorted(path.name for path in folder.iterdir())


def test_each_document_ends_with_its_token_and_the_index_says_where_it_starts(tmp_path):
    store = open_words(write_lines(tmp_path / "x.jsonl", ["a b a", " ", "b", "a a"]), tmp_path / "kept").store
    assert store.read(np.arange(len(store))).tolist() == [1, 0, 1, END, 0, END, 1, 1, END]
    assert store.starts.tolist() == [0, 4, 6, 9]
    assert store.num_documents == 3
    assert isinstance(store.tokens.file, np.memmap)
    assert isinstance(store.starts.base, np.memmap)
    assert store.tokens.dtype == np.uint16


def test_text_is_tokenised_once_and_comes_back_unchanged(tmp_path, monkeypatch):
    corpus, documents = open_corpus("pydoc"), read_documents("pydoc")
    store, tokenizer, end_id, _ = open_store(corpus, None, vocab_size=300, folder=tmp_path)
    text = tokenizer.decode(store.read(np.arange(len(store))).tolist(), skip_special_tokens=False)
    assert text == "".join(f"{document}<|endoftext|>" for document in documents)
    assert end_id == END_ID
    last_of_each = store.read(store.starts[1:].astype(int) - 1)
    assert (last_of_each == END_ID).all()
    assert len(last_of_each) == len(documents)

    monkeypatch.setattr(data_store, "tokenise", lambda *a, **k: pytest.fail("tokenised twice"))
    monkeypatch.setattr(data_store, "train_tokenizer", lambda *a, **k: pytest.fail("trained twice"))
    again = open_store(corpus, None, vocab_size=300, folder=tmp_path)
    np.testing.assert_array_equal(again.store.tokens.file, store.tokens.file)
    assert len(visible(tmp_path)) == 1


def test_other_texts_sizes_and_tokenizers_get_other_stores(tmp_path):
    one, two = (write_lines(tmp_path / f"{name}.jsonl", ["a b", name]) for name in "xy")
    for corpus, size in ((one, 260), (one, 270), (two, 260), (one, 260)):
        open_store(corpus, None, vocab_size=size, folder=tmp_path / "kept")
    open_words(one, tmp_path / "kept")
    assert len(visible(tmp_path / "kept")) == 4


def test_large_vocabularies_take_four_bytes(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 70_000, "<eos>": 0}, "a"))
    found = open_store(
        write_lines(tmp_path / "x.jsonl", ["a"]), TextTokenizer(tokenizer, 0), vocab_size=70_001, folder=tmp_path
    )
    assert found.store.tokens.dtype == np.uint32
    assert found.store.read(np.arange(2)).tolist() == [70_000, 0]


def test_a_text_in_pieces_is_one_document(tmp_path, monkeypatch):
    monkeypatch.setattr("meshwright.train.data.text.PIECE_CHARS", 40)
    (tmp_path / "x.txt").write_text("a b a\n" * 50)
    store = open_words(open_corpus(str(tmp_path / "x.txt")), tmp_path / "kept").store
    assert store.read(np.arange(len(store))).tolist() == [1, 0, 1] * 50 + [END]
    assert store.num_documents == 1


def test_tokenising_says_how_many_bytes_are_read(tmp_path):
    shown = []
    with shown_by(lambda running: shown.extend(running)):
        open_words(write_lines(tmp_path / "x.jsonl", ["a b"] * 3), tmp_path / "kept")
    (work,) = shown
    assert (work.what, work.done, work.total) == ("tokenising, bytes", *[(tmp_path / "x.jsonl").stat().st_size] * 2)


class StopError(Exception):
    pass


@pytest.mark.parametrize("beyond", [0, 7, 100_000])
def test_what_was_stopped_goes_on_where_it_was(tmp_path, monkeypatch, beyond):
    """Also when a killed process has written more than its journal says, here in the middle of documents."""
    monkeypatch.setattr(data_store, "BATCH_CHARS", 30)
    monkeypatch.setattr("meshwright.train.data.text.PIECE_CHARS", 10)
    corpus = write_lines(tmp_path / "x.jsonl", [("a b\n" * (3 * i % 11)) + "a" for i in range(40)])
    expected = open_words(corpus, tmp_path / "at_once").store
    seen = 0

    class Stopping:
        total_bytes = corpus.total_bytes
        bad = None

        def pieces(self):
            for number, piece in enumerate(corpus.pieces()):
                if number == stop:
                    raise StopError
                yield piece

    folder = tmp_path / "part"
    folder.mkdir()
    for stop in (25, 60):
        with pytest.raises(StopError):
            tokenise(Stopping(), word_tokenizer(), folder=folder)
        journal = json.loads((folder / "journal.json").read_bytes())
        assert seen < journal["pieces"] <= stop
        seen = journal["pieces"]
        for name in ("tokens", "starts"):
            with (folder / name).open("ab") as file:
                file.write(b"\xff" * beyond)
    written = tokenise(corpus, word_tokenizer(), folder=folder)
    found = TokenStore.open(folder, dtype="uint16")
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.starts, expected.starts)
    assert (written.tokens, written.documents) == (len(expected), 40)
    assert visible(folder) == ["starts", "tokens"]


def test_a_journal_that_its_files_do_not_reach_is_not_believed(tmp_path):
    (tmp_path / "journal.json").write_text(json.dumps({"tokens": 5, "documents": 1, "pieces": 1, "in_document": False}))
    (tmp_path / "tokens").write_bytes(b"\x01\x00" * 4)
    (tmp_path / "starts").write_bytes(bytes(8))
    corpus = write_lines(tmp_path / "x.jsonl", ["a b", "a"])
    assert tokenise(corpus, word_tokenizer(), folder=tmp_path) == Written(tokens=5, documents=2, pieces=2)
    assert TokenStore.open(tmp_path, dtype="uint16").tokens.file.tolist() == [1, 0, END, 1, END]


BUILD = """
import sys, time
from pathlib import Path
from meshwright.train.data import store as data_store
from meshwright.train.data.text import open_corpus

def batches(pieces, batches=data_store._batches):
    print("making", flush=True)
    for number, batch in enumerate(batches(pieces)):
        yield batch
        if number == int(sys.argv[3]):
            print("pausing", flush=True)
            time.sleep(600)

data_store._batches, data_store.BATCH_CHARS = batches, 2**15
print("ready", flush=True)
input()
found = data_store.open_store(open_corpus(sys.argv[1]), None, vocab_size=300, folder=Path(sys.argv[2]))
print("found", len(found.store), found.store.num_documents, flush=True)
"""


def build(data, folder, pause_after):
    """A process that opens the store and, asked to, stops in the middle for good."""
    command = [sys.executable, "-c", BUILD, str(data), str(folder), str(pause_after)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def let_go(process):
    """Have it ask for the store, once it is ready."""
    assert process.stdout.readline() == "ready\n"
    process.stdin.write("go\n")
    process.stdin.flush()


def test_one_process_makes_the_store_and_a_killed_one_leaves_it_to_the_next(tmp_path, monkeypatch):
    """The first holds the lock when it is killed; of the two that wait, one goes on from its part."""
    folder = tmp_path / "kept"
    corpus = write_lines(tmp_path / "x.jsonl", read_documents("pydoc"))
    first, second = (build(tmp_path / "x.jsonl", folder, pause_after) for pause_after in (3, -1))
    try:
        let_go(first)
        assert [first.stdout.readline() for _ in range(2)] == ["making\n", "pausing\n"]
        let_go(second)
        (journal,) = folder.glob(".*.part/journal.json")
        done = json.loads(journal.read_bytes())["pieces"]
        made = []
        monkeypatch.setattr(data_store, "tokenise", lambda *a, **k: made.append(1) or tokenise(*a, **k))
        with ThreadPoolExecutor(1) as pool:
            third = pool.submit(open_store, corpus, None, vocab_size=300, folder=folder)
            time.sleep(0.3)
            assert not third.done()
            assert all(path.name.startswith(".") for path in folder.iterdir())
            os.kill(first.pid, signal.SIGKILL)
            store = third.result(timeout=60).store
        output, errors = second.communicate(timeout=60)
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()
    assert errors == ""
    assert output.splitlines()[-1] == f"found {len(store)} {store.num_documents}"
    assert len(made) + output.count("making") == 1
    assert 0 < done < store.num_documents

    assert len(visible(folder)) == 1
    open_store(corpus, None, vocab_size=300, folder=tmp_path / "at_once")
    for name in ("tokens", "starts", "store.json", "tokenizer.json"):
        assert next(folder.glob(f"*/{name}")).read_bytes() == next(tmp_path.glob(f"at_once/*/{name}")).read_bytes()


def test_without_locks_the_first_store_stays(tmp_path, monkeypatch):
    corpus = write_lines(tmp_path / "x.jsonl", ["a b"])
    monkeypatch.setattr(data_store.fcntl, "flock", lambda *a: (_ for _ in ()).throw(OSError("no locks here")))
    made = data_store.tokenise

    def slow(*args, **options):
        # Meanwhile another process finishes the same store.
        monkeypatch.setattr(data_store, "tokenise", made)
        open_words(corpus, tmp_path / "kept")
        return made(*args, **options)

    monkeypatch.setattr(data_store, "tokenise", slow)
    assert len(open_words(corpus, tmp_path / "kept").store) == 3
    assert len(visible(tmp_path / "kept")) == 1


def test_bad_text_leaves_nothing_behind(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"text": 3}\n')
    with pytest.raises(InputError, match="field 'text' is int"):
        open_words(open_corpus(str(tmp_path / "x.jsonl")), tmp_path / "kept")
    assert visible(tmp_path / "kept") == []
    with pytest.raises(InputError, match=r"vocab_size=64 is too small.*at least 257"):
        open_store(open_corpus("pydoc"), None, vocab_size=64, folder=tmp_path / "kept")


def test_a_damaged_store_is_named(tmp_path):
    corpus = write_lines(tmp_path / "x.jsonl", ["a b"])
    open_words(corpus, tmp_path)
    (path,) = (path for path in tmp_path.iterdir() if path.is_dir())
    (path / "tokens").write_bytes(b"\x01")
    with pytest.raises(InputError, match=r"is damaged: its files do not fit 3 tokens. Remove it"):
        open_words(corpus, tmp_path)
    (path / "store.json").unlink()
    with pytest.raises(CannotRunError, match=r"store.json is missing .* Remove the folder .*, and it is made again"):
        open_words(corpus, tmp_path)
    (path / "SHA256SUMS").unlink()
    with pytest.raises(CannotRunError, match=r"has no SHA256SUMS\..* Remove the folder .*, and it is made again"):
        open_words(corpus, tmp_path)
    write_sums(path, [path / "starts"])
    with pytest.raises(InputError, match="is not a store of tokens"):
        open_words(corpus, tmp_path)


@pytest.mark.parametrize("name", ["starts", "checksums", "store.json", "tokenizer.json", "SHA256SUMS"])
def test_a_flipped_bit_of_a_store_is_noticed_when_it_is_opened(tmp_path, name):
    corpus = write_lines(tmp_path / "x.jsonl", ["a b", "a"])
    open_words(corpus, tmp_path)
    (path,) = (path for path in tmp_path.iterdir() if path.is_dir())
    data = bytearray((path / name).read_bytes())
    data[len(data) // 2] ^= 4
    (path / name).write_bytes(data)
    with pytest.raises(CannotRunError, match=r"Remove the folder .*, and it is made again"):
        open_words(corpus, tmp_path)


def test_tokens_are_checked_chunk_by_chunk_as_they_are_read(tmp_path):
    tokens = np.arange(100_000, dtype=np.uint16)
    tokens.tofile(tmp_path / "tokens")
    np.array([0, len(tokens)], np.uint64).tofile(tmp_path / "starts")
    checksums(tmp_path / "tokens").tofile(tmp_path / "checksums")
    data = bytearray((tmp_path / "tokens").read_bytes())
    data[-1] ^= 1
    (tmp_path / "tokens").write_bytes(data)
    store = TokenStore.open(tmp_path, dtype="uint16")
    np.testing.assert_array_equal(store.read(np.arange(98_000)), tokens[:98_000])
    with pytest.raises(CannotRunError, match="tokens 98304 to 99999 are not as they were written"):
        store.read(np.arange(97_000, 99_000))


@some
@given(LENGTHS, st.floats(0, 0.99))
def test_held_out_documents_are_whole_and_apart(lengths, share):
    store = store_of(lengths)
    parts = split(store, share)
    tokens = [part.read(np.arange(len(part))).tolist() for part in parts]
    assert sorted(tokens[0] + tokens[1]) == list(range(len(store)))
    assert tokens[0] == sorted(tokens[0])
    assert tokens[0]
    wanted = int(len(store) * share)
    assert wanted / 2 <= len(tokens[1]) <= 2 * wanted
    number = np.repeat(np.arange(len(lengths)), lengths)
    shared = set(number[tokens[0]]) & set(number[tokens[1]])
    # Too few or uneven documents: the end of the tokens, whatever document it is of.
    assert not shared or (len(shared) == 1 and tokens[1] == list(range(len(store) - wanted, len(store))))


def test_held_out_documents_come_from_all_over_the_text():
    _, held_out = split(store_of([10] * 2000), 0.05)
    assert len(held_out.spans) == 64
    assert 0.04 < len(held_out) / 20_000 < 0.06
    places = held_out.read(np.arange(len(held_out))) / 20_000
    counts, _ = np.histogram(places, bins=10, range=(0, 1))
    assert counts.min() > 0.7 * counts.mean()


def test_the_end_of_a_single_document_is_held_out():
    train, held_out = split(store_of([1000]), 0.05)
    assert train.spans == ((0, 950),)
    assert held_out.spans == ((950, 1000),)
    assert train.boundaries(0, 950).tolist() == [950]
    assert split(store_of([1000]), 0.0)[1].num_documents == 0


def test_a_store_with_spans_is_not_split():
    """Its spans are indices of the file, and those of its parts would be indices of the store."""
    with pytest.raises(AssertionError, match="a store with spans is not split"):
        split(store_of([10] * 10).part([(10, 100)]), 0.2)
