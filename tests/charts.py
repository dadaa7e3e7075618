"""What a chart says, as plain data that Altair's schema accepts."""

from itertools import combinations
from typing import Any

from meshwright.report.labels import LINE, Area, text_px

PANELS = ("layer", "concat", "hconcat", "vconcat")


def said(figure: Any) -> dict[str, Any]:
    """The chart as Vega-Lite, every part of it with its own ``rows`` of data."""
    spec = figure.to_dict(validate=True)
    return _with_rows(spec, spec.get("datasets", {}), [])


def _with_rows(node: dict[str, Any], datasets: dict[str, Any], rows: list[Any]) -> dict[str, Any]:
    rows = list(datasets[node["data"]["name"]]) if "data" in node else rows
    below = {kind: [_with_rows(part, datasets, rows) for part in node[kind]] for kind in PANELS if kind in node}
    return {**node, **below, "rows": rows}


def panels(figure: Any) -> list[dict[str, Any]]:
    """The charts that stand beside each other."""
    spec = said(figure)
    return spec.get("concat") or spec["hconcat"]


def marks(chart: Any, kind: str = "") -> list[dict[str, Any]]:
    """The layers of a chart or of a part of one, from below; with ``kind`` those with this mark."""
    node = chart if isinstance(chart, dict) else said(chart)
    parts = [part for kind_of in PANELS for part in node.get(kind_of, ())]
    found = [mark for part in parts for mark in marks(part)] if parts else [node]
    return [mark for mark in found if not kind or mark["mark"]["type"] == kind]


def texts(chart: Any) -> list[str]:
    """Every text that stands in the chart, once."""
    return list(dict.fromkeys(row["text"] for mark in marks(chart, "text") for row in mark["rows"]))


def label_boxes(chart: Any) -> dict[str, Area]:
    """Text -> its box in pixels, of all labels that were placed by pixels; computed from the drawn text, its size and
    its middle, not from what the placement reserved."""
    found = {}
    for mark in marks(chart, "text"):
        size, upright = mark["mark"].get("fontSize", 12), mark["mark"].get("angle", 0) == 270
        for row in mark["rows"]:
            if "x_px" in row:
                half = text_px(row["text"], size) / 2, LINE * size / 2
                found[row["text"]] = Area(row["x_px"], row["y_px"], *(half[::-1] if upright else half))
    return found


def overlaps(chart: Any) -> list[tuple[str, str]]:
    """The pairs of placed labels that overlap."""
    boxes = label_boxes(chart)
    return [(one, other) for one, other in combinations(boxes, 2) if boxes[one].touches(boxes[other])]
