"""The picture of a layout: the tiles of an array, their padding, and the order of elements inside a tile."""

import math
from functools import partial
from typing import NamedTuple

from meshwright.core.errors import InputError
from meshwright.core.units import format_bytes
from meshwright.hlo.layout import layout_text, tile_offset
from meshwright.hlo.shapes import Shape
from meshwright.report.arrays.canvas import Canvas, cell, grid, shown, texts_of
from meshwright.report.figure import INK, MUTED, Figure, Layer, alt, panel, themed

MAX_TILES = (6, 6)
"""Most tiles that are drawn down and across: the first ones, and the last one, which may be padded."""
MAX_CELLS = (8, 12)
"""Most elements of a tile that are drawn down and across."""
TILE_PX = (44, 92)
CELL_PX = (28, 46)
FILL = "#CFE5F3"
PADDING = "#F4C766"
SHADES = ("#DCEDF8", "#A9D4EF")
AXES = {"labelFontSize": 10, "labelColor": MUTED, "labelPadding": 6}


class _Plane(NamedTuple):
    """The two innermost dims in memory: their names, their sizes in elements, and the tile over them.

    ``copies`` is the number of such planes: the product of the other dims.
    """

    names: tuple[str, str]
    sizes: tuple[int, int]
    tile: tuple[int, int]
    copies: int


def tiling_figure(shape: Shape, *, name: str) -> Figure:
    """Draws the tiles over the array's innermost dims with their padding, and the order of elements in a tile.

    Raises InputError for an array without tiles.
    """
    if not shape.tiles:
        raise InputError(f"{name} is {layout_text(shape)}, which has no tiles to draw. Choose one of a TPU program.")
    plane = _plane(shape)
    waste = 1 - shape.num_bytes / shape.padded_bytes
    numbers, memory = format_bytes(shape.num_bytes), format_bytes(shape.padded_bytes)
    note = f"{numbers} of numbers, {memory} in memory ({waste:.1%} padding)"
    chart = alt.hconcat(_tiles_panel(plane), _tile_panel(shape, plane), spacing=48)
    return themed(chart.resolve_scale(color="independent"), f"{name}: {layout_text(shape)}", note)


def _plane(shape: Shape) -> _Plane:
    tile = (1, *shape.tiles[0])[-2:]
    sizes = (1, 1, *shape.physical)
    dims = ("", "", *(f"dim {dim}" for dim in shape.order))
    # A tile over one dim is a row; the other dims repeat the plane.
    one_dim = len(shape.tiles[0]) == 1
    names = ("", dims[-1]) if one_dim else (dims[-2], dims[-1])
    rows = 1 if one_dim else sizes[-2]
    return _Plane(names, (rows, sizes[-1]), (tile[0], tile[1]), math.prod(sizes) // (rows * sizes[-1]))


def _tiles_panel(plane: _Plane) -> Layer:
    counts = [math.ceil(size / tile) for size, tile in zip(plane.sizes, plane.tile, strict=True)]
    downs, acrosses = (shown(count, most) for count, most in zip(counts, MAX_TILES, strict=True))
    cells, gaps = grid(downs, acrosses)
    tiles, used = [], []
    for x, y, *tile in cells:
        height, width = (min(1.0, size / span - n) for size, span, n in zip(plane.sizes, plane.tile, tile, strict=True))
        tiles.append(cell(x + 0.02, y + 0.03, 0.96, 0.94))
        used.append(cell(x + 0.02, y + 0.03, 0.96 * width, 0.94 * height))
    rows, columns = (
        texts_of(numbers, partial(_range_label, size, tile))
        for numbers, size, tile in zip((downs, acrosses), plane.sizes, plane.tile, strict=True)
    )
    across_title = f"{plane.names[1]} ({plane.sizes[1]:,})"
    down_title = f"{plane.names[0]} ({plane.sizes[0]:,})" if plane.names[0] else ""
    canvas = Canvas.named(columns, rows, (across_title, down_title), **AXES)
    layers = [
        canvas.boxes(tiles, color=PADDING, stroke="white", strokeWidth=1),
        canvas.boxes(used, color=FILL, stroke="white", strokeWidth=1),
        canvas.words(gaps, fontSize=14, fill=INK),
    ]
    if any((tile["x2"], tile["y2"]) != (inside["x2"], inside["y2"]) for tile, inside in zip(tiles, used, strict=True)):
        layers += _legend(canvas, len(rows))
    total = counts[0] * counts[1] * plane.copies
    times = f", {plane.copies:,} times over for the other dims" if plane.copies > 1 else ""
    name = f"{total:,} {'tile' if total == 1 else 'tiles'} of {plane.tile[0]} x {plane.tile[1]}"
    note = f"{counts[0]:,} down, {counts[1]:,} across{times}"
    return panel(*layers, size=(TILE_PX[1] * len(columns), TILE_PX[0] * len(rows)), title=name, note=note)


def _legend(canvas: Canvas, bottom: int) -> list[Layer]:
    rows = [
        cell(0.1, bottom, 0, 0, color=FILL, text="elements"),
        cell(1.1, bottom, 0, 0, color=PADDING, text="padding"),
    ]
    squares = canvas.points(rows, shape="square", size=140, yOffset=22)
    words = canvas.words(rows, align="left", dx=12, yOffset=22, fill=MUTED)
    return [squares.encode(color=alt.Color("color:N", scale=None)), words]


def _tile_panel(shape: Shape, plane: _Plane) -> Layer:
    tiles = shape.tiles
    downs, acrosses = (shown(count, most) for count, most in zip(plane.tile, MAX_CELLS, strict=True))
    together = math.prod(tiles[-1]) if len(tiles) > 1 and tiles[-1][-1] == 1 else 1
    numbered, gaps = grid(downs, acrosses)
    cells = []
    for x, y, *position in numbered:
        offset = tile_offset(tiles, tuple(position[-len(tiles[0]) :]))
        shade = SHADES[(offset // together) % 2 if together > 1 else 0]
        cells.append(cell(x, y, text=str(offset), shade=shade))
    columns, rows = texts_of(acrosses), texts_of(downs)
    canvas = Canvas.named(columns, rows, ("column of the tile", "row of the tile"), **AXES)
    boxes = canvas.boxes(cells, stroke="white", strokeWidth=1).encode(color=alt.Color("shade:N", scale=None))
    packed = f"; {together} of one shade share a {together * shape.element_bits}-bit word" if together > 1 else ""
    note = f"each element's place in memory{packed}"
    layers = [boxes, canvas.words([*cells, *gaps], fontSize=10, fill=INK)]
    return panel(*layers, size=(CELL_PX[1] * len(columns), CELL_PX[0] * len(rows)), title="inside a tile", note=note)


def _range_label(size: int, tile: int, number: int) -> str:
    last = min((number + 1) * tile, size) - 1
    return f"{number * tile}" if last == number * tile else f"{number * tile}-{last}"
