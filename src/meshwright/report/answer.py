"""Answers of verbs as data (facts for programs; tables, facts and sentences for people), and how they are printed."""

import csv
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from io import StringIO
from pathlib import Path
from textwrap import fill
from typing import Any

import msgspec
from msgspec.structs import asdict
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from meshwright.core.units import shown_by_name
from meshwright.spec.prediction import unmasked

Facts = dict[str, Any]
"""An object of ``--json``, or a part of it: plain data by name, which may contain structs, arrays and paths."""

Show = Callable[[Any], Any]
"""A function from a raw value to the text that a person reads."""


class Heading(msgspec.Struct, frozen=True):
    """A column's header: ``show`` formats its raw values, ``name`` is its name in CSV: the JSON key, with the unit."""

    title: str
    show: Show | None = None
    name: str = ""


TableColumns = Mapping[str, str | Show | tuple[str | Show, Show | None] | tuple[str | Show, Show | None, str]]
"""Header -> value (see `Table.of`), or (value, ``Show``), or (value, ``Show``, name of the column in CSV)."""


class Quantity(msgspec.Struct, frozen=True):
    """A cell with a format of its own: the raw value, and its ``Show``."""

    value: Any
    show: Show

    def __str__(self) -> str:
        return str(self.show(self.value))


class Table(msgspec.Struct, frozen=True):
    """Raw values under columns; the ``Show`` of a column formats its values. None means not known."""

    columns: Sequence[str | Heading]
    rows: Sequence[Sequence[Any]]
    title: str = ""
    first: int | None = None
    """Rows that a text prints without ``--all``; None: every row."""

    @staticmethod
    def of(records: Iterable[Any], columns: TableColumns, title: str = "", first: int | None = None) -> "Table":
        """Returns a table with a row for each record (struct or dictionary).

        A value is a field, a path such as ``seconds.median_s``, a key of a dictionary in a field such as
        ``memory/weights`` (both None beyond a None), or a function of the record. By default the column's name is
        the end of the path, here ``median_s`` and ``memory.weights``, or the whole path if two columns end alike. A
        field without a ``Show`` is printed by the unit in its name (`shown_by_name`).
        """
        spec_by_head = {head: path if isinstance(path, tuple) else (path, None) for head, path in columns.items()}
        rows = [[_field(record, path) for path, *_ in spec_by_head.values()] for record in records]
        paths = [path if isinstance(path, str) else "" for path, *_ in spec_by_head.values()]
        last_names = [path.rpartition(".")[2] if "/" not in path else path.replace("/", ".") for path in paths]
        field_names = [end if last_names.count(end) == 1 else path for end, path in zip(last_names, paths, strict=True)]
        headings = [
            Heading(head, show or shown_by_name(path.partition("/")[0]), "".join(json_name) or name)
            for (head, (_, show, *json_name)), path, name in zip(spec_by_head.items(), paths, field_names, strict=True)
        ]
        return Table(headings, rows, title, first)

    @staticmethod
    def as_is(records: "Table | Iterable[Any]") -> "Table":
        """Returns a table with a row for each record: all fields but lists of records. A table is returned as it is.

        A field that is itself a record gives a column for each of its fields: ``run.days``.
        """
        if isinstance(records, Table):
            return records
        rows = [dict(_cells(record)) for record in records]
        field_names = list(dict.fromkeys(name for row in rows for name in row))
        return Table(field_names, [[row.get(name) for name in field_names] for row in rows])

    @staticmethod
    def compared(rows: Iterable[tuple[str, float | None, float | None, Show]]) -> "Table":
        """Returns a table of (name, predicted, measured, ``Show``) with their ratio, each row in its own unit."""
        cells = [
            [name, *(None if value is None else Quantity(value, show) for value in (predicted, measured)),
             measured / predicted if predicted and measured is not None else None]
            for name, predicted, measured, show in rows
        ]  # fmt: skip
        return Table([Heading("", name="figure"), "predicted", "measured", Heading("ratio", "{:.2f}".format)], cells)

    def known(self) -> "Table":
        """Returns the table without columns that have only None."""
        known_at = [n for n in range(len(self.columns)) if any(row[n] is not None for row in self.rows)]
        rows = [[row[n] for n in known_at] for row in self.rows]
        return msgspec.structs.replace(self, columns=[self.columns[n] for n in known_at], rows=rows)

    @property
    def heads(self) -> list[Heading]:
        """The columns as headings."""
        return [Heading(column) if isinstance(column, str) else column for column in self.columns]

    def shown(self) -> list[list[Any]]:
        """Returns the rows as a person reads them."""
        return [[_shown(cell, column) for cell, column in zip(row, self.heads, strict=True)] for row in self.rows]


