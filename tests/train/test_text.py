import pytest

from meshwright.core.errors import InputError
from meshwright.train.text import read_documents


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
    assert read_documents(str(tmp_path)) == ("first", "second", "third")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "is not there"),
        ("empty.txt", b"", "holds no text"),
        ("latin.txt", b"caf\xe9 au lait", "not UTF-8 text .byte 3."),
        ("folder/other.bin", b"\x00", "has no .md, .py, .rst, .txt files"),
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
