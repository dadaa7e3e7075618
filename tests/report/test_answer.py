"""Tables for other programs."""

from meshwright.report.answer import Table, as_csv, as_markdown

TABLE = Table(["name", "size", "ratio"], [["a,b", 1000, 3.5], ["c|d", None, 1 / 3]])


def test_csv_keeps_raw_numbers():
    assert as_csv(TABLE) == f'name,size,ratio\n"a,b",1000,3.5\nc|d,,{1 / 3}\n'


def test_markdown_aligns_numbers_and_escapes():
    assert as_markdown(TABLE).splitlines() == [
        "| name |  size |  ratio |",
        "| ---- | ----: | -----: |",
        "| a,b  | 1,000 |    3.5 |",
        "| c\\|d |     - | 0.3333 |",
    ]
