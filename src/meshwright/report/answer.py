"""What a verb answers, as data: facts for programs, and tables, facts and sentences for people; and how it prints."""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import StringIO
from operator import attrgetter
from pathlib import Path
from textwrap import fill
from typing import Any

import msgspec

from meshwright.report.tables import cell_text, joined, render, table

Show = Callable[[Any], Any]
"""Turns a raw value into what a person reads."""
TableColumn = str | tuple[str, Show]
"""A header, and how a person reads the values below it."""
TableColumns = Mapping[str, str | Show | tuple[str | Show, Show]]
"""Column -> what of a record it has, and how a person reads that."""


class Quantity(msgspec.Struct, frozen=True):
    """A cell with its own reading: the raw value, and what a person reads."""

    value: Any
    show: Show

    def __str__(self) -> str:
        return str(self.show(self.value))


class Table(msgspec.Struct, frozen=True):
    """Raw values under columns; a column with a ``Show`` is read through it. None is not known."""

    columns: Sequence[TableColumn]
    rows: Sequence[Sequence[Any]]
    title: str = ""

    @staticmethod
    def of(records: Iterable[Any], columns: TableColumns, title: str = "") -> "Table":
        """A row for each record (struct or dictionary): column -> its value, and how a person reads that.

        A value is named by a field, by a path of attributes such as ``seconds.median_s``, by a key of a dictionary in a
        field such as ``memory/weights`` (None where the field is None), or by a function of the record.
        """
        reads = {name: what if isinstance(what, tuple) else (what, None) for name, what in columns.items()}
        rows = [[_field(one, what) for what, _ in reads.values()] for one in records]
        return Table([name if show is None else (name, show) for name, (_, show) in reads.items()], rows, title)

    @staticmethod
    def as_is(records: Sequence[Any], title: str = "") -> "Table":
        """A row for each record with all its fields as they are."""
        names = [] if not records else records[0] if isinstance(records[0], dict) else records[0].__struct_fields__
        return Table.of(records, {name: name for name in names}, title)

    @staticmethod
    def compared(rows: Iterable[tuple[str, float | None, float | None, Show]]) -> "Table":
        """Predictions beside measurements with their ratio, each row in its own unit."""
        cells = [
            [name, *(None if value is None else Quantity(value, show) for value in (predicted, measured)),
             measured / predicted if predicted and measured is not None else None]
            for name, predicted, measured, show in rows
        ]  # fmt: skip
        return Table(["", "predicted", "measured", ("ratio", "{:.2f}".format)], cells)

    def known(self) -> "Table":
        """The table without the columns of which nothing is known."""
        kept = [n for n in range(len(self.columns)) if any(row[n] is not None for row in self.rows)]
        return Table([self.columns[n] for n in kept], [[row[n] for n in kept] for row in self.rows], self.title)

    @property
    def names(self) -> list[str]:
        """The headers."""
        return [column if isinstance(column, str) else column[0] for column in self.columns]

    def shown(self) -> list[list[Any]]:
        """The rows as a person reads them."""
        return [[_shown(cell, column) for cell, column in zip(row, self.columns, strict=True)] for row in self.rows]


def _shown(cell: Any, column: TableColumn) -> Any:
    if isinstance(cell, Quantity):
        return str(cell)
    return cell if cell is None or isinstance(column, str) else column[1](cell)


def _field(record: Any, what: str | Show) -> Any:
    if not isinstance(what, str):
        return what(record)
    name, _, key = what.partition("/")
    value = record[name] if isinstance(record, dict) else attrgetter(name)(record)
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
    ``raw`` are the tables of CSV where those of the text have too little. ``error`` is raised once all is printed.
    """

    facts: Mapping[str, Any]
    pieces: Iterable[Piece]
    pictures: Mapping[Path | None, Callable[[], Any]] = {}
    raw: Sequence[Table] = ()
    error: Exception | None = None

    def tables(self) -> Sequence[Table]:
        """The tables of the text."""
        return tables_of(self.pieces)


def tables_of(pieces: Iterable[Piece]) -> list[Table]:
    """The tables among the blocks of a text."""
    return [piece for piece in pieces if isinstance(piece, Table)]


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
    cells = [[cell.value if isinstance(cell, Quantity) else cell for cell in row] for row in found.rows]
    writer.writerows([[joined(cell) for cell in row] for row in cells])
    return out.getvalue()


def as_markdown(found: Table) -> str:
    """A table of GitHub-flavoured Markdown as a person reads it; columns of numbers are aligned to the right."""
    cells = [[cell_text(cell).replace("|", "\\|").replace("\n", "<br>") for cell in row] for row in found.shown()]
    columns = range(len(found.names))
    numeric = [all(isinstance(row[i], int | float | Quantity | None) for row in found.rows) for i in columns]
    widths = [max(3, len(name), *(len(row[i]) for row in cells)) for i, name in enumerate(found.names)]
    rules = [f" {'-' * (w - 1)}: " if n else f" {'-' * w} " for w, n in zip(widths, numeric, strict=True)]
    lines = [
        " | ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True))
        for row in (found.names, *cells)
    ]
    body = [f"| {line} |" for line in lines]
    heading = f"{found.title}\n\n" if found.title else ""
    return heading + "\n".join([body[0], f"|{'|'.join(rules)}|", *body[1:]]) + "\n"
