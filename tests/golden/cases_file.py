"""The lists of cases under ``cases/``: one line a case, its parts between bars."""

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tests.golden.environment import FOLDER
from tests.golden.files import Golden

TUPLES = ("offload", "slice_axes")
"""Choices that are tuples of words; ``remat`` is one where it holds a comma."""


class Case(NamedTuple):
    """A name and the parts of its line."""

    name: str
    parts: list[str]


def cases(file: str) -> Iterator[Case]:
    """The cases of a file, in order. Names must be different; lines that begin with # say something."""
    seen: set[str] = set()
    for line in (FOLDER / "cases" / file).read_text(encoding="utf-8").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        name, *parts = (part.strip() for part in line.split(" | "))
        if name in seen:
            raise ValueError(f"{file}: two cases are called {name}")
        seen.add(name)
        yield Case(name, parts)


def table(text: str) -> dict[str, Any]:
    """``"fsdp=2 remat=full"`` as a dict; numbers, true and false are read, ``-`` is nothing."""
    pairs = (word.partition("=") for word in text.split() if word != "-")
    return {name: _value(name, value) for name, _, value in pairs}


def _value(name: str, text: str) -> Any:
    if name in TUPLES or (name == "remat" and "," in text):
        return tuple(part for part in text.split(",") if part)
    if text in ("true", "false"):
        return text == "true"
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def each(file: str, make: Callable[[Case], Any]) -> Golden:
    """What ``make`` gives for every case of a file."""
    return {case.name: made(case, make) for case in cases(file)}


def made(case: Case, make: Callable[[Case], Any]) -> Any:
    """What ``make`` gives for a case; the error where it raises, so that the other cases go on."""
    try:
        return make(case)
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        print(f"{case.name}: {type(error).__name__}: {first}", file=sys.stderr)
        return {"failed": f"{type(error).__name__}: {first}"}
