"""Digests of files: what is not a file is missing, and a damaged line is none."""

import pytest

from meshwright.core.digests import read_line, require_intact, summed_line
from meshwright.core.errors import CannotRunError


def test_a_name_that_no_file_can_have_is_missing(tmp_path):
    (tmp_path / "SHA256SUMS").write_text(f"{'0' * 64}  a\0b\n")
    with pytest.raises(CannotRunError, match="is missing or cannot be read"):
        require_intact(tmp_path)


def test_lines_of_other_bytes_are_no_records():
    line = summed_line({"step": 1})
    assert read_line(line[:-1]) == {"step": 1}
    for damaged in (line[1:-1], b"\xff" + line[1:-1], b'{"a\xd0": 1}', b"[" * 100_000):
        assert read_line(damaged) is None
