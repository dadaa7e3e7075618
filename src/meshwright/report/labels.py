"""Where texts of a picture go: boxes in pixels, and for each text the first place that overlaps no other mark."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from meshwright.report.answer import Facts
from meshwright.report.figure import MUTED, Layer, alt
from meshwright.report.marks import DASHES, Datum, Points, ReferenceLine, labels, plot

FONT = 12
LETTER, NARROW, LINE = 0.58, 0.3, 1.25
"""Width of a letter, of a narrow one, and height of a line, in sizes of the font."""
GAP_PX, CURVE_PX = 9, 5
"""Distance of a text from its point, and length of the pieces that stand for a curve."""
RINGS, SHIFTS = 8, (0.25, 0.5, 0.75, -0.25, -0.5, 1.25)
"""Distances, a line apart, at which a place is looked for, and parts of its width by which a text is moved to the left
where it is no longer beside its point."""


def text_px(text: str, font: float = FONT) -> float:
    """Returns about how wide a text is."""
    return font * sum(NARROW if letter in " .,:;|[](){}'ijlftrI" else LETTER for letter in text)


class Area(msgspec.Struct, frozen=True):
    """A rectangle of the picture in pixels, by its middle and its halves."""

    x: float
    y: float
    across: float
    down: float

    def touches(self, other: "Area") -> bool:
        """True if the boxes share more than an edge."""
        is_near_across = abs(self.x - other.x) < self.across + other.across
        return is_near_across and abs(self.y - other.y) < self.down + other.down


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """The range of both axes, which of them are logarithmic, and the picture's size in pixels."""

    x: tuple[float, float]
    y: tuple[float, float]
    size: tuple[float, float]
    log: tuple[bool, bool] = (True, True)

    def pixel(self, x: float, y: float) -> tuple[float, float]:
        """Returns where the point is, in pixels from the left upper corner."""
        shares = []
        for value, bounds, is_log in zip((x, y), (self.x, self.y), self.log, strict=True):
            low, high, position = (math.log(max(number, 1e-300)) if is_log else number for number in (*bounds, value))
            shares.append((position - low) / (high - low))
        return shares[0] * self.size[0], (1 - shares[1]) * self.size[1]

    def holds(self, box: Area) -> bool:
        """True if the box is inside the picture; a little of it may be beyond the edges above and below."""
        width, height = self.size
        return box.across <= box.x <= width - box.across and box.down - 6 <= box.y <= height - box.down + 2

    def dots(self, points: Points, half: float = 6) -> list[Area]:
        """Returns a box around each point."""
        return [Area(*self.pixel(*point), half, half) for point in points]

    def curve(self, points: Points) -> list[Area]:
        """Returns boxes along a line through the points; one that is not finite leaves a gap."""
        areas = []
        for start, end in pairwise(points):
            if math.isfinite(start[1] + end[1]):
                (x, y), (x2, y2) = self.pixel(*start), self.pixel(*end)
                num_pieces = max(1, round(math.hypot(x2 - x, y2 - y) / CURVE_PX))
                shares = (n / num_pieces for n in range(num_pieces + 1))
                areas += [Area(x + (x2 - x) * share, y + (y2 - y) * share, 2, 2) for share in shares]
        return areas


def first_free(places: Sequence[Area], taken: list[Area], frame: Frame) -> Area:
    """Returns the first box inside the picture that touches none of those taken, else the one that touches fewest, and
    adds it to those taken."""
    boxes_inside = [box for box in places if frame.holds(box)] or places
    freest_box = min(boxes_inside, key=lambda box: sum(box.touches(area) for area in taken))
    taken.append(freest_box)
    return freest_box


