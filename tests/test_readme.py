"""The console blocks of the README print what they say."""

from pathlib import Path

import pytest

from tests.blocks import read_sections, run_section

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
SECTIONS = read_sections(README)


def test_there_are_console_blocks():
    assert sum(len(section.calls) for section in SECTIONS) >= 2


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.title)
def test_console_blocks(section, tmp_path):
    for call, output in zip(section.calls, run_section(section, tmp_path), strict=True):
        assert output == call.said, call.command
