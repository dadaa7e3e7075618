"""The heatmap of best plans: model by number of chips, MFU as colour, the mesh as text of a cell."""

from collections.abc import Mapping, Sequence

import msgspec

from meshwright.core.errors import InputError
from meshwright.report.figure import INK, MUTED, Figure, alt, themed
from meshwright.report.marks import plot

SHORT: dict[str, str] = {
    "pipeline": "pp",
    "data": "dp",
    "fsdp": "fsdp",
    "expert": "ep",
    "context": "cp",
    "tensor": "tp",
}
"""Mesh axis -> its abbreviation."""

CELL_PX = (84, 74)
LINE_PX = 13
SCHEME = ("#F7FBFF", "#D6E6F4", "#ABCFE6", "#6FB0D7", "#3787C0", "#105BA4")
DARK_FROM = 0.6
"""Share of the colour range above which text is white."""
EMPTY = "#EFEFEF"
MAX_CELLS = 600


class HeatCell(msgspec.Struct, frozen=True, kw_only=True):
    """One cell: a share (of 1) as colour and headline, and lines below it. ``value`` is None if nothing runs."""

    row: str
    column: str
    value: float | None
    lines: tuple[str, ...] = ()


def short_mesh(mesh: Mapping[str, int], separator: str = " ") -> str:
    """Returns ``"dp8 fsdp64 tp4"``: axes larger than 1, major to minor; ``"1 chip"`` without any."""
    return separator.join(f"{SHORT[axis]}{size}" for axis, size in mesh.items() if size > 1) or "1 chip"


def heatmap_figure(
    cells: Sequence[HeatCell], *, row_title: str, column_title: str, value_title: str, title: str, subtitle: str = ""
) -> Figure:
    """Draws rows from top to bottom and columns from left to right, in the order of the cells."""
    if not cells:
        raise InputError("There is no cell to draw. Give at least one.")
    if len(cells) > MAX_CELLS:
        raise InputError(f"{len(cells)} cells are too many to read. Draw at most {MAX_CELLS}.")
    rows, columns = list(dict.fromkeys(c.row for c in cells)), list(dict.fromkeys(c.column for c in cells))
    most = max((cell.value for cell in cells if cell.value is not None), default=1.0)
    lines = max(len(cell.lines) for cell in cells)
    filled, empty = [], []
    for cell in cells:
        drawn = {"row": cell.row, "column": cell.column, "text": "\n".join(cell.lines)}
        if cell.value is None:
            empty.append(drawn)
        else:
            ink = "white" if cell.value > DARK_FROM * most else INK
            filled.append(drawn | {"value": cell.value, "headline": f"{cell.value:.0%}", "ink": ink})
    axis = {"ticks": False, "domain": False}
    place = {
        "x": alt.X("column:N", sort=columns, title=column_title, axis=alt.Axis(orient="bottom", labelAngle=0, **axis)),
        "y": alt.Y("row:N", sort=rows, title=row_title, axis=alt.Axis(labelLimit=200, **axis)),
    }
    scale = alt.Scale(domain=[0, most], range=SCHEME, interpolate="lab")
    legend = alt.Legend(format=".0%", orient="right", gradientLength=160)
    nothing, cell_marks = (plot(chosen).encode(**place) for chosen in (empty, filled))
    boxes = {"stroke": "white", "strokeWidth": 2}
    words = {"fontSize": 10, "lineBreak": "\n", "lineHeight": LINE_PX}
    ink = alt.Color("ink:N", scale=None)
    top = -(7 * lines + 3)
    chart = alt.layer(
        nothing.mark_rect(color=EMPTY, **boxes),
        nothing.mark_text(baseline="middle", fill=MUTED, **words).encode(text="text:N"),
        cell_marks.mark_rect(**boxes).encode(color=alt.Color("value:Q", title=value_title, scale=scale, legend=legend)),
        cell_marks.mark_text(fontSize=15, fontWeight="bold", baseline="middle", dy=top + 2).encode(
            text="headline:N", color=ink
        ),
        cell_marks.mark_text(baseline="top", dy=top + 14, **words).encode(text="text:N", color=ink),
    )
    height = max(CELL_PX[1], 34 + LINE_PX * lines)
    chart = chart.resolve_scale(color="independent")
    return themed(chart, title, subtitle, width=CELL_PX[0] * len(columns), height=height * len(rows))
