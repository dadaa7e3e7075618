import os
import re
import stat
import threading
from pathlib import Path

import pytest

from meshwright.core.errors import InputError
from meshwright.core.files import cache_folder, read_json, read_text, write_text_whole, write_whole
from tests.test_architecture import source_modules


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


def test_a_file_is_on_the_disk_before_it_gets_its_name_and_the_name_after(tmp_path, monkeypatch):
    path, done = tmp_path / "file.txt", []
    fsync, replace = os.fsync, os.replace

    def synced(handle):
        done.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else Path(f"/proc/self/fd/{handle}").read_text())
        fsync(handle)

    monkeypatch.setattr("os.fsync", synced)
    monkeypatch.setattr("os.replace", lambda *names: (done.append("name"), replace(*names)))
    write_text_whole(path, "text")
    assert done == ["text", "name", "folder"]


WRITERS = {
    "core.files": "the function itself",
    "masks.user": "a child's answer in a temporary folder",
    "nn.hf.files": "writes into the part that it is given",
    "profile.run": "the text of a program beside its trace, read at once",
    "serve.offline.bulk": "lines that are added one by one",
    "train.elastic.run": "lines that a leader did not write",
    "train.record.run_folder": "lines that are added one by one",
    "train.data.store": "files that grow, with a journal",
    "verify.running": "a request in a temporary folder",
}


def test_files_are_written_by_the_one_function_that_writes_them_whole():
    """Opens to write, and writes of a path that is no part of `write_whole`, are in these modules alone."""
    found = set()
    for module, path in source_modules().items():
        text = re.sub(r"lambda part: part\.write_\w+|formatter\.write_text", "", path.read_text())
        if re.search(r"\.write_(text|bytes)\(|open\([^)]*\"[rwax]?\+?[wax]b?\+?\"|r\+b|shutil\.copy\w*\(", text):
            found.add(module.removeprefix("meshwright."))
    assert found == set(WRITERS)


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
        ('{"a": 1, "b": {"c": 1, "d": 2, "c": 1}}', r"a\.json has the key 'c' twice in one object\. Mend the file"),
        ('{"a": }', r"a\.json:1:7: broken JSON"),
    ],
)
def test_json_that_is_no_table(tmp_path, text, message):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(InputError, match=message):
        read_json(tmp_path / "a.json", "Name another.")


def test_json_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_json(tmp_path / "a.json", "Name another.") == {"a": 1}
