"""The picture of an engine's cache: the pages of each request, the pool of all pages, and the tree of shared ones."""

from collections.abc import Callable, Mapping, Sequence

from meshwright.core.errors import InputError
from meshwright.report.arrays.canvas import Canvas, cell, grid, shown, texts_of
from meshwright.report.figure import INK, MUTED, Figure, Layer, alt, panel, themed
from meshwright.report.marks import Datum, color_by, ink_on, plot
from meshwright.serve.sequences.prefix_tree import CacheSnapshot, TreePage

STATES = {
    **{"not shared": "#0072B2", "shared, in use": "#009E73", "shared, idle": "#B5DFC9"},
    **{"free": "#EDEDED", "on the host": "#E8C9DC"},
}
MAX_PAGES = 2048
MAX_REQUESTS, MAX_TABLE, MAX_NODES = 16, 12, 40
"""Requests, pages of a request, and pages of the tree that are drawn at most; others are left out."""
PAGE_PX = (32, 26)
NODE_PX = (188, 44)
NODE_LETTERS = (7, 15)
"""Letters of a longer text that are shown: those at its start, and at its end, where siblings differ."""
AXES = {"labelColor": MUTED, "labelFontSize": 11}


def cache_figure(
    cache: CacheSnapshot, *, text: Callable[[Sequence[int]], str] = lambda tokens: " ".join(map(str, tokens))
) -> Figure:
    """Draws whose each page is; a number is the same page in all parts, and ``text`` spells tokens.

    The pale part of a page is room for positions to come. Raises InputError for more pages than can be seen.
    """
    if cache.num_pages > MAX_PAGES:
        raise InputError(
            f"{cache.num_pages:,} pages; a picture shows {MAX_PAGES:,} at most. Give the engine fewer cache_bytes."
        )
    state_by_page = dict.fromkeys(range(cache.num_pages), "free")
    state_by_page |= {page: "not shared" for pages in cache.requests.values() for page in pages}
    state_by_page |= {node.page: _state(node) for node in cache.tree if node.page >= 0}
    all_states = [*state_by_page.values(), *(_state(node) for node in cache.tree if node.page < 0)]
    shown_colors = {state: color for state, color in STATES.items() if state in all_states}
    counts_text = "; ".join(f"{all_states.count(state):,} {state}" for state in shown_colors)
    pool_panels = [*([_tables(cache, state_by_page)] if cache.requests else []), _pool(state_by_page, shown_colors)]
    panels = [alt.hconcat(*pool_panels, spacing=40), *([_tree(cache.tree, text)] if cache.tree else [])]
    note = f"{cache.num_pages:,} pages of {cache.page_len} positions: {counts_text}"
    return themed(alt.vconcat(*panels, spacing=28), "Pages of the cache", note)


def _state(node: TreePage) -> str:
    return "on the host" if node.page < 0 else "shared, in use" if node.users else "shared, idle"


def _box(x: float, y: float, state: str, text: str = "", filled: float = 1) -> Datum:
    """Returns a row of a page in its colour, of which ``filled`` is drawn."""
    color = STATES[state]
    box = cell(x + 0.03, y + 0.06, 0.94 * filled, 0.88, state=state, color=color, text=text, ink=ink_on(color))
    pale_hex = "".join(f"{255 - 6 * (255 - int(color[digit : digit + 2], 16)) // 10:02X}" for digit in (1, 3, 5))
    return box | {"mid_x": x + 0.5, "pale": f"#{pale_hex}"}


def _field(name: str) -> alt.Color:
    return alt.Color(f"{name}:N", scale=None)


