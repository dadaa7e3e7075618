"""The console blocks of the README and of other pages print what they say; `tests.refresh_blocks` writes them."""

from pathlib import Path

import pytest

from tests.blocks import read_sections, run_section

ROOT = Path(__file__).parents[1]
LEAST = {
    "README.md": 2,
    "docs/measuring.md": 2,
    "docs/serving.md": 4,
    "src/meshwright/calculators/exercises.md": 1,
    "docs/flash.md": 2,
    "docs/islands.md": 1,
    "docs/fleets.md": 2,
}
"""Page -> how many calls it has at least."""
PAGES = {page: read_sections((ROOT / page).read_text(encoding="utf-8")) for page in LEAST}
LONG = ("docs/serving.md: Sweeps", "docs/serving.md: Why not, and what if")
"""Sections whose blocks take over ten seconds."""
SECTIONS = {f"{page}: {one.title}": one for page, sections in PAGES.items() for one in sections}


def test_there_are_calls():
    found = {page: sum(len(section.calls) for section in sections) for page, sections in PAGES.items()}
    assert [page for page, least in LEAST.items() if found[page] < least] == []
    assert found["docs/flash.md"] == 2


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LONG else []) for name in SECTIONS]
)
def test_the_blocks_print_what_they_say(name, tmp_path):
    if name.startswith("docs/measuring.md"):
        (tmp_path / "tests").symlink_to(ROOT / "tests")
    section = SECTIONS[name]
    for call, output in zip(section.calls, run_section(section, tmp_path), strict=True):
        assert output == call.said, call.command
