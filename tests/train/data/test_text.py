import gzip
import importlib.util
import json
import sys
import tracemalloc

import pyarrow
import pyarrow.parquet
import pytest

from meshwright.core.errors import CannotRunError, InputError
from meshwright.train.data import text
from meshwright.train.data.text import PIECE_CHARS, in_pieces, open_corpus
from tests.train.small import read_documents

TEXTS = ("naïve\ttext\n", "東京 🚀", '"quoted"\r\nlines', "last")


def json_lines(texts, field="text"):
    return "".join(json.dumps({"id": i, field: t}) + "\n" for i, t in enumerate(texts))


def write_parquet(path, texts, field="text", *, group=3):
    table = pyarrow.table({"id": list(range(len(texts))), field: list(texts)})
    pyarrow.parquet.write_table(table, path, row_group_size=group, compression="none", write_batch_size=16)


def test_the_default_is_real_prose():
    documents = read_documents("pydoc")
    assert len(documents) > 50
    assert sum(map(len, documents)) > 300_000


def test_a_folder_is_read_in_order_without_hidden_or_other_files(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "c.txt").write_text("not read")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.py").write_text("third")
    (tmp_path / "d.jsonl").write_text(json_lines(["fourth", " ", "fifth"]))
    write_parquet(tmp_path / "e.parquet", ["sixth", None, "seventh"])
    assert read_documents(str(tmp_path)) == ("first", "second", "fourth", "fifth", "sixth", "seventh", "third")


def test_records_come_back_whole_from_each_format(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n" + json_lines(TEXTS), encoding="utf-8")
    (tmp_path / "a.JSONL.gz").write_bytes(gzip.compress(json_lines(TEXTS).encode()))
    write_parquet(tmp_path / "a.parquet", TEXTS)
    for name in ("a.jsonl", "a.JSONL.gz", "a.parquet"):
        assert read_documents(str(tmp_path / name)) == TEXTS


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_text(json_lines(TEXTS), encoding="utf-8-sig")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(json_lines(TEXTS).encode("utf-8-sig")))
    (tmp_path / "c.txt").write_text("plain\ufeff", encoding="utf-8-sig")
    assert read_documents(str(tmp_path)) == (*TEXTS, *TEXTS, "plain\ufeff")


def test_a_column_whose_name_is_no_text_is_named(tmp_path):
    write_parquet(tmp_path / "a.parquet", TEXTS, "text")
    data = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(data.replace(b"\x04text", b"\x04\xff\xfext"))
    with pytest.raises(InputError, match=r"a\.parquet is not a Parquet file: .*can't decode byte 0xff"):
        read_documents(str(tmp_path / "a.parquet"))


def test_the_field_may_have_another_name(tmp_path):
    (tmp_path / "a.jsonl").write_text(json_lines(TEXTS, "body"))
    write_parquet(tmp_path / "b.parquet", TEXTS, "body")
    assert read_documents(f"{tmp_path}#body") == TEXTS + TEXTS
    (tmp_path / "c#1.txt").write_text("a path may hold the sign itself")
    assert read_documents(str(tmp_path / "c#1.txt")) == ("a path may hold the sign itself",)


def test_a_long_text_is_cut_after_lines_and_comes_back_whole(tmp_path):
    long = "".join(f"line {i} — 東京\r\n" for i in range(60_000)) + "x" * 3 * PIECE_CHARS
    (tmp_path / "long.txt").write_bytes(long.encode())
    pieces = list(open_corpus(str(tmp_path / "long.txt")).pieces())
    assert "".join(piece.text for piece in pieces) == long.replace("\r\n", "\n")
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert max(len(piece.text) for piece in pieces) <= 2 * PIECE_CHARS
    assert pieces[0].text.endswith("\n")
    assert pieces[-1].bytes_read == len(long.encode())
    assert list(in_pieces([" ", "\n"])) == []


@pytest.mark.parametrize("form", ["txt", "jsonl", "parquet"])
def test_a_large_file_is_never_whole_in_memory(tmp_path, form):
    file, record = tmp_path / f"large.{form}", "lorem ipsum dolor sit amet " * 400 + "\n"
    if form == "parquet":
        # In one group of small pages, of distinct texts, so that no dictionary holds them all as one.
        write_parquet(file, [f"{i}{record}" for i in range(3000)], group=3000)
    else:
        with file.open("w") as handle:
            for i in range(3000):
                handle.write(record if form == "txt" else json.dumps({"text": f"{i}{record}"}) + "\n")
    pool = pyarrow.default_memory_pool()
    before = pool.bytes_allocated()
    tracemalloc.start()
    try:
        chars = most = 0
        for piece in open_corpus(str(file)).pieces():
            chars += len(piece.text)
            most = max(most, pool.bytes_allocated() - before)
        peak = tracemalloc.get_traced_memory()[1] + most
    finally:
        tracemalloc.stop()
    assert chars >= 3000 * len(record) > 30e6
    assert peak < 6e6


