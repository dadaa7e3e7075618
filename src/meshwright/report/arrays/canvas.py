"""Panels whose coordinates count cells, to the right and downwards."""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from meshwright.report.answer import Facts
from meshwright.report.figure import Layer, alt
from meshwright.report.marks import Datum, plot


def cell(x: float, y: float, width: float = 1, height: float = 1, **fields: Any) -> Datum:
    """Returns a row for `Canvas.boxes` and, in the middle of the box, for `Canvas.words`; with size 0 it is a point."""
    middle_fields = {"mid_x": x + width / 2, "mid_y": y + height / 2}
    return {"x": x, "x2": x + width, "y": y, "y2": y + height, **middle_fields, **fields}


def shown(count: int, most: int, last: int = 1) -> list[int | None]:
    """Returns ``most`` of the numbers below ``count``, or all: the first, None for a gap, and the ``last`` ones."""
    return list(range(count)) if count <= most else [*range(most - 1 - last), None, *range(count - last, count)]


def grid(
    rows: Sequence[int | None], columns: Sequence[int | None]
) -> tuple[list[tuple[int, int, int, int]], list[Datum]]:
    """Returns (x, y, row, column) of every cell, and the rows of `Canvas.words` for the gaps."""
    cells, gaps = [], []
    for y, row in enumerate(rows):
        for x, column in enumerate(columns):
            if row is None or column is None:
                gaps.append(cell(x, y, text="…"))
            else:
                cells.append((x, y, row, column))
    return cells, gaps


def names(texts: Sequence[str | None], title: str, **style: Any) -> Any:
    """Returns an axis, drawn without a line, with the names of a `Canvas`'s columns or rows; None is a gap."""
    plain_style = {"labelOverlap": False, "grid": False, "domain": False, "ticks": False}
    tick_values = [index + 0.5 for index in range(len(texts))]
    label_js = f"{json.dumps(['…' if text is None else text for text in texts])}[floor(datum.value)]"
    return alt.Axis(**{"title": title or None, "values": tick_values, "labelExpr": label_js, **plain_style, **style})


def texts_of(numbers: Sequence[int | None], text: Callable[[int], str] = str) -> list[str | None]:
    """Returns the names of numbered columns or rows; gaps (None) stay."""
    return [None if number is None else text(number) for number in numbers]


class Canvas(msgspec.Struct, frozen=True):
    """The columns and rows of a panel, each a range (first, last), and the axes that name them."""

    columns: tuple[float, float]
    rows: tuple[float, float]
    column_names: Any = None
    row_names: Any = None

    @staticmethod
    def named(
        columns: Sequence[str | None], rows: Sequence[str | None], titles: tuple[str, str], **style: Any
    ) -> "Canvas":
        """Returns a canvas of cells with their columns named above and their rows to the left."""
        column_axis = names(columns, titles[0], orient="top", labelAngle=0, **style)
        return Canvas((0, len(columns)), (0, len(rows)), column_axis, names(rows, titles[1], **style))

    def at(self, x: str = "x", y: str = "y") -> Facts:
        """Returns the encodings of two fields as positions."""
        x_scale = alt.Scale(domain=list(self.columns), nice=False, zero=False)
        y_scale = alt.Scale(domain=list(self.rows), nice=False, zero=False, reverse=True)
        return {
            "x": alt.X(f"{x}:Q", axis=self.column_names, scale=x_scale),
            "y": alt.Y(f"{y}:Q", axis=self.row_names, scale=y_scale),
        }

    def boxes(self, rows: Iterable[Datum], **style: Any) -> Layer:
        """Draws rectangles; with ``filled=False`` only their edges."""
        return plot(rows).mark_rect(**style).encode(**self.at(), x2="x2", y2="y2")

    def words(self, rows: Iterable[Datum], **style: Any) -> Layer:
        """Draws the field ``text`` of each row."""
        mark_style = {"baseline": "middle", **style}
        return plot(rows).mark_text(**mark_style).encode(**self.at("mid_x", "mid_y"), text="text:N")

    def points(self, rows: Iterable[Datum], **style: Any) -> Layer:
        """Draws filled symbols."""
        return plot(rows).mark_point(filled=True, opacity=1, **style).encode(**self.at())
