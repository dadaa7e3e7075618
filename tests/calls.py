"""One call of the command line as a test sees it: exit code, results, messages."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from meshwright.cli import verb
from meshwright.cli.main import run
from meshwright.report.answer import MORE, Answer


@dataclass(frozen=True, kw_only=True)
class Said:
    """What one call left: exit code, standard output (results), standard error (messages), and the verb's answer.

    ``printed(form)`` is the same answer as a call with ``--format`` of that form prints it, worked out once;
    "text" with --notes, --symbols and --all.
    """

    code: int
    out: str
    err: str
    answer: Answer | None
    printed: Callable[..., "Said"]

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

    answers: list[Answer] = []
    emit = verb.emit

    def emit_kept(answer: Answer, form: str, more: Sequence[str] = MORE) -> None:
        answers.append(msgspec.structs.replace(answer, pieces=list(answer.pieces)))
        emit(answers[-1], form, more)

    monkeypatch.setattr(verb, "emit", emit_kept)

    def said(code: int) -> Said:
        out, err = capsys.readouterr()
        answer = answers[-1] if answers else None

        def printed(form: str) -> Said:
            assert answer is not None
            emit(msgspec.structs.replace(answer, pictures={}), form)
            return said(code)

        return Said(code=code, out=out, err=err, answer=answer, printed=printed)

    def call_at(*args: str, width: int = 80) -> Said:
        monkeypatch.setenv("COLUMNS", str(width))
        capsys.readouterr()
        answers.clear()
        return said(run(list(args)))

    return call_at