def test_a_sample_takes_from_every_file(tmp_path):
    for name, size in (("a.txt", 30_000), ("b.txt", 10_000)):
        (tmp_path / name).write_text((name[0] * 99 + "\n") * (size // 100))
    (tmp_path / "c.jsonl").write_text(json_lines(["c" * 999] * 40))
    found = "".join(open_corpus(str(tmp_path)).sample(8000))
    # Of many small files, too, no more than asked for: a tokenizer is trained on the sample in memory.
    assert 8000 <= len(found) <= 8000 + 3
    sizes = {file.name[0]: file.stat().st_size for file in tmp_path.iterdir()}
    for letter, size in sizes.items():
        assert found.count(letter) == pytest.approx(8000 * size / sum(sizes.values()), rel=0.02)
    assert "".join(open_corpus(str(tmp_path)).sample(10**6)).count("c") == 40 * 999


def test_an_identity_is_another_for_other_texts_names_and_fields(tmp_path, monkeypatch):
    def identity(content, name="a.txt", data=""):
        (tmp_path / "corpus").mkdir(exist_ok=True)
        file = tmp_path / "corpus" / name
        file.write_text(content)
        found = open_corpus(data or str(tmp_path / "corpus")).identity()
        file.unlink()
        return found

    first = identity("one")
    assert identity("one") == first
    others = {identity("two"), identity("one", "b.txt"), identity("one", data=f"{tmp_path / 'corpus'}#body")}
    assert len(others | {first}) == 4
    # Large ones by name, size and time: the same text written again is another.
    monkeypatch.setattr(text, "HASHED_BYTES", 2)
    assert identity("one") != identity("one")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "is not there"),
        ("empty.txt", b"", "holds no text"),
        ("latin.txt", b"caf\xe9 au lait", "not UTF-8 text .byte 3."),
        ("late.txt", b"a" * 300_000 + "—".encode() * 2 + b"\xe9", "not UTF-8 text .byte 300006."),
        ("folder/other.bin", b"\x00", "has no .md, .py, .rst, .txt, .jsonl, .jsonl.gz, .jsonl.zst, .parquet files"),
        ("blank.jsonl", b'{"text": ""}\n\n', "holds no text"),
        ("field.jsonl", b'{"text": "a"}\n{"txet": "b"}', "line 2 has no field 'text'. Did you mean 'txet'.*#FIELD"),
        ("number.jsonl", b'{"text": 3}', "line 1: field 'text' is int, not text"),
        ("broken.jsonl", b'{"text": "a"}\n{"text": ', "line 2 is not a JSON object"),
        ("list.jsonl", b'["text"]', "line 1 is not a JSON object"),
        ("latin.jsonl", b'{"text": "caf\xe9"}', "line 1 is not a JSON object"),
        ("plain.jsonl.gz", b'{"text": "a"}', "plain.jsonl.gz cannot be read"),
        ("short.jsonl.gz", gzip.compress(b'{"text": "a"}', mtime=0)[:-9], "short.jsonl.gz cannot be read"),
        ("text.parquet", b"text", "is not a Parquet file"),
    ],
)
def test_bad_data_gives_one_line(tmp_path, name, content, message):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if content is not None:
        path.write_bytes(content)
    given = path.parent if path.suffix == ".bin" else path
    with pytest.raises(InputError, match=message) as caught:
        read_documents(str(given))
    assert "\n" not in str(caught.value)


def test_a_parquet_file_without_the_column_names_those_it_has(tmp_path):
    write_parquet(tmp_path / "a.parquet", TEXTS, "body")
    with pytest.raises(InputError, match=r"no column 'text'. Known: body, id. Name it: data=FILE#COLUMN"):
        read_documents(str(tmp_path / "a.parquet"))


def test_what_is_not_installed_is_named(tmp_path, monkeypatch):
    write_parquet(tmp_path / "a.parquet", TEXTS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"needs pyarrow: pip install 'meshwright\[parquet\]'"):
        read_documents(str(tmp_path / "a.parquet"))
    if importlib.util.find_spec("compression") is None:
        (tmp_path / "a.jsonl.zst").write_bytes(b"(\xb5/\xfd")
        with pytest.raises(CannotRunError, match=r"needs Python 3.14 or newer for .zst"):
            read_documents(str(tmp_path / "a.jsonl.zst"))


def test_a_record_that_is_too_large_is_not_held(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "RECORD_BYTES", 1000)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n{"text": "' + b"a" * 10_000 + b'"}'))
    with pytest.raises(InputError, match=r"a\.jsonl\.gz line 2 is a record of more than 0 MiB"):
        read_documents(str(tmp_path / "a.jsonl.gz"))


@pytest.mark.parametrize("suffix", ["jsonl", "txt", "parquet"])
def test_bad_records_are_left_out_and_counted(suffix, tmp_path):
    """Where asked for; otherwise the first one ends the reading, with a line that names the option."""
    file = tmp_path / f"data.{suffix}"
    if suffix == "jsonl":
        lines = [b'{"text": "one"}', b'{"text": "b\xffd"}', b"{", b'{"other": 1}', b'{"text": 3}', b'{"text": "two"}']
        file.write_bytes(b"\n".join(lines) + b"\n")
    elif suffix == "txt":
        file.write_bytes(b"one\xff\xfetwo")
    else:
        good = pyarrow.array([b"one", b"b\xffd", b"two"], pyarrow.binary())
        pyarrow.parquet.write_table(
            pyarrow.table({"text": pyarrow.Array.from_buffers(pyarrow.string(), 3, good.buffers())}), file
        )
    with pytest.raises(InputError):
        list(open_corpus(str(file)).pieces())
    corpus = open_corpus(str(file), skip_bad=True)
    assert "".join(piece.text for piece in corpus.pieces()) == "onetwo"
    list(corpus.sample(1000))
    assert len(corpus.bad) == {"jsonl": 4, "txt": 1, "parquet": 1}[suffix]
    assert corpus.identity() != open_corpus(str(file)).identity()


def test_the_rest_of_a_record_that_is_too_long_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "RECORD_BYTES", 20)
    file = tmp_path / "data.jsonl"
    file.write_text(f'{{"text": "a"}}\n{{"text": "{"x" * 100}"}}\n{{"text": "b"}}\n')
    corpus = open_corpus(str(file), skip_bad=True)
    assert [piece.text for piece in corpus.pieces()] == ["a", "b"]
    assert corpus.bad == {f"{file} line 2"}
