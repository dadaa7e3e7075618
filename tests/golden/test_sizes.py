"""Every golden command as text at 80 columns: an answer is one screen, and each question beside it one block."""

import shlex

import pytest

from tests.golden import product
from tests.golden.cases_file import cases
from tests.golden.environment import empty_folder

SCREEN, BLOCK = 40, 30
QUESTIONS = (
    "--tokens",
    "--why-not",
    "--what-if",
    "--recipe",
    "--pareto",
    "--breakdown",
    "--years",
    "--tricks",
    "--contexts",
    "--step",
)
"""Options that ask one more question."""
LISTS = ("--all", "--table", "--years")
"""Options that list everything."""


def most_lines(words: list[str]) -> float:
    return float("inf") if set(LISTS) & set(words) else SCREEN + BLOCK * sum(word in QUESTIONS for word in words)


@pytest.mark.slow  # what 173 commands print: minutes
def test_answers_are_one_screen_without_escape_codes(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    too_long = {}
    with empty_folder():
        for case in cases("commands.txt"):
            words = shlex.split(case.parts[0])
            said = product.call(words)
            assert "\x1b" not in said.out + said.err
            lines = said.out.splitlines()
            if len(lines) > most_lines(words) or any(len(line) > 80 for line in lines):
                too_long[case.parts[0]] = len(lines)
    assert too_long == {}