def point_labels(rows: Iterable[Datum], frame: Frame, taken: list[Area], *, font: int = FONT, **style: Any) -> Layer:
    """Draws the text of each row beside its point (``x``, ``y``), where it overlaps nothing that is taken, with a line
    to its point if that is far; the boxes of the texts are added to those taken.

    A row with ``along``, the points of a curve, has its text beside any of them, the last that has room.
    """
    text_rows = []
    for row in sorted(rows, key=lambda row: frame.pixel(row["x"], row["y"])):
        dots = [frame.pixel(*point) for point in row.get("along", [(row["x"], row["y"])])][::-1]
        # far from its point a text may also begin beside what is upright, such as a reference line
        starts = [box.x + box.across + 3 for box in taken if box.down > frame.size[1] / 4]
        dot_of = {box: dot for dot in dots for box in _around(dot, row["text"], font, starts, 1 if dots[1:] else RINGS)}
        box = first_free([*dot_of], taken, frame)
        x, y = dot_of[box]
        line_end = {"near_x_px": min(max(x, box.x - box.across), box.x + box.across), "near_y_px": box.y}
        is_far = math.hypot(line_end["near_x_px"] - x, max(0.0, abs(box.y - y) - box.down)) > 2 * GAP_PX
        pixel_fields = {"x_px": box.x, "y_px": box.y, "dot_x_px": x, "dot_y_px": y, "far": is_far}
        text_rows.append({name: value for name, value in row.items() if name != "along"} | pixel_fields | line_end)
    rule_marks = plot(row for row in text_rows if row["far"]).mark_rule(color=MUTED, strokeWidth=1)
    return alt.layer(
        rule_marks.encode(**_pixels("dot_x_px", "dot_y_px"), x2="near_x_px", y2="near_y_px"),
        labels(text_rows, **_pixels("x_px", "y_px"), baseline="middle", fontSize=font, **style),
    )


def _pixels(x: str, y: str) -> Facts:
    """Returns the encodings of two fields as pixels of the picture."""
    return {"x": alt.X(f"{x}:Q", scale=None), "y": alt.Y(f"{y}:Q", scale=None)}


def _around(dot: tuple[float, float], text: str, font: int, edges_x: Sequence[float], num_rings: int) -> list[Area]:
    """Returns places beside a point: right and left of it, then above and below in rings, or from ``edges_x`` on."""
    x, y = dot
    width, half_height = text_px(text, font), LINE * font / 2
    positions = [(x + GAP_PX, y), (x - GAP_PX - width, y)]
    for ring in range(num_rings):
        distance = GAP_PX + ring * 2 * half_height
        starts_x = [x + 0.6 * GAP_PX, x - 0.6 * GAP_PX - width]
        starts_x += [*(x - width * share for share in SHIFTS), *edges_x] if ring else []
        positions += [(start, y + side * distance) for start in starts_x for side in (-1, 1)]
    return [Area(x_left + width / 2, y_middle, width / 2, half_height) for x_left, y_middle in positions]


def reference(line: ReferenceLine, frame: Frame, taken: list[Area], *, font: int = 11) -> Layer:
    """Draws a reference line from edge to edge, with its text along it where it overlaps nothing that is taken, as near
    to the line's start or end (``line.at``) as there is room."""
    is_flat = line.axis == "y"
    (width, height), half = frame.size, LINE * font / 2
    x, y = frame.pixel(frame.x[0] if is_flat else line.value, line.value if is_flat else frame.y[0])
    long = text_px(line.text, font) / 2
    free_px = max(0.0, (width if is_flat else height) - 2 * long - 12)
    steps = [6 + long + free_px * n / 20 for n in range(21)]
    steps = steps if (line.at == "start") == is_flat else steps[::-1]
    sides = (1 + half, -1 - half)
    places = [
        Area(px, y - side, long, half) if is_flat else Area(x + side, px, half, long) for side in sides for px in steps
    ]
    box = first_free(places, taken, frame)
    taken.append(Area(width / 2, y, width / 2, 1) if is_flat else Area(x, height / 2, 1, height / 2))
    rows = [{"text": line.text, "x_px": box.x, "y_px": box.y}]
    channel = {"y": alt.YDatum(line.value)} if is_flat else {"x": alt.XDatum(line.value)}
    rule = plot(rows).mark_rule(strokeDash=DASHES, color=MUTED).encode(**channel)
    style = {"baseline": "middle", "fontSize": font, "fill": line.color, "angle": 0 if is_flat else 270}
    return alt.layer(rule, labels(rows, **_pixels("x_px", "y_px"), **style))
