"""Collectives measured: seconds over bytes, points with the fitted lines, one panel for each group of devices."""

import math
from collections.abc import Sequence

from meshwright.bench.results import Collective, CollectivesPart
from meshwright.core.dims import COLLECTIVES
from meshwright.report.figure import PALETTE, Spec, headline, themed

PANEL_PX = 250
HEIGHT_PX = 300
COLUMNS = 3
LINE_POINTS = 40
NAMES = {
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "all_reduce": "AllReduce",
    "all_to_all": "AllToAll",
    "permute": "Permute",
}


def collectives_figure(part: CollectivesPart, *, subtitle: str) -> Spec:
    """Panels of equal axes, both logarithmic; a line of latency and rate bends there."""
    found = part.collectives
    groups = list(dict.fromkeys((one.group.axis, one.group.size) for one in found))
    axes = _axes(found)
    panels = [
        _panel([one for one in found if (one.group.axis, one.group.size) == group], axes, first=not index % COLUMNS)
        for index, group in enumerate(groups)
    ]
    return themed(
        {
            "title": headline("Collectives: measured, and the fitted latency and rate", subtitle),
            "columns": COLUMNS,
            "concat": panels,
        }
    )


def _axes(found: Sequence[Collective]) -> dict[str, Spec]:
    sizes = [time.array_bytes for one in found for time in one.times]
    # An axis of microseconds: the smallest collectives take a few, the largest some thousands.
    times = [us for one in found for time in one.times for us in (time.seconds.median_s * 1e6, time.fitted_s * 1e6)]
    return {
        "x": _axis("bytes", (min(sizes) / 1.5, max(sizes) * 1.5), "bytes of the array"),
        "y": _axis("us", (min(times) / 1.5, max(times) * 1.5), "time (us)"),
    }


def _axis(field: str, domain: tuple[float, float], title: str) -> Spec:
    powers = range(math.ceil(math.log10(domain[0])), math.floor(math.log10(domain[1])) + 1)
    axis = {"title": title, "values": [10.0**power for power in powers], "format": "~s"}
    scale = {"type": "log", "domain": list(domain), "nice": False}
    return {"field": field, "type": "quantitative", "scale": scale, "axis": axis}


def _panel(found: Sequence[Collective], axes: dict[str, Spec], *, first: bool) -> Spec:
    group = found[0].group
    name = f"{group.size} devices" if group.axis == "group" else f"{group.axis}, {group.size} devices"
    points = [
        {"kind": NAMES[one.kind], "bytes": time.array_bytes, "us": time.seconds.median_s * 1e6}
        for one in found
        for time in one.times
    ]
    y = axes["y"] if first else {**axes["y"], "axis": {**axes["y"]["axis"], "title": None}}
    color = {
        "field": "kind",
        "type": "nominal",
        "scale": {"domain": [NAMES[kind] for kind in COLLECTIVES], "range": list(PALETTE[: len(NAMES)])},
        "legend": {"title": None, "orient": "bottom", "symbolType": "circle", "symbolOpacity": 1},
    }
    encoding = {"x": axes["x"], "y": y, "color": color}
    return {
        "title": {"text": name, "fontSize": 13, "anchor": "middle", "offset": 6},
        "width": PANEL_PX,
        "height": HEIGHT_PX,
        "layer": [
            {"data": {"values": _lines(found)}, "mark": {"type": "line", "strokeWidth": 1.8}, "encoding": encoding},
            {
                "data": {"values": points},
                "mark": {"type": "point", "filled": True, "size": 45, "opacity": 0.9},
                "encoding": encoding,
            },
        ],
    }


def _lines(found: Sequence[Collective]) -> list[Spec]:
    """Points of the fitted lines, between the smallest and the largest size."""
    rows = []
    for one in found:
        first, last = one.times[0], one.times[-1]
        slope = (last.fitted_s - first.fitted_s) / (last.array_bytes - first.array_bytes)
        for step in range(LINE_POINTS + 1):
            size = first.array_bytes * (last.array_bytes / first.array_bytes) ** (step / LINE_POINTS)
            seconds = first.fitted_s + slope * (size - first.array_bytes)
            rows.append({"kind": NAMES[one.kind], "bytes": size, "us": seconds * 1e6})
    return rows
