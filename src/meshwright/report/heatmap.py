"""The heatmap of best plans: model by number of chips, MFU as colour, the mesh written into each cell."""

from collections.abc import Mapping, Sequence

import msgspec

from meshwright.core.errors import InputError
from meshwright.report.figure import INK, MUTED, Spec, headline, themed

SHORT: dict[str, str] = {
    "pipeline": "pp",
    "data": "dp",
    "fsdp": "fsdp",
    "expert": "ep",
    "context": "cp",
    "tensor": "tp",
}
"""Mesh axis -> how it is written where there is little room."""

CELL_PX = (84, 74)
SCHEME = ("#F7FBFF", "#D6E6F4", "#ABCFE6", "#6FB0D7", "#3787C0", "#105BA4")
DARK_FROM = 0.6
"""Share of the colour range from which text on it is white."""
EMPTY = "#EFEFEF"
MAX_CELLS = 600


class HeatCell(msgspec.Struct, frozen=True, kw_only=True):
    """One cell: a share (of 1) as its colour and headline, and lines below it. ``value`` None: nothing runs."""

    row: str
    column: str
    value: float | None
    lines: tuple[str, ...] = ()


def short_mesh(mesh: Mapping[str, int], separator: str = " ") -> str:
    """``"dp8 fsdp64 tp4"``: axes of several devices, major to minor; ``"1 chip"`` without any."""
    return separator.join(f"{SHORT[axis]}{size}" for axis, size in mesh.items() if size > 1) or "1 chip"


def heatmap_figure(
    cells: Sequence[HeatCell], *, row_title: str, column_title: str, value_title: str, title: str, subtitle: str = ""
) -> Spec:
    """Rows from top to bottom and columns from left to right in the order of the cells."""
    if not cells:
        raise InputError("There is no cell to draw. Give at least one.")
    if len(cells) > MAX_CELLS:
        raise InputError(f"{len(cells)} cells are too many to read. Draw at most {MAX_CELLS}.")
    rows, columns = ([*dict.fromkeys(getattr(cell, name) for cell in cells)] for name in ("row", "column"))
    most = max((cell.value for cell in cells if cell.value is not None), default=1.0)
    lines = max(len(cell.lines) for cell in cells)
    height = max(CELL_PX[1], 34 + 13 * lines)
    place = {
        "x": {
            "field": "column",
            "type": "nominal",
            "sort": columns,
            "title": column_title,
            "axis": {"orient": "bottom", "labelAngle": 0, "ticks": False, "domain": False},
        },
        "y": {
            "field": "row",
            "type": "nominal",
            "sort": rows,
            "title": row_title,
            "axis": {"ticks": False, "domain": False, "labelLimit": 200},
        },
    }
    return themed(
        {
            "title": headline(title, subtitle),
            "width": CELL_PX[0] * len(columns),
            "height": height * len(rows),
            "layer": [
                _empty_layer([cell for cell in cells if cell.value is None], place),
                *_filled_layers([cell for cell in cells if cell.value is not None], place, most, value_title, lines),
            ],
        }
    )


def _empty_layer(cells: Sequence[HeatCell], place: Spec) -> Spec:
    """Cells in which nothing runs, with their reason."""
    rows = [{"row": cell.row, "column": cell.column, "text": "\n".join(cell.lines)} for cell in cells]
    text = {"type": "text", "fontSize": 10, "fill": MUTED, "lineBreak": "\n", "lineHeight": 13, "baseline": "middle"}
    return {
        "data": {"values": rows},
        "encoding": place,
        "layer": [
            {"mark": {"type": "rect", "color": EMPTY, "stroke": "white", "strokeWidth": 2}},
            {"mark": text, "encoding": {"text": {"field": "text"}}},
        ],
    }


def _filled_layers(cells: Sequence[HeatCell], place: Spec, most: float, value_title: str, lines: int) -> list[Spec]:
    """The colour, the share in large digits and the small lines below it."""
    rows = [
        {
            "row": cell.row,
            "column": cell.column,
            "value": cell.value,
            "headline": f"{cell.value or 0:.0%}",
            "text": "\n".join(cell.lines),
            "ink": "white" if (cell.value or 0) > DARK_FROM * most else INK,
        }
        for cell in cells
    ]
    color = {
        "field": "value",
        "type": "quantitative",
        "title": value_title,
        "scale": {"domain": [0, most], "range": list(SCHEME), "interpolate": "lab"},
        "legend": {"format": ".0%", "orient": "right", "gradientLength": 160},
    }
    ink = {"field": "ink", "type": "nominal", "scale": None, "legend": None}
    up = -(7 * lines + 3)
    big = {"type": "text", "fontSize": 15, "fontWeight": "bold", "baseline": "middle", "dy": up + 2}
    small = {"type": "text", "fontSize": 10, "lineBreak": "\n", "lineHeight": 13, "baseline": "top", "dy": up + 14}
    return [
        {
            "data": {"values": rows},
            "encoding": place,
            "layer": [
                {"mark": {"type": "rect", "stroke": "white", "strokeWidth": 2}, "encoding": {"color": color}},
                {"mark": big, "encoding": {"text": {"field": "headline"}, "color": ink}},
                {"mark": small, "encoding": {"text": {"field": "text"}, "color": ink}},
            ],
            "resolve": {"scale": {"color": "independent"}},
        }
    ]
