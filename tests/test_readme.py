"""The console blocks of the README print what they say."""

from pathlib import Path

import pytest

from tests.blocks import read_sections, run_section

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTIONS = read_sections(README)


def test_there_are_console_blocks():
    assert sum(len(section.calls) for section in SECTIONS) >= 2


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.title)
def test_console_blocks(section, tmp_path):
    for call, output in zip(section.calls, run_section(section, tmp_path), strict=True):
        assert output == call.said, call.command


def test_errors_are_those_of_the_accuracy_page():
    page = (ROOT / "docs" / "accuracy.md").read_text()
    crossed = page.split("<!-- table: cross-validation -->")[1].split("<!-- end -->")[0]
    cells = {row.split("|")[1].strip(): row.split("|")[3:5] for row in crossed.splitlines() if row.startswith("|")}
    (mean, median), (core_mean, core_median) = (
        [cell.strip() for cell in cells[name]] for name in ("all", "core training")
    )
    words = " ".join((ROOT / "README.md").read_text().split())
    assert f"the mean error is {mean} over all of them and {core_mean} over a balanced subset" in words
    assert f"the medians {median} and {core_median} (`docs/accuracy.md`" in words
