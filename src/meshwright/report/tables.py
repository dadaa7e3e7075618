"""Tables for 80 to 120 columns of text: no boxes, numbers right-aligned and never cut."""

import re
from collections.abc import Sequence
from io import StringIO
from textwrap import fill

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

Cell = str | int | float | None

# Matches text that core.units prints: a number, with a unit or a percent sign after it.
_QUANTITY = re.compile(r"[-+~<>]?\s?\d[\d,.]*(e[+-]?\d+)?(\s?[%a-zA-Z/]{0,8})?")
_WORD_WIDTH = 12
_GAP = 2


def table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Table:
    """Returns a rich table: columns of quantities are right-aligned and do not wrap, columns of words wrap."""
    for row in rows:
        assert len(row) == len(columns), f"{len(row)} cells for {len(columns)} columns: {row}"
    texts = [[cell_text(cell) for cell in row] for row in rows]
    result = Table(
        header_style="bold",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1),
        collapse_padding=True,
    )
    for index, column in enumerate(columns):
        _add_column(result, column, [row[index] for row in texts])
    for row in texts:
        # Text, not str: rich would read the square brackets of the notation as markup.
        result.add_row(*(Text(cell) for cell in row))
    return result


def render(result: Table, width: int) -> str:
    """Returns the table as plain text of at most ``width`` columns; it is wider only if a number would be cut."""
    console = Console(file=StringIO(), width=width, color_system=None, force_terminal=False, highlight=False)
    console.width = max(
        width, sum(column.min_width or 0 for column in result.columns) + _GAP * (len(result.columns) - 1)
    )
    with console.capture() as capture:
        console.print(result)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()).strip("\n") + "\n"


def _add_column(result: Table, header: str, cells: Sequence[str]) -> None:
    known = [cell for cell in cells if cell != "-"]
    is_number = bool(known) and all(_QUANTITY.fullmatch(cell) for cell in known)
    longest_word = max(map(len, header.split()), default=1)
    widest = max([longest_word, *map(len, cells)])
    result.add_column(
        # Rich would narrow every column that may wrap: a header over numbers is wrapped here instead.
        Text(fill(header, widest) if is_number else header),
        justify="right" if is_number else "left",
        no_wrap=is_number,
        overflow="fold",
        # One bound for all columns of words: rich narrows the widest first, and never below it.
        min_width=widest if is_number else min(max(widest, len(header)), _WORD_WIDTH),
    )


def joined(cell: object) -> object:
    """Returns a list as ``g+u`` or ``256 2048``, a dictionary as ``fsdp=4,tensor=2``, and any other cell as it is."""
    if isinstance(cell, dict):
        return ",".join(f"{name}={value}" for name, value in cell.items())
    numbers = isinstance(cell, tuple | list) and all(isinstance(one, int | float) for one in cell)
    return (" " if numbers else "+").join(map(str, cell)) if isinstance(cell, tuple | list) else cell


def cell_text(cell: object) -> str:
    """Returns a cell as a person reads it: thousands separators, four significant digits, a dash for None."""
    if cell is None:
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}"
    return f"{cell:.4g}" if isinstance(cell, float) else str(joined(cell))
