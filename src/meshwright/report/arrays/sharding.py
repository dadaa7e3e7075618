"""The picture of who holds which block: one panel per array, one rectangle per block, one stripe per holder."""

import json
from collections.abc import Sequence

import msgspec

from meshwright.core.errors import InputError
from meshwright.report.figure import PALETTE, Spec, headline, text_layers, themed

MAX_BLOCKS_SHOWN = 16
MAX_STRIPES = 16
MAX_NAMED_COLORS = 8
PANEL_PX = (360, 240)
ROW_OF_PANELS_PX = 1100
CHARACTER_PX = 6.6
LINE_PX = 14


class ShardingPanel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The blocks of one array: ``cells[row][col]`` are the ids of the devices that hold that block.

    A 1-D array is one row with the label ``""``; the caller flattens leading dims of larger arrays into rows.
    """

    title: str
    cells: tuple[tuple[tuple[int, ...], ...], ...]
    row_labels: tuple[str, ...]
    col_labels: tuple[str, ...]
    row_title: str = ""
    col_title: str = ""
    note: str = ""


def sharding_figure(
    arrays: Sequence[ShardingPanel],
    *,
    title: str = "Who holds which block",
    subtitle: str = "A block carries the ids of its devices; several stripes are copies of the same block.",
) -> Spec:
    """One panel per array; every device has one colour in all panels, and every copy of a block one stripe.

    A dim of more than 16 blocks shows its first and last ones, with a gap between.
    """
    if not arrays:
        raise InputError("There is no array to draw. Give at least one.")
    for array in arrays:
        _check(array)
    last = max(device for array in arrays for row in array.cells for cell in row for device in cell)
    panels = [_panel(array, _color(last + 1)) for array in arrays]
    widest = max(panel["width"] for panel in panels) + 90
    return themed(
        {
            "title": headline(title, subtitle),
            "columns": max(1, min(len(panels), ROW_OF_PANELS_PX // widest)),
            "spacing": 40,
            "align": "each",
            "concat": panels,
        }
    )


def devices_text(devices: Sequence[int], max_characters: int) -> list[str]:
    """Lines that name the devices: ``["0-3"]``, ``["0,2,", "4,6"]``, or first, last and count when too many.

    The empty list when not even that fits into a line of ``max_characters``.
    """
    text = ",".join(_ranges(sorted(devices)))
    if len(text) <= max_characters:
        return [text]
    parts = text.split(",")
    half = (len(parts) + 1) // 2
    two = [",".join(parts[:half]) + ",", ",".join(parts[half:])]
    short = [f"{min(devices)}…{max(devices)}", f"({len(devices)})"]
    for lines in (two, short):
        if len(lines[1]) > 0 and max(map(len, lines)) <= max_characters:
            return lines
    return []


def _ranges(devices: Sequence[int]) -> list[str]:
    runs: list[list[int]] = []
    for device in devices:
        if runs and device == runs[-1][-1] + 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    # Two neighbours read better as "0,1" than as "0-1".
    return [
        text for run in runs for text in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(device) for device in run])
    ]


def _check(array: ShardingPanel) -> None:
    rows, cols = len(array.row_labels), len(array.col_labels)
    if not rows or not cols or len(array.cells) != rows or any(len(row) != cols for row in array.cells):
        widths = sorted({len(row) for row in array.cells})
        raise InputError(
            f"{array.title}: {len(array.cells)} rows of {widths} blocks do not match {rows} row labels"
            f" and {cols} column labels. Give one label per row and per column of blocks."
        )
    if any(not cell for row in array.cells for cell in row):
        raise InputError(f"{array.title}: a block is held by no device. Give at least one id per block.")


def _color(num_devices: int) -> Spec:
    shared: Spec = {"field": "device", "legend": None}
    if num_devices <= MAX_NAMED_COLORS:
        scale = {"domain": list(range(num_devices)), "range": list(PALETTE[:num_devices])}
        return {**shared, "type": "nominal", "scale": scale}
    return {**shared, "type": "quantitative", "scale": {"scheme": "viridis", "domain": [0, num_devices - 1]}}


def _shown(num_blocks: int) -> list[int | None]:
    """Indices of the blocks that are drawn, None for the gap."""
    if num_blocks <= MAX_BLOCKS_SHOWN:
        return list(range(num_blocks))
    half = MAX_BLOCKS_SHOWN // 2
    return [*range(half), None, *range(num_blocks - half + 1, num_blocks)]


def _panel(array: ShardingPanel, color: Spec) -> Spec:
    rows, cols = _shown(len(array.row_labels)), _shown(len(array.col_labels))
    cell_px = (max(38, min(110, PANEL_PX[0] // len(cols))), max(24, min(56, PANEL_PX[1] // len(rows))))
    stripes, outlines, texts = _blocks(array, rows, cols, cell_px)
    x = _axis("x", cols, array.col_labels, array.col_title, cell_px[0])
    y = _axis("y", rows, array.row_labels, array.row_title, cell_px[1])
    spans = {"x": x, "x2": {"field": "x2"}, "y": y, "y2": {"field": "y2"}}
    fill = {
        "data": {"values": stripes},
        "mark": {"type": "rect", "opacity": 0.65},
        "encoding": {**spans, "color": color},
    }
    frame = {
        "data": {"values": outlines},
        "mark": {"type": "rect", "filled": False, "stroke": "white", "strokeWidth": 2},
        "encoding": spans,
    }
    place = {"x": x, "y": y, "text": {"field": "lines"}}
    mark = {"fontSize": 11, "lineHeight": LINE_PX, "baseline": "middle"}
    return {
        "title": {**headline(array.title, array.note), "fontSize": 13, "subtitleFontSize": 11, "offset": 8},
        "width": len(cols) * cell_px[0],
        "height": len(rows) * cell_px[1],
        "layer": [fill, frame, *text_layers(texts, place, **mark)],
    }


def _blocks(
    array: ShardingPanel, rows: Sequence[int | None], cols: Sequence[int | None], cell_px: tuple[int, int]
) -> tuple[list[Spec], list[Spec], list[Spec]]:
    """Rows for the stripes, the outlines and the texts; the position of a block is its number in the panel."""
    stripes: list[Spec] = []
    outlines: list[Spec] = []
    texts: list[Spec] = []
    for y, row in enumerate(rows):
        for x, col in enumerate(cols):
            centre = {"x": x + 0.5, "y": y + 0.5}
            if row is None or col is None:
                texts.append({**centre, "lines": ["…"]})
                continue
            devices = array.cells[row][col]
            stripes += _stripes(devices, x, y)
            outlines.append({"x": x, "x2": x + 1, "y": y, "y2": y + 1})
            lines = devices_text(devices, int((cell_px[0] - 4) / CHARACTER_PX))
            if lines and len(lines) * LINE_PX <= cell_px[1] - 4:
                # Vega puts the first of several lines on the point: half of the others go above it.
                raised = (len(lines) - 1) * LINE_PX / 2 / cell_px[1]
                texts.append({**centre, "y": y + 0.5 - raised, "lines": lines})
    return stripes, outlines, texts


def _stripes(devices: Sequence[int], x: int, y: int) -> list[Spec]:
    ids = sorted(devices)
    if len(ids) > MAX_STRIPES:
        ids = [ids[i * (len(ids) - 1) // (MAX_STRIPES - 1)] for i in range(MAX_STRIPES)]
    width = 1 / len(ids)
    return [
        {"x": x + i * width, "x2": x + (i + 1) * width, "y": y, "y2": y + 1, "device": device}
        for i, device in enumerate(ids)
    ]


def _axis(channel: str, shown: Sequence[int | None], labels: Sequence[str], title: str, cell_px: int) -> Spec:
    names = ["…" if index is None else labels[index] for index in shown]
    axis: Spec = {
        "title": title or None,
        "titlePadding": 4,
        "values": [i + 0.5 for i in range(len(names))],
        "labelExpr": f"{json.dumps(names)}[floor(datum.value)]",
        "labelOverlap": False,
        "grid": False,
        "domain": False,
        "ticks": False,
    }
    if channel == "x":
        upright = max(map(len, names)) * CHARACTER_PX > cell_px
        axis |= {"orient": "top", "labelAngle": -60 if upright else 0, "labelAlign": "left" if upright else "center"}
    else:
        axis |= {"titleAngle": 0, "titleAlign": "right"}
    scale = {"domain": [0, len(names)], "nice": False, "reverse": channel == "y", "zero": False}
    return {"field": channel, "type": "quantitative", "scale": scale, "axis": axis}
