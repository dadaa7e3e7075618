"""The picture of a sharding: a panel per array, a rectangle per block, in the colour of its device if it has one."""

from collections.abc import Sequence

import msgspec

from meshwright.algebra.blocks import holders, local_shape
from meshwright.algebra.notation import ShardedArray
from meshwright.report.arrays.canvas import Canvas, cell, grid, names, shown, texts_of
from meshwright.report.figure import INK, PALETTE, Encoding, Figure, Layer, alt, panel, themed
from meshwright.report.marks import Datum, labels

MAX_BLOCKS_SHOWN = 16
LAST_BLOCKS = 7
# without the palette's grey, which is that of copies
DEVICE_COLORS = tuple(color for color in PALETTE if color != "#999999")[:8]
COPIES, SUMS = "a whole copy on each device that is listed", "a partial sum (\u03a3) on each device that is listed"
SHARED = {COPIES: "#DADADA", SUMS: "#FFFFFF"}
"""Blocks of several devices: they have no colour of a device and a dark edge, so that they do not look split."""
PANEL_PX = (360, 240)
ROW_OF_PANELS_PX = 1100
CHARACTER_PX = 6.6
LINE_PX = 14


class ShardingPanel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The blocks of one array: ``cells[row][col]`` are the ids of the devices that have the block.

    A 1-D array is one row with the label ``""``; the caller flattens leading dims of larger arrays into rows.
    With ``is_sum`` each device has a partial sum of its block, which is marked with a sigma.
    """

    title: str
    cells: tuple[tuple[tuple[int, ...], ...], ...]
    row_labels: tuple[str, ...]
    col_labels: tuple[str, ...]
    row_title: str = ""
    col_title: str = ""
    note: str = ""
    is_sum: bool = False


def array_panel(array: ShardedArray, dims: dict[str, int], mesh: dict[str, int], *, by: str = "") -> ShardingPanel:
    """Returns the blocks of an array for the picture: its last dim to the right, all other dims flattened downwards.

    ``by`` is the start of its note, for example the name of the step that made it.
    """
    devices_by_block = holders(array, mesh)
    row_indices = sorted({index[:-1] for index in devices_by_block})
    col_indices = sorted({index[-1:] for index in devices_by_block})
    block_shape = local_shape(array, dims, mesh)
    # Dims that are whole have one block: naming it in every row says nothing.
    split_dims = [i for i, axes in enumerate(array.axes[:-1]) if axes]
    return ShardingPanel(
        title=str(array),
        cells=tuple(tuple(tuple(devices_by_block[r + c]) for c in col_indices) for r in row_indices),
        row_labels=tuple(",".join(str(r[i]) for i in split_dims) for r in row_indices),
        col_labels=tuple(str(c[0]) if c else "" for c in col_indices),
        row_title=", ".join(array.dims[i] for i in split_dims),
        col_title=array.dims[-1] if array.dims else "",
        note=f"{by}{' x '.join(map(str, block_shape))} on each device" + (", partial sums" if array.unreduced else ""),
        is_sum=bool(array.unreduced),
    )


def sharding_figure(arrays: Sequence[ShardingPanel], *, title: str = "Who holds which block", subtitle: str) -> Figure:
    """Draws a panel per array; a block of one device has the device's colour in all panels, one of several is grey
    (copies) or white (partial sums), with a legend, and lists them.

    A dim of more than 16 blocks shows its first and last ones, with a gap between.
    """
    num_devices = 1 + max(device for array in arrays for row in array.cells for cell in row for device in cell)
    is_named, scale = num_devices <= len(DEVICE_COLORS), alt.Scale(scheme="viridis", domain=[0, num_devices - 1])
    if is_named:
        scale = alt.Scale(domain=list(range(num_devices)), range=DEVICE_COLORS[:num_devices])
    color = alt.Color("device:N" if is_named else "device:Q", scale=scale, legend=None)
    present_kinds = {_shared(array, devices) for array in arrays for row in array.cells for devices in row}
    fill_by_kind = {kind: fill for kind, fill in SHARED.items() if kind in present_kinds}
    fill_scale = alt.Scale(domain=list(fill_by_kind), range=list(fill_by_kind.values()))
    legend = alt.Legend(orient="bottom", title=None, symbolType="square", symbolStrokeColor=INK, direction="vertical")
    fill = alt.Fill("kind:N", scale=fill_scale, legend=legend) if fill_by_kind else None
    panels = [_panel(array, color, fill) for array in arrays]
    num_fitting = ROW_OF_PANELS_PX // (max(panel.width for panel in panels) + 90)
    chart = alt.concat(*panels, columns=max(1, min(len(panels), num_fitting)), spacing=40, align="each")
    return themed(chart, title, subtitle)


def devices_text(devices: Sequence[int], max_characters: int) -> list[str]:
    """Returns lines that name the devices: ``["0-3"]``, ``["0,2,", "4,6"]``, or for many ``["0…62", "(32)"]``.

    The list is empty if none of these fits into ``max_characters``.
    """
    runs: list[list[int]] = []
    for device in sorted(devices):
        if runs and device == runs[-1][-1] + 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    # Two neighbours read better as "0,1" than as "0-1".
    text = ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)
    if len(text) <= max_characters:
        return [text]
    run_texts = text.split(",")
    num_first = (len(run_texts) + 1) // 2
    two_lines = [",".join(run_texts[:num_first]) + ",", ",".join(run_texts[num_first:])]
    short_lines = [f"{min(devices)}…{max(devices)}", f"({len(devices)})"]
    for lines in (two_lines, short_lines):
        if len(lines[1]) > 0 and max(map(len, lines)) <= max_characters:
            return lines
    return []


def _shared(array: ShardingPanel, devices: Sequence[int]) -> str:
    """Returns the word of `SHARED` for a block on several devices, which are addends or copies; "" for one device."""
    return SUMS if array.is_sum else COPIES if len(devices) > 1 else ""


def _panel(array: ShardingPanel, color: Encoding, fill: Encoding | None) -> Layer:
    rows, cols = (shown(len(heads), MAX_BLOCKS_SHOWN, LAST_BLOCKS) for heads in (array.row_labels, array.col_labels))
    cell_px = (max(38, min(110, PANEL_PX[0] // len(cols))), max(24, min(56, PANEL_PX[1] // len(rows))))
    col_names = texts_of(cols, array.col_labels.__getitem__)
    row_names = texts_of(rows, array.row_labels.__getitem__)
    is_turned = max(len(name or "") for name in col_names) * CHARACTER_PX > cell_px[0]
    label_style = {"labelAngle": -60, "labelAlign": "left"} if is_turned else {"labelAngle": 0, "labelAlign": "center"}
    column_axis = names(col_names, array.col_title, orient="top", titlePadding=4, **label_style)
    row_axis = names(row_names, array.row_title, titleAngle=0, titleAlign="right", titlePadding=4)
    canvas = Canvas((0, len(cols)), (0, len(rows)), column_axis, row_axis)
    boxes, text_cells = _blocks(array, rows, cols, cell_px)
    own_boxes, shared_boxes = ([box for box in boxes if bool(box["kind"]) is is_shared] for is_shared in (False, True))
    layers = [
        canvas.boxes(own_boxes, opacity=0.65, stroke="white", strokeWidth=2).encode(color=color),
        *([canvas.boxes(shared_boxes, stroke=INK, strokeWidth=1.5).encode(fill=fill)] if fill is not None else []),
        labels(text_cells, **canvas.at("mid_x", "mid_y"), fontSize=11, lineHeight=LINE_PX, baseline="middle"),
    ]
    size = len(cols) * cell_px[0], len(rows) * cell_px[1]
    return panel(*layers, size=size, title=array.title, note=array.note)


def _blocks(
    array: ShardingPanel, rows: Sequence[int | None], cols: Sequence[int | None], cell_px: tuple[int, int]
) -> tuple[list[Datum], list[Datum]]:
    positions, text_cells = grid(rows, cols)
    blocks = []
    for x, y, row, col in positions:
        devices = array.cells[row][col]
        # a gap keeps the edges of neighbours apart
        blocks.append(cell(x + 0.02, y + 0.02, 0.96, 0.96, device=min(devices), kind=_shared(array, devices)))
        sigma = "\u03a3 " if array.is_sum else ""
        text_lines = devices_text(array.cells[row][col], int((cell_px[0] - 4) / CHARACTER_PX) - len(sigma))
        text_lines = [sigma + line if line_index == 0 else line for line_index, line in enumerate(text_lines)]
        if text_lines and len(text_lines) * LINE_PX <= cell_px[1] - 4:
            # Vega puts the first of several lines on the point: moving it up centres all of them.
            lift = (len(text_lines) - 1) * LINE_PX / 2 / cell_px[1]
            text_cells.append(cell(x, y - lift, text=text_lines))
    return blocks, text_cells
