"""The console blocks of docs/serving.md print what they say; `tests.refresh_blocks` writes them again."""

from pathlib import Path

import pytest

from tests.blocks import read_sections, run_section

SECTIONS = read_sections((Path(__file__).parents[1] / "docs" / "serving.md").read_text(encoding="utf-8"))
LONG = ("Sweeps", "Why not, and what if")
"""Sections whose blocks take over ten seconds."""


def test_there_are_blocks():
    assert sum(len(section.calls) for section in SECTIONS) >= 4


@pytest.mark.parametrize(
    "section",
    [pytest.param(one, id=one.title, marks=[pytest.mark.slow] if one.title in LONG else []) for one in SECTIONS],
)
def test_the_blocks_print_what_they_say(section, tmp_path):
    for call, output in zip(section.calls, run_section(section, tmp_path), strict=True):
        assert output == call.said, call.command
