"""Tables for other programs: CSV with raw numbers, Markdown for a page."""

import csv
from collections.abc import Sequence
from io import StringIO
from typing import Any

Value = str | int | float | None


def as_csv(columns: Sequence[str], rows: Sequence[Sequence[Value]]) -> str:
    """Lines of comma-separated values under a header; None (not known) is an empty field."""
    out = StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([["" if cell is None else cell for cell in row] for row in rows])
    return out.getvalue()


def as_markdown(columns: Sequence[str], rows: Sequence[Sequence[Value]]) -> str:
    """A table of GitHub-flavoured Markdown; columns without words are aligned to the right."""
    cells = [[_text(cell) for cell in row] for row in rows]
    numeric = [all(isinstance(row[i], int | float | None) for row in rows) for i in range(len(columns))]
    widths = [max(3, len(name), *(len(row[i]) for row in cells)) for i, name in enumerate(columns)]
    lines = [_line(columns, widths, numeric)]
    lines.append(
        "|"
        + "|".join(f" {'-' * (w - 1)}: " if n else f" {'-' * w} " for w, n in zip(widths, numeric, strict=True))
        + "|"
    )
    return "\n".join([*lines, *(_line(row, widths, numeric) for row in cells)]) + "\n"


def _line(cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    padded = [c.rjust(w) if n else c.ljust(w) for c, w, n in zip(cells, widths, numeric, strict=True)]
    return "| " + " | ".join(padded) + " |"


def _text(cell: Any) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.4g}"
    return str(cell).replace("|", "\\|")
