"""The console blocks of the README and of other pages print what they say; `tests.refresh_blocks` writes them."""

from pathlib import Path

import pytest

import meshwright
from tests.blocks import read_sections, run_section, verbs_page

ROOT = Path(__file__).parents[1]
NAMES = (
    "README.md",
    "src/meshwright/calculators/exercises.md",
    *(f"docs/{path.name}" for path in ROOT.glob("docs/*.md")),
)
PAGES = {name: read_sections((ROOT / name).read_text(encoding="utf-8")) for name in sorted(NAMES)}
LONG = ("docs/serving.md: Sweeps", "docs/serving.md: Why not, and what if")
"""Sections whose blocks take over ten seconds."""
SECTIONS = {f"{page}: {one.title}": one for page, sections in PAGES.items() for one in sections}


def test_there_are_calls():
    assert sum(bool(sections) for sections in PAGES.values()) >= 13


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LONG else []) for name in SECTIONS]
)
def test_the_blocks_print_what_they_say(name, tmp_path):
    if name.startswith("docs/measuring.md"):
        (tmp_path / "tests").symlink_to(ROOT / "tests")
    section = SECTIONS[name]
    for call, output in zip(section.calls, run_section(section, tmp_path), strict=True):
        assert output == call.said, call.command


def test_reference_pages_are_whole():
    _, heading, page = (ROOT / "docs/verbs.md").read_text(encoding="utf-8").partition("## meshwright\n")
    assert f"{heading}{page}".splitlines() == verbs_page().splitlines()
    page = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    assert [name for name in meshwright.__all__ if f"::: meshwright.{name}\n" not in page] == []
