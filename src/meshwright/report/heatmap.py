"""The heatmap of best plans over two fields: a cell has a figure as its colour and the mesh as its text."""

from collections.abc import Sequence

import msgspec

from meshwright.core.errors import InputError
from meshwright.report.figure import INK, MUTED, Figure, alt, si_scale, themed
from meshwright.report.marks import plot

CELL_PX = (84, 74)
LINE_PX = 13
SCHEME = ("#F7FBFF", "#D6E6F4", "#ABCFE6", "#6FB0D7", "#3787C0", "#105BA4")
DARK_FROM = 0.6
"""Share of the colour range above which text is white."""
EMPTY = "#EFEFEF"


class HeatCell(msgspec.Struct, frozen=True):
    """One cell: the value of its colour, and its text, whose first line is a headline; None if nothing runs."""

    row: str
    column: str
    value: float | None
    lines: Sequence[str]


def heatmap_figure(
    cells: Sequence[HeatCell],
    *,
    axes: Sequence[str],
    value_title: str,
    unit: str | None,
    title: str,
    subtitle: str = "",
) -> Figure:
    """Draws rows from top to bottom and columns from left to right, in the order of the cells.

    ``axes`` are the titles of rows and columns. Values are shares of 1 if ``unit`` is "%"; None gives them no prefix.
    """
    if not cells:
        raise InputError("there is no cell to draw. Give at least one.")
    rows, columns = list(dict.fromkeys(c.row for c in cells)), list(dict.fromkeys(c.column for c in cells))
    most = max((cell.value for cell in cells if cell.value is not None), default=1.0)
    scale, unit_name = (1.0, "") if unit in ("%", None) else si_scale(most, unit)
    lines = max(len(cell.lines) for cell in cells) - 1
    filled, empty = [], []
    for cell in cells:
        drawn, (headline, *below) = {"row": cell.row, "column": cell.column}, cell.lines
        if cell.value is None:
            empty.append(drawn | {"text": "\n".join(cell.lines)})
        else:
            ink = "white" if cell.value > DARK_FROM * most else INK
            words = {"headline": headline, "text": "\n".join(below), "ink": ink}
            filled.append(drawn | words | {"value": cell.value / scale})
    style = {"ticks": False, "domain": False}
    place = {
        "x": alt.X("column:N", sort=columns, title=axes[1], axis=alt.Axis(orient="bottom", labelAngle=0, **style)),
        "y": alt.Y("row:N", sort=rows, title=axes[0], axis=alt.Axis(labelLimit=200, **style)),
    }
    colors = alt.Scale(domain=[0, most / scale], range=SCHEME, interpolate="lab")
    legend = alt.Legend(format=".0%" if unit == "%" else ",.3~f", orient="right", gradientLength=160, tickCount=4)
    color = alt.Color(
        "value:Q", title=value_title + (f" ({unit_name})" if unit_name else ""), scale=colors, legend=legend
    )
    nothing, cell_marks = (plot(chosen).encode(**place) for chosen in (empty, filled))
    boxes = {"stroke": "white", "strokeWidth": 2}
    small = {"fontSize": 10, "lineBreak": "\n", "lineHeight": LINE_PX}
    inked = alt.Color("ink:N", scale=None)
    top = -(7 * lines + 3)
    chart = alt.layer(
        nothing.mark_rect(color=EMPTY, **boxes),
        nothing.mark_text(baseline="middle", fill=MUTED, **small).encode(text="text:N"),
        cell_marks.mark_rect(**boxes).encode(color=color),
        cell_marks.mark_text(fontSize=15, fontWeight="bold", baseline="middle", dy=top + 2).encode(
            text="headline:N", color=inked
        ),
        cell_marks.mark_text(baseline="top", dy=top + 14, **small).encode(text="text:N", color=inked),
    )
    height = max(CELL_PX[1], 34 + LINE_PX * lines)
    chart = chart.resolve_scale(color="independent")
    return themed(chart, title, subtitle, width=CELL_PX[0] * len(columns), height=height * len(rows))
