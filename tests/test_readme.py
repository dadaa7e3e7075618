"""What the README says about accuracy; `test_pages` runs its blocks."""

from pathlib import Path

ROOT = Path(__file__).parents[1]


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