def _tables(cache: CacheSnapshot, state_by_page: Mapping[int, str]) -> Layer:
    request_ids = sorted(cache.requests)
    rows = shown(len(request_ids), MAX_REQUESTS)
    column_indices = shown(max(map(len, cache.requests.values())), MAX_TABLE, last=2)
    cells, gaps = grid(rows, column_indices)
    page_boxes, used_boxes = list[Datum](), list[Datum]()
    for x, y, row, column in cells:
        request_id = request_ids[row]
        if column < len(cache.requests[request_id]):
            page = cache.requests[request_id][column]
            filled_share = min(1.0, max(0.0, cache.lengths[request_id] / cache.page_len - column))
            page_boxes.append(_box(x, y, state_by_page[page], str(page)))
            used_boxes.append(_box(x, y, state_by_page[page], filled=filled_share))
    first_positions = texts_of(column_indices, lambda column: f"{column * cache.page_len}")
    canvas = Canvas.named(first_positions, texts_of(rows, lambda row: f"request {request_ids[row]}"), ("", ""), **AXES)
    layers = [
        canvas.boxes(page_boxes).encode(color=_field("pale")),
        canvas.boxes(used_boxes).encode(color=_field("color")),
        canvas.words([gap for gap in gaps if gap["x"] == 0 or gap["y"] == 0], fill=INK),
        canvas.words(page_boxes, fontSize=11).encode(color=_field("ink")),
    ]
    size = PAGE_PX[0] * len(column_indices), PAGE_PX[1] * len(rows)
    return panel(*layers, size=size, title="pages of each request", note="by the first position of each")


def _pool(state_of: Mapping[int, str], color_by_state: Mapping[str, str]) -> Layer:
    num_pages = len(state_of)
    pages_per_row = 16 if num_pages <= 256 else 32
    boxes = [_box(page % pages_per_row, page // pages_per_row, state_of[page], str(page)) for page in range(num_pages)]
    row_names: list[str | None] = [str(first_page) for first_page in range(0, num_pages, pages_per_row)]
    canvas = Canvas.named([str(column) for column in range(pages_per_row)], row_names, ("", ""), **AXES)
    layers = [
        canvas.boxes(boxes).encode(color=color_by("state", color_by_state, orient="bottom")),
        canvas.words([box for box in boxes if box["state"] != "free"], fontSize=11).encode(color=_field("ink")),
    ]
    size = PAGE_PX[0] * pages_per_row, PAGE_PX[1] * len(row_names)
    return panel(*layers, size=size, title="all pages", note="by number, as they lie in memory")


def _tree(tree: Sequence[TreePage], text: Callable[[Sequence[int]], str]) -> Layer:
    """Draws a column for each page of a prompt, and a row for each end of a branch."""
    coords, edges = list[tuple[int, int]](), list[Datum]()
    boxes, note_rows, row, num_columns = list[Datum](), list[Datum](), -1, 0
    num_first, num_last = NODE_LETTERS
    for node in tree[:MAX_NODES]:
        column, parent_row = (0, -1) if node.parent is None else (coords[node.parent][0] + 1, coords[node.parent][1])
        row = parent_row if parent_row >= 0 and (column, parent_row) not in coords else row + 1
        coords.append((column, row))
        num_columns = max(num_columns, column + 1)
        label = text(node.tokens).replace("\n", "\\n")
        # no SVG has control characters, and parts of a character are not worth a font of their own
        label = "".join(letter if letter.isprintable() and letter != "\ufffd" else "·" for letter in label)
        label = label if len(label) <= num_first + num_last + 1 else f"{label[:num_first]}…{label[-num_last:]}"
        box = _box(column, row, _state(node), label, filled=0.84) | {"mid_x": column + 0.425}
        boxes.append(box)
        users_text = "idle" if not node.users else f"{node.users} {'request' if node.users == 1 else 'requests'}"
        note_rows.append(box | {"text": "on the host" if node.page < 0 else f"page {node.page}, {users_text}"})
        if node.parent is not None:
            edges.append({"x": column - 0.18, "y": parent_row + 0.5, "x2": box["x"], "y2": row + 0.5})
    canvas = Canvas((0, num_columns), (0, row + 1))
    layers = [
        plot(edges).mark_rule(color=MUTED, strokeWidth=1.5).encode(**canvas.at(), x2="x2", y2="y2"),
        canvas.boxes(boxes, cornerRadius=4).encode(color=_field("color")),
        canvas.words(boxes, fontSize=11, dy=-7).encode(color=_field("ink")),
        canvas.words(note_rows, fontSize=10, dy=9).encode(color=_field("ink")),
    ]
    left_out_text = f"; {len(tree) - MAX_NODES:,} more are not drawn" if len(tree) > MAX_NODES else ""
    note = f"a box is a page of tokens that follow those to its left{left_out_text}"
    return panel(*layers, size=(NODE_PX[0] * num_columns, NODE_PX[1] * (row + 1)), title="prefix tree", note=note)
