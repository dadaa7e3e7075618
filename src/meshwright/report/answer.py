"""What a verb answers, as data: facts for programs, and tables, facts and sentences for people; and how it prints."""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from textwrap import fill
from typing import Any

import msgspec

from meshwright.report.tables import render, table

Show = Callable[[Any], Any]
"""Turns a raw value into what a person reads."""


class Table(msgspec.Struct, frozen=True):
    """Raw values under columns; a column with a ``Show`` is read through it. None is not known."""

    columns: Sequence[str | tuple[str, Show]]
    rows: Sequence[Sequence[Any]]
    title: str = ""

    @staticmethod
    def of(records: Iterable[Any], columns: Mapping[str, str | tuple[str, Show]], title: str = "") -> "Table":
        """A row for each record (struct or dictionary): column -> its field, and how a person reads that.

        ``"memory/weights"`` is a key of a dictionary in a field; None where the field is None.
        """
        fields = [field if isinstance(field, str) else field[0] for field in columns.values()]
        shown = [name if isinstance(field, str) else (name, field[1]) for name, field in columns.items()]
        return Table(shown, [[_field(one, field) for field in fields] for one in records], title)

    @property
    def names(self) -> list[str]:
        """The headers."""
        return [column if isinstance(column, str) else column[0] for column in self.columns]

    def shown(self) -> list[list[Any]]:
        """The rows as a person reads them."""
        shows = [None if isinstance(column, str) else column[1] for column in self.columns]
        return [
            [cell if show is None or cell is None else show(cell) for cell, show in zip(row, shows, strict=True)]
            for row in self.rows
        ]


def _field(record: Any, path: str) -> Any:
    name, _, key = path.partition("/")
    value = record[name] if isinstance(record, dict) else getattr(record, name)
    return value[key] if key and value is not None else value


class Fact(msgspec.Struct, frozen=True):
    """A label and what is said of it, broken at the width inside its own column."""

    label: str
    text: str
    column: int = 18


class Paragraph(msgspec.Struct, frozen=True):
    """A sentence whose further lines are indented by ``indent``; with ``indent=None`` never broken."""

    text: str
    indent: int | None = 2


Piece = str | Paragraph | Fact | Table
"""One piece of the text; a plain string is a `Paragraph`."""


class Answer(msgspec.Struct, frozen=True):
    """What a verb found.

    ``facts`` is the one JSON object of ``--json`` (structs, arrays and paths may stand in it). ``pieces`` are the text.
    ``pictures`` maps the file that was asked for to the function that draws its chart; None is not asked for.
    ``raw`` are the tables of CSV and Markdown where those of the text are not meant. ``error`` is raised once all is
    printed.
    """

    facts: Mapping[str, Any]
    pieces: Iterable[Piece]
    pictures: Mapping[Path | None, Callable[[], Any]] = {}
    raw: Sequence[Table] = ()
    error: Exception | None = None

    def tables(self) -> Sequence[Table]:
        """The tables of the other formats than text and JSON."""
        return self.raw or [piece for piece in self.pieces if isinstance(piece, Table)]


def as_text(pieces: Iterable[Piece], width: int) -> Iterable[str]:
    """Every block as text of ``width`` columns, one after the other."""
    for piece in pieces:
        if isinstance(piece, Table):
            if piece.title:
                yield _filled(piece.title, width, 2)
            yield render(table(piece.names, piece.shown()), width)
        elif isinstance(piece, Fact):
            yield _filled(f"{piece.label:<{piece.column}}{piece.text}", width, piece.column)
        else:
            line = Paragraph(piece) if isinstance(piece, str) else piece
            yield line.text if line.indent is None else _filled(line.text, width, line.indent)


def _filled(text: str, width: int, indent: int) -> str:
    return fill(text, width, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False)


def as_csv(found: Table) -> str:
    """Comma-separated raw values under a header; None (not known) is an empty field."""
    out = StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(found.names)
    writer.writerows([["" if cell is None else cell for cell in row] for row in found.rows])
    return out.getvalue()


def as_markdown(found: Table) -> str:
    """A table of GitHub-flavoured Markdown as a person reads it; columns without words are aligned to the right."""
    rows = found.shown()
    cells = [[_markdown_text(cell) for cell in row] for row in rows]
    numeric = [all(isinstance(row[i], int | float | None) for row in rows) for i in range(len(found.names))]
    widths = [max(3, len(name), *(len(row[i]) for row in cells)) for i, name in enumerate(found.names)]
    rules = [f" {'-' * (w - 1)}: " if n else f" {'-' * w} " for w, n in zip(widths, numeric, strict=True)]
    lines = [
        " | ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True))
        for row in (found.names, *cells)
    ]
    body = [f"| {line} |" for line in lines]
    heading = f"{found.title}\n\n" if found.title else ""
    return heading + "\n".join([body[0], f"|{'|'.join(rules)}|", *body[1:]]) + "\n"


def _markdown_text(cell: Any) -> str:
    if cell is None:
        return "-"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell).replace("|", "\\|")
