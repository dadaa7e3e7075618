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

    ``copies`` is the product of the outer dims.
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
    padding_share = 1 - shape.num_bytes / shape.padded_bytes
    data_text, memory_text = format_bytes(shape.num_bytes), format_bytes(shape.padded_bytes)
    note = f"{data_text} of numbers, {memory_text} in memory ({padding_share:.1%} padding)"
    chart = alt.hconcat(_tiles_panel(plane), _tile_panel(shape, plane), spacing=48)
    return themed(chart.resolve_scale(color="independent"), f"{name}: {layout_text(shape)}", note)


def _plane(shape: Shape) -> _Plane:
    tile = (1, *shape.tiles[0])[-2:]
    sizes = (1, 1, *shape.physical)
    dim_names = ("", "", *(f"dim {dim}" for dim in shape.order))
    # A tile over one dim is a row; the other dims repeat the plane.
    is_row = len(shape.tiles[0]) == 1
    plane_names = ("", dim_names[-1]) if is_row else (dim_names[-2], dim_names[-1])
    num_rows = 1 if is_row else sizes[-2]
    return _Plane(plane_names, (num_rows, sizes[-1]), (tile[0], tile[1]), math.prod(sizes) // (num_rows * sizes[-1]))


def _tiles_panel(plane: _Plane) -> Layer:
    tile_counts = [math.ceil(size / tile) for size, tile in zip(plane.sizes, plane.tile, strict=True)]
    row_numbers, col_numbers = (shown(count, limit) for count, limit in zip(tile_counts, MAX_TILES, strict=True))
    cells, gaps = grid(row_numbers, col_numbers)
    tiles, used_areas = [], []
    for x, y, *spot in cells:
        height, width = (min(1.0, size / span - n) for size, span, n in zip(plane.sizes, plane.tile, spot, strict=True))
        tiles.append(cell(x + 0.02, y + 0.03, 0.96, 0.94))
        used_areas.append(cell(x + 0.02, y + 0.03, 0.96 * width, 0.94 * height))
    row_names, col_names = (
        texts_of(numbers, partial(_range_label, size, tile))
        for numbers, size, tile in zip((row_numbers, col_numbers), plane.sizes, plane.tile, strict=True)
    )
    across_title = f"{plane.names[1]} ({plane.sizes[1]:,})"
    down_title = f"{plane.names[0]} ({plane.sizes[0]:,})" if plane.names[0] else ""
    canvas = Canvas.named(col_names, row_names, (across_title, down_title), **AXES)
    layers = [
        canvas.boxes(tiles, color=PADDING, stroke="white", strokeWidth=1),
        canvas.boxes(used_areas, color=FILL, stroke="white", strokeWidth=1),
        canvas.words(gaps, fontSize=14, fill=INK),
    ]
    if any((tile["x2"], tile["y2"]) != (area["x2"], area["y2"]) for tile, area in zip(tiles, used_areas, strict=True)):
        layers += _legend(canvas, len(row_names))
    num_tiles = tile_counts[0] * tile_counts[1] * plane.copies
    copies_text = f", {plane.copies:,} times over for the other dims" if plane.copies > 1 else ""
    panel_title = f"{num_tiles:,} {'tile' if num_tiles == 1 else 'tiles'} of {plane.tile[0]} x {plane.tile[1]}"
    note = f"{tile_counts[0]:,} down, {tile_counts[1]:,} across{copies_text}"
    return panel(*layers, size=(TILE_PX[1] * len(col_names), TILE_PX[0] * len(row_names)), title=panel_title, note=note)


def _legend(canvas: Canvas, bottom_row: int) -> list[Layer]:
    rows = [
        cell(0.1, bottom_row, 0, 0, color=FILL, text="elements"),
        cell(1.1, bottom_row, 0, 0, color=PADDING, text="padding"),
    ]
    squares = canvas.points(rows, shape="square", size=140, yOffset=22)
    words = canvas.words(rows, align="left", dx=12, yOffset=22, fill=MUTED)
    return [squares.encode(color=alt.Color("color:N", scale=None)), words]


def _tile_panel(shape: Shape, plane: _Plane) -> Layer:
    tiles = shape.tiles
    row_numbers, col_numbers = (shown(size, max_shown) for size, max_shown in zip(plane.tile, MAX_CELLS, strict=True))
    per_word = math.prod(tiles[-1]) if len(tiles) > 1 and tiles[-1][-1] == 1 else 1
    element_places, gaps = grid(row_numbers, col_numbers)
    element_boxes = []
    for x, y, *element_index in element_places:
        offset = tile_offset(tiles, tuple(element_index[-len(tiles[0]) :]))
        shade = SHADES[(offset // per_word) % 2 if per_word > 1 else 0]
        element_boxes.append(cell(x, y, text=str(offset), shade=shade))
    columns, rows = texts_of(col_numbers), texts_of(row_numbers)
    canvas = Canvas.named(columns, rows, ("column of the tile", "row of the tile"), **AXES)
    boxes = canvas.boxes(element_boxes, stroke="white", strokeWidth=1).encode(color=alt.Color("shade:N", scale=None))
    word_text = f"; {per_word} of one shade share a {per_word * shape.element_bits}-bit word" if per_word > 1 else ""
    note = f"each element's place in memory{word_text}"
    layers = [boxes, canvas.words([*element_boxes, *gaps], fontSize=10, fill=INK)]
    return panel(*layers, size=(CELL_PX[1] * len(columns), CELL_PX[0] * len(rows)), title="inside a tile", note=note)


def _range_label(size: int, tile_size: int, index: int) -> str:
    last_index = min((index + 1) * tile_size, size) - 1
    return f"{index * tile_size}" if last_index == index * tile_size else f"{index * tile_size}-{last_index}"
