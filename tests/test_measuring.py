"""docs/measuring.md explains what is there; `test_pages` runs its blocks."""

import re
from pathlib import Path

from meshwright.bench.run import PARTS

PAGE = (Path(__file__).parents[1] / "docs" / "measuring.md").read_text(encoding="utf-8")


def test_every_part_of_bench_is_explained():
    table = re.findall(r"^\| (\w+) \| [^|]+ \| [^|]+ \|$", PAGE.split("## `bench`")[1].split("## `profile`")[0], re.M)
    assert set(table) - {"part"} == set(PARTS)
