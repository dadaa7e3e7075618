"""The picture of a compiled layer: boxes and lines that do not meet."""

from pathlib import Path

from meshwright.hlo.graph import ComputationGraph, Node, block_graphs
from meshwright.hlo.module import parse_module
from meshwright.report.arrays.hlo_graph import BOX_PX, graph_figure
from meshwright.report.figure import save

DATA = Path(__file__).parents[2] / "data" / "hlo"


def rows_of(panel, layer):
    return panel["layer"][layer]["data"]["values"]


def test_a_layer(tmp_path):
    graphs = block_graphs(parse_module((DATA / "cpu_layer.hlo").read_text()), "layer")
    spec = graph_figure(graphs, title="a layer")
    (panel,) = spec["hconcat"]
    boxes = {row["text"]: row for row in rows_of(panel, 2)}
    assert len(boxes) == 26
    assert boxes["q = einsum"]["y"] < boxes["o = attention"]["y"] < boxes["x2 = add"]["y"]
    for a in boxes.values():
        assert 0 <= a["x"] < a["x2"] <= panel["width"]
        for b in boxes.values():
            assert a is b or a["y"] != b["y"] or abs(a["x"] - b["x"]) >= BOX_PX[0]
    assert save(spec, tmp_path / "layer.png").read_bytes().startswith(b"\x89PNG")


def test_a_long_line_bends_beside_the_boxes_that_it_passes():
    nodes = tuple(Node(key, key, "other", 1) for key in "abc")
    graph = ComputationGraph("body", 3, nodes, (("a", "b"), ("b", "c"), ("a", "c")))
    (panel,) = graph_figure([graph], title="t")["hconcat"]
    long = [row for row in rows_of(panel, 0) if row["way"] == 2]
    (box,) = (row for row in rows_of(panel, 2) if row["text"] == "b")
    beside = [row["x"] for row in long if box["y"] <= row["y"] <= box["y2"]]
    assert beside
    assert all(x < box["x"] or x > box["x2"] for x in beside)


def test_a_node_that_nothing_feeds_stands_above_what_it_feeds():
    nodes = tuple(Node(key, key, "other", 1) for key in ("a", "b", "weight", "c"))
    graph = ComputationGraph("body", 1, nodes, (("a", "b"), ("b", "c"), ("weight", "c")))
    (panel,) = graph_figure([graph], title="t")["hconcat"]
    height = {row["text"]: row["y"] for row in rows_of(panel, 2)}
    assert height["weight"] == height["b"]
