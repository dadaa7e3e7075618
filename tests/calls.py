"""One call of the command line as a test sees it: exit code, results, messages."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from meshwright.cli.main import run


@dataclass(frozen=True, kw_only=True)
class Said:
    """What one call left: exit code, standard output (results), standard error (messages)."""

    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """The results with every break and run of spaces as one space."""
        return " ".join(self.out.split())

    def assert_refused(self, code: int, message: str) -> None:
        """One line that says what to change, nothing on standard output, no traceback."""
        assert self.err.startswith("meshwright: ")
        assert message in self.err
        assert self.err.count("\n") == 1
        assert self.out == ""
        assert self.code == code

    @property
    def json(self) -> dict[str, Any]:
        """The one object on standard output."""
        (line,) = self.out.splitlines()
        found = json.loads(line)
        assert isinstance(found, dict)
        return found


@pytest.fixture
def call(capsys, monkeypatch, tmp_path) -> Callable[..., Said]:
    """Runs a verb at a width, in an empty folder, with an empty cache of machine rates."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MESHWRIGHT_DEBUG", raising=False)

    def call_at(*args: str, width: int = 80) -> Said:
        monkeypatch.setenv("COLUMNS", str(width))
        capsys.readouterr()
        code = run(list(args))
        said = capsys.readouterr()
        return Said(code=code, out=said.out, err=said.err)

    return call_at