def utilisation_rows(predicted: Any, measured: Any) -> list[tuple[str, float | None, float | None, Show]]:
    """Returns rows of `Table.compared` for MFU, also without masked scores if it is above 100%, and HFU."""
    fields = {"MFU": "mfu", "MFU without masked scores": "mfu_causal", "HFU": "hfu"}
    if unmasked(predicted) is None and unmasked(measured) is None:
        del fields["MFU without masked scores"]
    return [(name, getattr(predicted, attr), getattr(measured, attr), "{:.1%}".format) for name, attr in fields.items()]


def _cells(record: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (name, value) of the fields of a record and of records inside it."""
    for name, value in (record if isinstance(record, Mapping) else asdict(record)).items():
        if isinstance(value, Mapping | msgspec.Struct):
            yield from _cells(value, f"{prefix}{name}.")
        elif not isinstance(value, list | tuple) or not any(isinstance(item, _INSIDE) for item in value):
            yield f"{prefix}{name}", value.tolist() if hasattr(value, "tolist") else value


_INSIDE = (Mapping, list, tuple, msgspec.Struct)


def _shown(cell: Any, column: Heading) -> Any:
    if isinstance(cell, Quantity):
        return str(cell)
    return cell if cell is None or column.show is None else column.show(cell)


def _field(record: Any, path_or_read: str | Show) -> Any:
    if not isinstance(path_or_read, str):
        return path_or_read(record)
    path, _, key = path_or_read.partition("/")
    for name in path.split("."):
        record = None if record is None else record[name] if isinstance(record, dict) else getattr(record, name)
    return record.get(key) if key and record is not None else record


class Fact(msgspec.Struct, frozen=True):
    """A label and a text, which wraps in a column of its own."""

    label: str
    text: str
    column: int = 18


class Paragraph(msgspec.Struct, frozen=True):
    """A text that wraps, its further lines indented by ``indent``; with ``indent=None`` it does not wrap."""

    text: str
    indent: int | None = 2


class Condition(msgspec.Struct, frozen=True):
    """A condition that an answer rests on, the most important first. A text ends with the notes that fit into
    `NOTE_LINES` lines; ``--notes`` prints every note."""

    text: str


class Symbols(msgspec.Struct, frozen=True):
    """Symbol -> its meaning. A text prints one legend of the symbols that occur in it; ``--symbols`` prints a line for
    every symbol."""

    meanings: Mapping[str, str]


class Detail(msgspec.Struct, frozen=True):
    """Pieces that a text prints with ``--all`` only; ``what`` names them where they are left out: "172 steps"."""

    what: str
    pieces: "Sequence[PlainPiece]"


PlainPiece = str | Paragraph | Fact | Table | Condition | Symbols
Piece = PlainPiece | Detail
"""One piece of the text; a plain string is a `Paragraph`."""
NOTE_LINES = 3
MORE = ("notes", "symbols", "all")
"""Options that print what a text leaves out."""


class Answer(msgspec.Struct, frozen=True):
    """The answer of a verb.

    ``facts`` is the one JSON object of ``--json`` (it may contain structs, arrays and paths). ``pieces`` are the text.
    ``pictures`` maps the wanted file to the function that draws its chart; a file of None is not drawn. ``raw`` has
    the tables of CSV, or their records, if those of the text lack something. ``error`` is raised after all is printed.
    """

    facts: Mapping[str, Any]
    pieces: Iterable[Piece]
    pictures: Mapping[Path | None, Callable[[], Any]] = {}
    raw: Sequence[Table | Sequence[Any] | None] = ()
    error: Exception | None = None

    def tables(self) -> Sequence[Table]:
        """Returns the tables of CSV: ``raw`` if it is given, else those of the text and one with a row of ``facts``."""
        tables = [Table.as_is(rows) for rows in self.raw or [*tables_of(self.pieces), [self.facts]] if rows]
        return [table for table in tables if table.columns]


def tables_of(pieces: Iterable[Piece]) -> list[Table]:
    """Returns the tables among the pieces of a text, those of details too."""
    return [piece for piece in unfolded(pieces) if isinstance(piece, Table)]


def unfolded(pieces: Iterable[Piece]) -> Iterator[PlainPiece]:
    """Yields the pieces with those of every `Detail` in its place."""
    for piece in pieces:
        yield from piece.pieces if isinstance(piece, Detail) else [piece]


def as_text(pieces: Iterable[Piece], width: int, more: Collection[str] = MORE) -> Iterator[str]:
    """Yields the text of ``width`` columns: its pieces, the legend of symbols, the notes, and which of `MORE` would
    print what is left out. ``more`` names the parts of `MORE` that are printed whole."""
    notes, left, printed, meanings = list[Condition](), list[str](), list[str](), dict[str, str]()
    for piece in unfolded(pieces) if "all" in more else pieces:
        if isinstance(piece, Condition):
            notes += [] if piece in notes else [piece]
        elif isinstance(piece, Symbols):
            meanings |= piece.meanings
        elif isinstance(piece, Detail):
            left.append(piece.what)
        else:
            if isinstance(piece, Table) and piece.first and "all" not in more and piece.rows[piece.first :]:
                left.append(f"{len(piece.rows):,} rows of {piece.title or piece.heads[0].title}")
                piece = msgspec.structs.replace(piece, rows=piece.rows[: piece.first])
            printed += _piece_lines(piece, width)
    yield from printed
    note_texts = [filled(note.text, width, 2) for note in notes]
    shown_texts = note_texts if {"notes", "all"} & {*more} else _within(note_texts, NOTE_LINES)
    yield from shown_texts
    occurring = {name: text for name, text in meanings.items() if _occurs(name, [*printed, *shown_texts])}
    if "symbols" in more:
        yield from (filled(f"{name:<{Fact('', '').column}}{text}", width, 18) for name, text in meanings.items())
    elif occurring:
        yield filled(", ".join(f"{name} {text}" for name, text in occurring.items()), width, 2)
    left_notes = len(note_texts) - len(shown_texts)
    more_texts = [f"--notes ({left_notes:,} more)"] * bool(left_notes) + [f"--all ({', '.join(left)})"] * bool(left)
    if meanings and "symbols" not in more:
        more_texts.append("--symbols")
    if more_texts:
        yield filled(f"more: {', '.join(more_texts)}", width, 2)


def _piece_lines(piece: str | Paragraph | Fact | Table, width: int) -> Iterator[str]:
    if isinstance(piece, Table):
        if piece.title:
            yield filled(piece.title, width, 2)
        yield render([head.title for head in piece.heads], piece.shown(), width)
    elif isinstance(piece, Fact):
        yield filled(f"{piece.label:<{piece.column}}{piece.text}", width, piece.column)
    else:
        line = Paragraph(piece) if isinstance(piece, str) else piece
        yield line.text if line.indent is None else filled(line.text, width, line.indent)


def _occurs(symbol: str, texts: Sequence[str]) -> bool:
    name = re.escape(symbol)
    pattern = re.compile(rf"(?<![A-Za-z])(?!(?<=\d ){name} [a-z]){name}(?![A-Za-z])")  # in "1 T tokens" T is a unit
    return any(pattern.search(text) for text in texts)


def _within(texts: Sequence[str], num_lines: int) -> list[str]:
    """Returns the texts, in order, that still fit into ``num_lines`` lines in all."""
    chosen = list[str]()
    for text in texts:
        if sum(each.count("\n") + 1 for each in (*chosen, text)) <= num_lines:
            chosen.append(text)
    return chosen


# Matches text that core.units prints: a number, with a unit or a percent sign after it.
_QUANTITY = re.compile(r"[-+~<>]?\s?\d[\d,.]*(e[+-]?\d+)?(\s?[%a-zA-Z/]{0,8})?")
_WORD_WIDTH = 12
_GAP = 2
Cell = str | int | float | None


def render(columns: Sequence[str], rows: Sequence[Sequence[Cell]], width: int) -> str:
    """Returns a table as plain text of at most ``width`` columns; it is wider only if a number would be cut.

    It has no boxes; columns of quantities are right-aligned and do not wrap, columns of words wrap.
    """
    rich_table = RichTable(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), collapse_padding=True)
    texts, widths = [[cell_text(cell) for cell in row] for row in rows], list[int]()
    for index, header in enumerate(columns):
        column_texts = [row[index] for row in texts]
        known_texts = [cell for cell in column_texts if cell not in ("-", "")]
        is_number = bool(known_texts) and all(_QUANTITY.fullmatch(cell) for cell in known_texts)
        min_width = max([1, *map(len, header.split()), *map(len, column_texts)])
        longest_line = max((len(line) for text in column_texts for line in text.split("\n")), default=0)
        widths.append(min_width if is_number else max(longest_line, min(len(header), _WORD_WIDTH)))
        rich_table.add_column(
            # Rich would narrow every column that may wrap: a header over numbers is wrapped here instead.
            Text(fill(header, min_width) if is_number else header),
            justify="right" if is_number else "left",
            no_wrap=is_number,
            overflow="fold",
            # One bound for all columns of words: rich narrows the widest first, and never below it.
            min_width=min_width if is_number else min(max(min_width, len(header)), _WORD_WIDTH),
        )
    for row in _hanging(texts, widths, width):
        # Text, not str: rich would read the square brackets of the notation as markup.
        rich_table.add_row(*map(Text, row))
    needed_width = sum(column.min_width or 0 for column in rich_table.columns) + _GAP * (len(columns) - 1)
    console = Console(file=StringIO(), width=max(width, needed_width), color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(rich_table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()).strip("\n") + "\n"


def _hanging(texts: list[list[str]], widths: Sequence[int], width: int) -> Iterator[list[str]]:
    """Yields the rows with the lines of cells that have several wrapped to the room that other columns leave, their
    further lines indented, which rich does not do."""
    rooms = [max(_WORD_WIDTH, width - sum(widths) + own - _GAP * (len(widths) - 1)) for own in widths]
    for row in texts:
        lines_of = [text.split("\n") for text in row]
        yield [
            "\n".join(filled(line, room, len(line) - len(line.lstrip()) + 2) for line in lines)
            if lines[1:]
            else lines[0]
            for lines, room in zip(lines_of, rooms, strict=True)
        ]


def joined(cell: object) -> object:
    """Returns a list as ``g+u`` or ``256 2048``, a dictionary as ``fsdp=4,tensor=2``, and any other cell as it is."""
    if isinstance(cell, dict):
        return ",".join(f"{name}={value}" for name, value in cell.items())
    is_numeric = isinstance(cell, tuple | list) and all(isinstance(item, int | float) for item in cell)
    return (" " if is_numeric else "+").join(map(str, cell)) if isinstance(cell, tuple | list) else cell


def cell_text(cell: object) -> str:
    """Returns a cell as a person reads it: thousands separators, four significant digits, a dash for None."""
    if cell is None:
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}"
    return f"{cell:.4g}" if isinstance(cell, float) else str(joined(cell))


def filled(text: str, width: int, indent: int) -> str:
    """Returns the text in lines of ``width`` columns, all but the first indented by ``indent``."""
    return fill(text, width, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False)


def as_csv(found: Table) -> str:
    """Returns comma-separated raw values under their names; a value that is None or not finite is an empty field."""
    text_file = StringIO()
    writer = csv.writer(text_file, lineterminator="\n")
    writer.writerow([column.name or column.title for column in found.heads])
    for row in found.rows:
        values = [cell.value if isinstance(cell, Quantity) else cell for cell in row]
        writer.writerow([None if isinstance(v, float) and not math.isfinite(v) else joined(v) for v in values])
    return text_file.getvalue()


def as_markdown(found: Table) -> str:
    """Returns a table of GitHub-flavoured Markdown as a person reads it; columns of numbers are right-aligned."""
    row_texts = [[cell_text(cell).replace("|", "\\|").replace("\n", "<br>") for cell in row] for row in found.shown()]
    titles = [head.title for head in found.heads]
    indices = range(len(titles))
    are_numeric = [all(isinstance(row[i], int | float | Quantity | None) for row in found.rows) for i in indices]
    widths = [max(3, len(name), *(len(row[i]) for row in row_texts)) for i, name in enumerate(titles)]
    rules = [f" {'-' * (w - 1)}: " if right else f" {'-' * w} " for w, right in zip(widths, are_numeric, strict=True)]
    lines = [
        " | ".join(c.rjust(w) if right else c.ljust(w) for c, w, right in zip(row, widths, are_numeric, strict=True))
        for row in (titles, *row_texts)
    ]
    body_lines = [f"| {line} |" for line in lines]
    heading = f"{found.title}\n\n" if found.title else ""
    return heading + "\n".join([body_lines[0], f"|{'|'.join(rules)}|", *body_lines[1:]]) + "\n"
