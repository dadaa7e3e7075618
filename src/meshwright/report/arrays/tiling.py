"""The picture of a layout: which elements of an array share a tile, where padding lies, the order inside a tile."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from meshwright.core.errors import InputError
from meshwright.core.units import format_bytes
from meshwright.hlo.layout import layout_text, tile_offset
from meshwright.hlo.shapes import Shape
from meshwright.report.figure import INK, MUTED, Spec, headline, themed

MAX_TILES = (6, 6)
"""Tiles drawn down and across; those in between are left out, the last ones, which may be padded, are not."""
MAX_CELLS = (8, 12)
"""Elements of a tile drawn down and across."""
TILE_PX = (44, 92)
CELL_PX = (28, 46)
FILL = "#CFE5F3"
PADDING = "#F4C766"
SHADES = ("#DCEDF8", "#A9D4EF")


class _Plane(NamedTuple):
    """The two dims that lie innermost in memory, in elements: their names, sizes, and the tile over them."""

    names: tuple[str, str]
    sizes: tuple[int, int]
    tile: tuple[int, int]
    copies: int


def tiling_figure(shape: Shape, *, name: str) -> Spec:
    """Two panels: the tiles over the array's innermost dims with their padding, and the order of elements in a tile.

    Raises InputError for an array without tiles.
    """
    if not shape.tiles:
        raise InputError(
            f"{name} is {layout_text(shape)}, which has no tiles to draw. Choose an array of a TPU program."
        )
    plane = _plane(shape)
    waste = 1 - shape.num_bytes / shape.padded_bytes
    numbers, memory = format_bytes(shape.num_bytes), format_bytes(shape.padded_bytes)
    told = f"{numbers} of numbers, {memory} in memory ({waste:.1%} padding)"
    return themed(
        {
            "title": headline(f"{name}: {layout_text(shape)}", told),
            "hconcat": [_tiles_panel(plane), _tile_panel(shape, plane)],
            "spacing": 48,
        }
    )


def _plane(shape: Shape) -> _Plane:
    tile = (1, *shape.tiles[0])[-2:]
    sizes = (1, 1, *shape.physical)
    dims = ("", "", *(f"dim {dim}" for dim in shape.order))
    # A tile over one dim is a row; further dims outside the plane repeat it.
    one_dim = len(shape.tiles[0]) == 1
    names = ("", dims[-1]) if one_dim else (dims[-2], dims[-1])
    rows = 1 if one_dim else sizes[-2]
    return _Plane(names, (rows, sizes[-1]), (tile[0], tile[1]), math.prod(sizes) // (rows * sizes[-1]))


def _shown(count: int, most: int) -> list[int | None]:
    """Numbers of the tiles that are drawn, None for a gap."""
    return list(range(count)) if count <= most else [*range(most - 2), None, count - 1]


def _tiles_panel(plane: _Plane) -> Spec:
    counts = [math.ceil(size / tile) for size, tile in zip(plane.sizes, plane.tile, strict=True)]
    downs, acrosses = (_shown(count, most) for count, most in zip(counts, MAX_TILES, strict=True))
    tiles, used, words = [], [], []
    for y, down in enumerate(downs):
        for x, across in enumerate(acrosses):
            if down is None or across is None:
                words.append({"x": x + 0.5, "y": y + 0.5, "text": "..."})
                continue
            tiles.append({"x": x + 0.02, "x2": x + 0.98, "y": y + 0.03, "y2": y + 0.97})
            shares = [
                min(1.0, (size - number * tile) / tile)
                for size, tile, number in zip(plane.sizes, plane.tile, (down, across), strict=True)
            ]
            used.append(
                {"x": x + 0.02, "x2": x + 0.02 + 0.96 * shares[1], "y": y + 0.03, "y2": y + 0.03 + 0.94 * shares[0]}
            )
    domain = (len(acrosses), len(downs))
    at = _spans(*domain)
    columns = [_range_label(number, plane.sizes[1], plane.tile[1]) for number in acrosses]
    rows = [_range_label(number, plane.sizes[0], plane.tile[0]) for number in downs]
    total = counts[0] * counts[1] * plane.copies
    times = f", {plane.copies:,} times over for the other dims" if plane.copies > 1 else ""
    down_title = f"{plane.names[0]} ({plane.sizes[0]:,})" if plane.names[0] else ""
    return {
        "title": {
            **headline(
                f"{total:,} {'tile' if total == 1 else 'tiles'} of {plane.tile[0]} x {plane.tile[1]}",
                f"{counts[0]:,} down, {counts[1]:,} across{times}",
            ),
            "fontSize": 13,
        },
        "width": TILE_PX[1] * domain[0],
        "height": TILE_PX[0] * domain[1],
        "layer": [
            _rects(tiles, at, PADDING),
            _rects(used, at, FILL),
            _words(words, domain, 14),
            _labels(columns, domain, "x", f"{plane.names[1]} ({plane.sizes[1]:,})"),
            _labels(rows, domain, "y", down_title),
            *_legend(tiles, used, domain),
        ],
    }


def _legend(tiles: Sequence[Spec], used: Sequence[Spec], domain: tuple[int, int]) -> list[Spec]:
    """What the colours are, below the tiles; only where there is padding."""
    padded = any(a["x2"] - b["x2"] > 1e-6 or a["y2"] - b["y2"] > 1e-6 for a, b in zip(tiles, used, strict=True))
    if not padded:
        return []
    rows = [{"x": 0.1, "y": domain[1], "color": FILL, "text": "elements"}]
    rows.append({"x": 1.1, "y": domain[1], "color": PADDING, "text": "padding"})
    color = {"color": {"field": "color", "type": "nominal", "scale": None}}
    square = {"type": "point", "shape": "square", "filled": True, "size": 140, "opacity": 1, "yOffset": 22}
    word = {"type": "text", "align": "left", "baseline": "middle", "dx": 12, "yOffset": 22, "fill": MUTED}
    at = _point(*domain)
    return [
        {"data": {"values": rows}, "mark": square, "encoding": {**at, **color}},
        {"data": {"values": rows}, "mark": word, "encoding": {**at, "text": {"field": "text"}}},
    ]


def _tile_panel(shape: Shape, plane: _Plane) -> Spec:
    tiles = shape.tiles
    downs, acrosses = (_shown(count, most) for count, most in zip(plane.tile, MAX_CELLS, strict=True))
    together = math.prod(tiles[-1]) if len(tiles) > 1 and tiles[-1][-1] == 1 else 1
    cells, words = [], []
    for y, down in enumerate(downs):
        for x, across in enumerate(acrosses):
            if down is None or across is None:
                words.append({"x": x + 0.5, "y": y + 0.5, "text": "..."})
                continue
            position = (down, across)[-len(tiles[0]) :]
            offset = tile_offset(tiles, position)
            cells.append(
                {
                    "x": x,
                    "x2": x + 1,
                    "y": y,
                    "y2": y + 1,
                    "shade": SHADES[(offset // together) % 2 if together > 1 else 0],
                }
            )
            words.append({"x": x + 0.5, "y": y + 0.5, "text": str(offset)})
    domain = (len(acrosses), len(downs))
    packed = f"; {together} of one shade share a {together * shape.element_bits}-bit word" if together > 1 else ""
    at = _spans(*domain)
    layer = _rects(cells, at, FILL)
    layer["encoding"]["color"] = {"field": "shade", "type": "nominal", "scale": None}
    rows = ["..." if number is None else str(number) for number in downs]
    return {
        "title": {**headline("inside a tile", f"each element's place in memory{packed}"), "fontSize": 13},
        "width": CELL_PX[1] * domain[0],
        "height": CELL_PX[0] * domain[1],
        "layer": [
            layer,
            _words(words, domain, 10),
            _labels(["..." if n is None else str(n) for n in acrosses], domain, "x", "column of the tile"),
            _labels(rows, domain, "y", "row of the tile"),
        ],
    }


def _range_label(number: int | None, size: int, tile: int) -> str:
    if number is None:
        return "..."
    last = min((number + 1) * tile, size) - 1
    return f"{number * tile}" if last == number * tile else f"{number * tile}-{last}"


def _rects(rows: Sequence[Spec], at: Spec, color: str) -> Spec:
    return {
        "data": {"values": list(rows)},
        "mark": {"type": "rect", "color": color, "stroke": "white", "strokeWidth": 1},
        "encoding": dict(at),
    }


def _words(rows: Sequence[Spec], domain: tuple[int, int], size: int) -> Spec:
    return {
        "data": {"values": list(rows)},
        "mark": {"type": "text", "fontSize": size, "baseline": "middle", "fill": INK},
        "encoding": {**_point(*domain), "text": {"field": "text"}},
    }


def _labels(texts: Sequence[str], domain: tuple[int, int], channel: str, title: str) -> Spec:
    """Names of the columns above, or of the rows to the left, and what they count."""
    across = channel == "x"
    rows = [
        {"x": n + 0.5 if across else 0, "y": 0 if across else n + 0.5, "text": text} for n, text in enumerate(texts)
    ]
    place = {"dy": -6, "baseline": "bottom"} if across else {"dx": -6, "align": "right", "baseline": "middle"}
    middle = {"x": domain[0] / 2 if across else 0, "y": 0 if across else domain[1] / 2, "text": title}
    outside = (
        {"dy": -22, "baseline": "bottom"}
        if across
        else {"angle": 270, "dy": -20 - 6 * max(map(len, texts)), "baseline": "bottom"}
    )
    point = {**_point(*domain), "text": {"field": "text"}}
    return {
        "layer": [
            {
                "data": {"values": rows},
                "mark": {"type": "text", "fontSize": 10, "fill": MUTED, **place},
                "encoding": point,
            },
            {"data": {"values": [middle]}, "mark": {"type": "text", "fontSize": 12, **outside}, "encoding": point},
        ]
    }


def _spans(width: int, height: int) -> Spec:
    point = _point(width, height)
    return {**point, "x2": {"field": "x2"}, "y2": {"field": "y2"}}


def _point(width: int, height: int) -> Spec:
    scale = {"nice": False, "zero": False}
    return {
        "x": {"field": "x", "type": "quantitative", "axis": None, "scale": {"domain": [0, width], **scale}},
        "y": {
            "field": "y",
            "type": "quantitative",
            "axis": None,
            "scale": {"domain": [0, height], "reverse": True, **scale},
        },
    }
