from pathlib import Path

import pytest

from meshwright.core.files import cache_folder, write_text_whole, write_whole


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
