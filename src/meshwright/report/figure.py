"""What all pictures share: the theme, the colours, and writing a Vega-Lite spec to a file.

A picture is a Vega-Lite spec in a dict: the same dict becomes a PNG or SVG here and is drawn live on the page.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.core.errors import InputError
from meshwright.core.files import write_whole

Spec = dict[str, Any]

VEGA_LITE_VERSION = "5.21"
PNG_SCALE = 2.0

# Okabe and Ito, "Color Universal Design" (2008): told apart with every kind of colour blindness. The last four,
# for pictures of many parts, are from Paul Tol's "muted" scheme (2021).
PALETTE: tuple[str, ...] = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#F0E442",
    "#999999",
    "#332288",
    "#882255",
    "#44AA99",
    "#DDCC77",
)
INK = "#222222"
MUTED = "#767676"

_THEME: Spec = {
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
    "range": {"category": list(PALETTE)},
}


def themed(spec: Mapping[str, Any]) -> Spec:
    """The spec with the house's schema, background and theme, ready for `save` or the page."""
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "background": "white",
        "config": _THEME,
        **spec,
    }


def headline(title: str, subtitle: str = "") -> Spec:
    """A Vega-Lite title with its line of explanation; without one, the title alone."""
    return {"text": title, "subtitle": subtitle} if subtitle else {"text": title}


def text_layers(rows: Sequence[Spec], encoding: Mapping[str, Any], **mark: Any) -> list[Spec]:
    """Text over whatever lies below it: once with a wide white outline, once in its colour."""
    halo = {"stroke": "white", "strokeWidth": 4, "strokeJoin": "round", "opacity": 0.85}
    layers = [{"mark": {"type": "text", **mark, **extra}} for extra in (halo, {})]
    return [{"data": {"values": list(rows)}, "encoding": dict(encoding), "layer": layers}]


def si_scale(largest: float, unit: str) -> tuple[float, str]:
    """Divisor and name of the unit in which ``largest`` is between 1 and 1000: (1e-3, "ms") for 0.02 s.

    Whole axes are labelled in one unit, so the largest value decides. Zero and non-finite keep the bare unit.
    """
    prefixes = {-3: "n", -2: "u", -1: "m", 0: "", 1: "k", 2: "M", 3: "G", 4: "T", 5: "P", 6: "E"}
    if not math.isfinite(largest) or largest <= 0:
        return 1.0, unit
    power = max(-3, min(6, math.floor(math.log10(largest) / 3 + 1e-9)))
    if unit == "B":
        power = max(power, 0)
    return 1000.0**power, prefixes[power] + unit


def save(spec: Mapping[str, Any], path: str | Path) -> Path:
    """The path, after the picture was written to it: PNG, SVG or the spec itself, by the suffix.

    The file appears whole or not at all: a page that polls the folder never reads half a picture.
    """
    path = Path(path)
    renderer = _RENDERERS.get(path.suffix.lower())
    if renderer is None:
        raise InputError(f"Cannot write a picture as {path.name!r}. Use a name that ends in .png, .svg or .json.")
    if not path.parent.is_dir():
        raise InputError(f"Cannot write {path}: the folder {path.parent} does not exist. Make it first.")
    content = renderer(dict(spec))
    write_whole(path, lambda part: part.write_bytes(content))
    return path


def _png(spec: Spec) -> bytes:
    # Imported here: it is 50 MB of shared library, and tables need none of it.
    import vl_convert

    # No base URL is allowed: a picture never waits for the network.
    return vl_convert.vegalite_to_png(spec, vl_version=VEGA_LITE_VERSION, scale=PNG_SCALE, allowed_base_urls=[])


def _svg(spec: Spec) -> bytes:
    import vl_convert

    text: str = vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE_VERSION, allowed_base_urls=[])
    return text.encode()


def _json(spec: Spec) -> bytes:
    return (json.dumps(spec, indent=2, allow_nan=False) + "\n").encode()


_RENDERERS: dict[str, Callable[[Spec], bytes]] = {".png": _png, ".svg": _svg, ".json": _json}
