"""Marks that several pictures share: lines, boxes on bands, outlined text, reference lines, and their axes."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any, Literal

import msgspec

from meshwright.core.errors import InputError
from meshwright.report.answer import Facts
from meshwright.report.figure import COLORS, INK, PALETTE, Encoding, Layer, alt

Datum = Facts

DASHES = (5, 4)
TICK_LABEL = "datum.value < 1 ? toString(datum.value) : format(datum.value, '~s')"
"""Vega expression of a label: an SI prefix from 1 on; below 1 it is plain, as "100m" is hard to read."""
SECONDS_LABEL = "replace(format(datum.value, '~s'), 'µ', 'u') + 's'"
"""Vega expression of a label of seconds over many decades: 100us, 1ms, 10s."""
WHOLE_NUMBERS = "format(datum.value, ',d')"
DARK_BELOW = 136
"""Brightness (of 255) of a colour below which text on it is white."""


Points = Sequence[tuple[float, float]]
"""(x, y) of a line in order of x."""


class ReferenceLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A dashed line across the picture at a value of one axis, with its text at its start or end."""

    axis: Literal["x", "y"]
    value: float
    text: str = ""
    at: Literal["start", "end"] = "start"
    color: str = INK


def plot(rows: Iterable[Datum]) -> Layer:
    """Returns a chart of these rows without a mark."""
    return alt.Chart(alt.InlineData(values=tuple(rows)))


def labels(rows: Iterable[Datum], x: Any, y: Any, **style: Any) -> Layer:
    """Draws the field ``text`` with a wide white outline, so that it can be read on any background."""
    chart = plot(rows).encode(x=x, y=y, text="text:N")
    outline = chart.mark_text(**style, stroke="white", strokeWidth=4, strokeJoin="round", opacity=0.85)
    return alt.layer(outline, chart.mark_text(**style))


def color_by(field: str, colors: Mapping[str, str], **legend: Any) -> Encoding:
    """Returns an encoding of a field's names as colours, with a legend of squares in the order of ``colors``."""
    scale = alt.Scale(domain=list(colors), range=list(colors.values()))
    style = {"title": None, "symbolType": "square", **legend}
    return alt.Color(f"{field}:N", scale=scale, legend=alt.Legend(**style))


def stroke_colors(names: Iterable[str], **legend: Any) -> Encoding:
    """Returns an encoding of lines' names (the field ``name``) as colours of the palette."""
    return color_by("name", palette_of(names), symbolType="stroke", **legend)


def palette_of(names: Iterable[str]) -> dict[str, str]:
    """Maps each name to its colour of `COLORS` or, if it has none, to one of the palette that no other name has; the
    palette repeats after twelve."""
    color_by_name = {name: COLORS.get(name.removesuffix(" links")) for name in names}
    free_colors = cycle([color for color in PALETTE if color not in color_by_name.values()])
    return {name: color or next(free_colors) for name, color in color_by_name.items()}


def ink_on(color: str) -> str:
    """Returns the colour of text on a background: white on dark colours, ink on light ones."""
    red, green, blue = (int(color[digit : digit + 2], 16) for digit in (1, 3, 5))
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < DARK_BELOW else INK


# -- lines ----------------------------------------------------------------------------------------------


def lines(curves: Mapping[str, Points], x: Encoding, y: Encoding, color: Encoding, **style: Any) -> list[Layer]:
    """Draws a layer per curve; its rows have the fields ``x``, ``y`` and ``name``. Non-finite values leave a gap."""
    mark_style = {"strokeWidth": 2, "invalid": "break-paths-show-domains", **style}
    layers = []
    for name, points in curves.items():
        # JSON has no NaN; null breaks the line.
        rows = [{"name": name, "x": x_value, "y": b if math.isfinite(b) else None} for x_value, b in points]
        layers.append(plot(rows).mark_line(**mark_style).encode(x=x, y=y, color=color))
    return layers


def check_positive(values: Iterable[tuple[str, float]]) -> None:
    """Raises InputError for the first value that a logarithmic axis cannot show, with its name."""
    for name, value in values:
        if not (math.isfinite(value) and value > 0):
            raise InputError(f"{name}: {value:g} cannot be drawn on a logarithmic axis. Give positive numbers.")


def log_axis(channel: Any, field: str, domain: Sequence[float], title: str | None, **axis: Any) -> Any:
    """Returns a logarithmic axis over exactly this domain; ``channel`` is ``alt.X`` or ``alt.Y``."""
    options = {"values": log_ticks(*domain), "labelExpr": TICK_LABEL, **axis}
    scale = alt.Scale(type="log", domain=list(domain), nice=False)
    return channel(f"{field}:Q", title=title, scale=scale, axis=alt.Axis(**options))


def log_ticks(low: float, high: float) -> list[float]:
    """Returns the powers of ten between two numbers; over few decades also some of their multiples."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    # One or two labels do not show that the scale is logarithmic.
    multiples: tuple[float, ...] = (1,) if len(powers) > 4 else (1, 2, 5) if high >= 20 * low else (1, 2, 3, 4, 5, 7)
    if high < 3 * low:
        multiples = (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9)
    ticks = [float(f"{multiple * 10.0**power:.3g}") for power in powers for multiple in multiples]
    return [tick for tick in ticks if low <= tick <= high]


# -- boxes on bands -------------------------------------------------------------------------------------


def span(start: float, end: float, text: str, color: str, px: float, *, font: int = 11, **fields: Any) -> Datum:
    """Returns a row for `spans`; its text is empty if it does not fit at ``px`` pixels per unit of the axis."""
    text_fits = (end - start) * px >= 0.56 * font * len(text) + 2
    text_fields = {"text": text if text_fits else "", "ink": ink_on(color)}
    return {"start": start, "end": end, "middle": (start + end) / 2, **text_fields, **fields}


def spans(rows: Sequence[Datum], *, y: Any, x: Any, color: Any, band: float, edge: float = 1, font: int = 11) -> Layer:
    """Draws boxes from ``start`` to ``end`` with texts in the middle; ``band`` is their share of a row's height."""
    labelled_plot = plot(row for row in rows if row["text"])
    boxes = plot(rows).mark_bar(height=alt.RelativeBandSize(band=band), stroke="white", strokeWidth=edge)
    texts = labelled_plot.mark_text(fontSize=font, baseline="middle")
    return alt.layer(
        boxes.encode(y=y, x=x, x2="end", color=color),
        texts.encode(y=y, x="middle:Q", text="text:N", color=alt.Color("ink:N", scale=None)),
    )
