"""Altair, the theme and colours of all pictures, and writing a chart to a file."""

import json
import math
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from meshwright.core.errors import InputError
from meshwright.core.extras import require
from meshwright.core.files import write_whole
from meshwright.report.answer import Facts

if TYPE_CHECKING:
    from altair import TopLevelMixin as Figure
else:
    Figure = Any

Layer = Any
"""A chart or layered chart, as part of a picture. Altair's own types reject options that are passed as a dict."""
Encoding = Any
"""An encoding: an axis or a colour, with its field."""


class _Altair:
    """Imports Altair, which takes 0.4 s, at the first use of one of its names: tables and text do not need it."""

    def __getattr__(self, name: str) -> Any:
        require("draw", "a picture")
        import altair
        from altair.utils import schemapi

        # Validating every object against the 2 MB schema takes seconds; tests validate whole charts.
        schemapi.disable_debug_mode()
        return getattr(altair, name)


alt: Any = _Altair()

PNG_SCALE = 2.0
SUBTITLE_LETTERS = 120
PICTURES = (".png", ".svg", ".json")
"""Suffixes of the files that `save` writes."""

# The first seven are Okabe and Ito's (2008), which colour-blind readers can tell apart; grey replaces their black.
# The last four, for pictures of many parts, are from Paul Tol's "muted" scheme (2021).
PALETTE: tuple[str, ...] = (
    *("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999"),
    *("#332288", "#882255", "#44AA99", "#DDCC77"),
)
INK = "#222222"
COLORS: dict[str, str] = {
    **{"weights": "#332288", "parameters": "#332288", "gradients": "#E69F00", "optimizer": "#8C7AC0"},
    **{"activations": "#009E73", "logits": "#882255", "loss head": "#882255", "workspace": "#999999"},
    **{"kv cache": "#CC79A7", "KV cache": "#CC79A7", "KV": "#CC79A7", "batch": "#F0E442", "temporaries": "#C0C0C0"},
    # work on the chip is blue, what waits for links is red, links by their mesh axis are green
    **{"compute": "#0072B2", "FLOPs": "#0072B2", "matmul": "#0072B2", "attention": "#56B4E9", "elementwise": "#A6D3F0"},
    **{"communication": "#D55E00", "exposed communication": "#D55E00", "network": "#D55E00", "whole step": INK},
    **{"hbm": "#44AA99", "bubble": "#F0E442", "host": "#DDCC77", "other": "#999999", "latency": "#CC79A7"},
    **{"data": "#009E73", "fsdp": "#44AA99", "tensor": "#7FCDB5", "context": "#B5DFC9", "pipeline": "#117733"},
    "islands": "#661100",
}
"""Colours of what several pictures show: each has one everywhere."""
MUTED = "#767676"

_THEME: Facts = {
    "font": "sans-serif",
    "padding": 14,
    "view": {"stroke": None},
    "title": {
        "fontSize": 16,
        "anchor": "start",
        "frame": "group",
        "offset": 14,
        "color": INK,
        "subtitleFontSize": 12,
        "subtitleColor": MUTED,
        "subtitlePadding": 5,
    },
    "axis": {
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "titlePadding": 8,
        "labelColor": INK,
        "titleColor": INK,
        "gridColor": "#E6E6E6",
        "domainColor": "#B0B0B0",
        "tickColor": "#B0B0B0",
    },
    "legend": {"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal", "labelLimit": 300},
    "text": {"fontSize": 12, "fill": INK},
}


def themed(chart: Layer, title: str, subtitle: str = "", **properties: Any) -> Figure:
    """Returns the chart with its title and the theme of all pictures, ready for `save`."""
    return chart.properties(title=headline(title, subtitle), background="white", **properties).configure(**_THEME)


def headline(title: str, subtitle: str = "", **style: Any) -> Any:
    """Returns a title with an explanation, if there is one, in lines of `SUBTITLE_LETTERS`."""
    lines = wrap(subtitle, SUBTITLE_LETTERS)
    return alt.TitleParams(title, subtitle=(lines if lines[1:] else subtitle) or alt.Undefined, **style)


def panel(*layers: Layer, size: tuple[float, float], title: str = "", note: str = "") -> Layer:
    """Returns layers as one part of a picture, ``size`` pixels wide and high, under a title and a note, if any."""
    heading = {"title": headline(title, note, fontSize=13, subtitleFontSize=11, offset=8)} if title else {}
    return alt.layer(*layers).properties(width=size[0], height=size[1], **heading)


def si_scale(largest: float, unit: str) -> tuple[float, str]:
    """Returns (divisor, unit) with which ``largest`` is between 1 and 1000: (1e-3, "ms") for 0.02 s.

    An axis has one unit, so its largest value decides. Zero, non-finite values and parts of a byte or of a
    dollar keep the bare unit.
    """
    prefix_by_power = {-3: "n", -2: "u", -1: "m", 0: "", 1: "k", 2: "M", 3: "G", 4: "T", 5: "P", 6: "E"}
    if not math.isfinite(largest) or largest <= 0:
        return 1.0, unit
    power = max(-3, min(6, math.floor(math.log10(largest) / 3 + 1e-9)))
    if unit in ("B", "$"):
        power = max(power, 0)
    return 1000.0**power, prefix_by_power[power] + unit


def save(figure: Figure, path: str | Path) -> Path:
    """Writes the picture as PNG, SVG or Vega-Lite by the suffix, and returns its path. Raises InputError for others.

    The file appears whole or not at all: a program that polls the folder never reads half a picture.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in PICTURES:
        raise InputError(f"cannot write a picture as {path.name!r}. Use a name that ends in .png, .svg or .json.")
    vega_spec = figure.to_dict(validate=False)
    if suffix == ".json":
        content = (json.dumps(vega_spec, indent=2, allow_nan=False) + "\n").encode()
    else:
        # Imported late: it is 50 MB of shared library.
        import vl_convert

        # No base URL is allowed: a picture never waits for the network.
        options = {"vl_version": alt.SCHEMA_VERSION[1:].rpartition(".")[0], "allowed_base_urls": []}
        if suffix == ".svg":
            content = vl_convert.vegalite_to_svg(vega_spec, **options).encode()
        else:
            content = vl_convert.vegalite_to_png(vega_spec, scale=PNG_SCALE, **options)
    write_whole(path, lambda part: part.write_bytes(content))
    return path
