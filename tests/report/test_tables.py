import pytest

from meshwright.report.answer import render

COLUMNS = ("axes", "remat", "microbatches", "step", "mfu", "hbm per chip", "bound by", "cost")
ROWS = (
    ("data=1 fsdp=2048 context=1 tensor=4", "block", 1, "3.41 s", "41.2%", "18.4 GB", "compute", None),
    ("fsdp=1024 tensor=8", "none", 4, "3.5 s", "40%", "22 GB", "ici", 12345678),
)


@pytest.mark.parametrize("width", [80, 120])
def test_lines_fit_and_nothing_is_cut(width):
    text = render(COLUMNS, ROWS, width)
    assert max(map(len, text.splitlines())) <= width
    for part in ("axes", "fsdp=2048", "tensor=4", "3.41 s", "18.4 GB", "12,345,678", "compute", "microbatches"):
        assert part in text


@pytest.mark.parametrize("width", range(10, 130, 7))
def test_numbers_are_never_cut_however_narrow(width):
    text = render(COLUMNS, ROWS, width)
    for row in ROWS:
        for cell in row[3:6]:
            assert cell in text
    assert "12,345,678" in text


def test_numbers_end_in_line_and_words_begin_in_line():
    text = render(("name", "size"), [("a", 5), ("bcd", 1234), ("e", None)], 80)
    assert text == "name   size\n───────────\na         5\nbcd   1,234\ne         -\n"


def test_floats_have_four_digits_and_truth_is_a_word():
    text = render(("x", "fits"), [(1.23456789e-5, True), (3.14159, False)], 80)
    assert text.splitlines()[2:] == ["1.235e-05  yes", "    3.142  no"]


def test_square_brackets_are_no_markup():
    assert "A[I_X, J] {U_Y}" in render(("array",), [("A[I_X, J] {U_Y}",)], 80)


def test_no_rows_leaves_the_header():
    assert render(("name", "size"), [], 80).splitlines()[0].split() == ["name", "size"]


def test_long_words_are_folded_at_the_width():
    rows = [["a-name-without-any-space-of-sixty-letters-that-nothing-can-break", 1.5, "another-of-those-in-a-row"]]
    lines = render(["record", "time", "job"], rows, 60).splitlines()
    assert max(map(len, lines)) <= 60
