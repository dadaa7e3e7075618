"""The worked answers, how one is compared, and which functions of the package an answer calls."""

import functools
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

DATA = Path(__file__).parent / "data" / "worked_answers.jsonl"
PACKAGE = "meshwright."

TOPICS = (
    "roofline",
    "hardware",
    "sharding",
    "collectives",
    "transformer",
    "flops",
    "training",
    "llama-training",
    "cluster",
    "memory",
    "gpu",
    "fault-tolerance",
    "pipeline",
    "inference",
    "llama-serving",
)

Inputs = Mapping[str, Any]
Answer = Callable[[Inputs], Any]
Answers = dict[str, Answer]
"""Id of a worked answer -> what the package gives for its inputs."""


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worked answer of a text. ``expected`` is the right value; ``note`` says where the text printed another."""

    id: str
    source: str
    topic: str
    question: str
    inputs: dict[str, Any]
    quantity: str
    expected: float | int | str | list[Any]
    unit: str
    rel_tol: float
    note: str


class Called(msgspec.Struct, frozen=True, order=True):
    """A function of the package that an answer calls itself, not one that is called inside the package."""

    module: str
    name: str


@functools.cache
def rows() -> tuple[Row, ...]:
    """Every row of the file, in its order."""
    return tuple(msgspec.convert(json.loads(line), Row) for line in DATA.read_text(encoding="utf-8").splitlines())


def row(identity: str) -> Row:
    """The row of that id."""
    return next(found for found in rows() if found.id == identity)


def agrees(value: Any, found: Row) -> bool:
    """Whether a value is the expected one within the row's own tolerance; 0 means equal, as for lists and texts."""
    if isinstance(found.expected, str | list):
        return bool((list(value) if isinstance(value, tuple) else value) == found.expected)
    return bool(abs(value - found.expected) <= found.rel_tol * abs(found.expected))


def check(identity: str, answer: Answer) -> None:
    """Assert that the answer gives what the row expects, and say both when not."""
    found = row(identity)
    value = answer(found.inputs)
    assert agrees(value, found), f"{identity}: {value} instead of {found.expected} within {found.rel_tol}"


def called(answer: Answer, inputs: Inputs) -> set[Called]:
    """The package's functions that the answer calls from outside of it."""
    found: set[Called] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        module, caller = frame.f_globals.get("__name__", ""), frame.f_back
        outside = caller is None or not caller.f_globals.get("__name__", "").startswith(PACKAGE)
        if event == "call" and module.startswith(PACKAGE) and outside:
            found.add(Called(module, frame.f_code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        answer(inputs)
    finally:
        sys.setprofile(before)
    return found
