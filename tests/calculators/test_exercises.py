"""The page of exercises: every exercise is on it; `test_pages` runs its blocks."""

import re
from importlib import resources

import pytest
from click import Context

from meshwright.cli.main import cli
from tests.blocks import read_sections

PAGE = (resources.files("meshwright.calculators") / "exercises.md").read_text(encoding="utf-8")
SECTIONS = read_sections(PAGE)
NUMBERED = {1: 5, 2: 6, 3: 10, 4: 8, 5: 4, 6: 2, 7: 7, 8: 3, 10: 4}
"""Section of the book -> how many exercises it numbers."""
NO_BLOCK = {"Slides, take-home: training LLaMA 3 on TPUs"}
MEASURED = {"Section 9, the profile itself", "Slides, practical 2 on devices"}
"""Answers whose commands print something else on every machine."""


def test_every_exercise_is_on_the_page():
    wanted = {f"{section}.{number}" for section, count in NUMBERED.items() for number in range(1, count + 1)}
    assert set(re.findall(r"Exercise (\d+\.\d+)", PAGE)) == wanted


def test_every_answer_has_a_command():
    headings = set(re.findall(r"^### (.+)$", PAGE, re.MULTILINE))
    assert headings - {section.title for section in SECTIONS} == NO_BLOCK | MEASURED


@pytest.mark.parametrize("title", sorted(MEASURED))
def test_what_is_measured_names_a_command(title):
    text = PAGE.split(f"### {title}\n")[1].split("\n#")[0]
    commands = re.findall(r"^    meshwright (\w+) (.+)$", text, re.MULTILINE)
    assert commands
    for verb, rest in commands:
        command = cli.get_command(Context(cli), verb)
        if otherwise := getattr(command, "otherwise", ""):
            command = command.get_command(Context(command), otherwise)
        options = {name for option in command.params for name in option.opts}
        assert set(re.findall(r"(?<=\s)--?\w[\w-]*", f" {rest}")) <= options
