"""The console blocks of docs/measuring.md print what they say, and its links and names are there."""

import re
from pathlib import Path

import pytest

from meshwright.bench.run import PARTS
from tests.blocks import read_sections, run_section

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "measuring.md").read_text(encoding="utf-8")
SECTIONS = read_sections(PAGE)


def test_there_are_blocks():
    assert sum(len(section.calls) for section in SECTIONS) >= 2


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.title)
def test_the_blocks_print_what_they_say(section, tmp_path):
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    for call, output in zip(section.calls, run_section(section, tmp_path), strict=True):
        assert output == call.said, call.command


def test_every_part_of_bench_is_explained():
    table = re.findall(r"^\| (\w+) \| [^|]+ \| [^|]+ \|$", PAGE.split("## `bench`")[1].split("## `profile`")[0], re.M)
    assert set(table) - {"part"} == set(PARTS)
