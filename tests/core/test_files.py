import os
import threading
from pathlib import Path

import pytest

from meshwright.core.errors import InputError
from meshwright.core.files import cache_folder, read_json, read_text, write_text_whole, write_whole


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("MESHWRIGHT_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "meshwright"


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "file.txt"
    write_text_whole(path, "old")

    def fail(part: Path) -> None:
        part.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_whole(path, fail)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_device_a_pipe_and_a_link_stay_what_they_are(tmp_path):
    before = os.stat("/dev/null")
    write_text_whole(Path("/dev/null"), "text")
    assert os.stat("/dev/null").st_rdev == before.st_rdev
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_text_whole(pipe, "text")
    reader.join(10)
    assert (read, pipe.is_fifo()) == (["text"], True)
    link, target = tmp_path / "link.txt", tmp_path / "folder" / "target.txt"
    link.symlink_to(target)
    write_text_whole(link, "text")
    assert (link.is_symlink(), target.read_text()) == (True, "text")


@pytest.mark.parametrize("name", ["a" * 300, "a\0b"])
def test_names_that_no_file_can_have(tmp_path, name):
    with pytest.raises(InputError, match="cannot be written"):
        write_text_whole(tmp_path / name, "text")
    with pytest.raises(InputError, match="cannot be read"):
        read_text(tmp_path / name, "Name another.")


def test_a_file_without_end_is_not_read(tmp_path):
    with pytest.raises(InputError, match=r"/dev/zero is larger than the 1 MiB that are read\. Name another"):
        read_text(Path("/dev/zero"), "Name another.", most=2**20)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000 + "]" * 100_000, "is nested too deeply"),
        (f'{{"a": {"9" * 5000}}}', "a number of thousands of digits"),
        ('{"a": "\\ud800"}', "half of a surrogate pair"),
        ("[1]", "holds no JSON object"),
        ('{"a": }', r"a\.json:1:7: broken JSON"),
    ],
)
def test_json_that_is_no_table(tmp_path, text, message):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(InputError, match=message):
        read_json(tmp_path / "a.json", "Name another.")
