import math

import pytest

from meshwright.core.errors import InputError
from meshwright.report.figure import save
from meshwright.report.labels import Frame
from meshwright.report.roofline import HEIGHT_PX, WIDTH_PX, RooflinePoint, roofline_figure
from tests.charts import label_boxes, marks, overlaps, said

# A made-up chip: 100 TFLOP/s, so that the critical intensities are 100 and 1000 FLOPs per byte.
PEAK = 1e14
LINKS = {"HBM": 1e12, "ICI": 1e11}


def test_lines_rise_with_the_bandwidth_and_bend_at_the_critical_intensity():
    figure = roofline_figure(peak_flops_per_s=PEAK, link_bytes_per_s=LINKS)
    start, bend, end = marks(figure, "line")[0]["rows"]
    assert start["name"].startswith("HBM")
    assert start["y"] / start["x"] == pytest.approx(LINKS["HBM"])
    assert (bend["x"], bend["y"]) == (100.0, PEAK)
    assert end["y"] == PEAK
    assert end["x"] > 1000
    assert [row["text"] for rule in marks(figure, "rule") for row in rule["rows"]][:2] == ["HBM 100", "ICI 1000"]


def test_points_are_drawn_where_they_are(tmp_path):
    point = RooflinePoint(label="B=32", intensity=32.0, flops_per_s=3.2e13)
    figure = roofline_figure(peak_flops_per_s=PEAK, link_bytes_per_s=LINKS, points=[point], title="matmul")
    (dot,) = marks(figure, "circle")[0]["rows"]
    assert (dot["text"], dot["x"], dot["y"]) == ("B=32", 32.0, 3.2e13)
    assert said(figure)["title"]["text"] == "matmul"
    assert save(figure, tmp_path / "roofline.png").stat().st_size > 10_000


def test_a_point_far_below_stays_inside_the_axes():
    point = RooflinePoint(label="slow", intensity=1e-3, flops_per_s=10.0)
    figure = roofline_figure(peak_flops_per_s=PEAK, link_bytes_per_s=LINKS, points=[point])
    encoding = marks(figure)[0]["encoding"]
    assert encoding["x"]["scale"]["domain"][0] < 1e-3
    assert encoding["y"]["scale"]["domain"][0] < 10.0


def test_labels_of_a_knot_of_points_overlap_neither_each_other_nor_a_roof():
    """Four products of a layer on 8 emulated devices: their dots nearly coincide."""
    knot = [("queries", 10.2, 9.1e10), ("attention", 10.1, 9.3e10), ("MLP in", 10.9, 9.0e10), ("MLP out", 10.7, 9.6e10)]
    figure = roofline_figure(
        peak_flops_per_s=1e11, link_bytes_per_s={"memory": 1e10}, points=[RooflinePoint(*one) for one in knot]
    )
    boxes = label_boxes(figure)
    assert {name for name, *_ in knot} <= set(boxes)
    assert overlaps(figure) == []
    x, y = (marks(figure)[0]["encoding"][channel]["scale"]["domain"] for channel in "xy")
    frame = Frame(x=tuple(x), y=tuple(y), size=(WIDTH_PX, HEIGHT_PX))
    roof = frame.curve([(x[0], 1e10 * x[0]), (10.0, 1e11), (x[1], 1e11)])
    dots = frame.dots([one[1:] for one in knot], half=5)
    assert [name for name, box in boxes.items() if any(box.touches(other) for other in (*roof, *dots))] == []


def test_a_label_crosses_no_dashed_line():
    """v5e: the label of a product with B = 8 is wider than what is between the point and VMEM's critical intensity."""
    figure = roofline_figure(
        peak_flops_per_s=197e12,
        link_bytes_per_s={"HBM": 819e9, "VMEM": 18e12},
        points=[RooflinePoint("bf16[B,D] * bf16[D,F] -> bf16[B,F]", 8.0, 8 * 819e9)],
    )
    box = label_boxes(figure)["bf16[B,D] * bf16[D,F] -> bf16[B,F]"]
    low, high = marks(figure)[0]["encoding"]["x"]["scale"]["domain"]
    for critical in (197e12 / 18e12, 197e12 / 819e9):
        dashed = WIDTH_PX * math.log(critical / low) / math.log(high / low)
        assert abs(box.x - dashed) > box.across


@pytest.mark.parametrize("bad", [0.0, -1.0, float("inf"), float("nan")])
def test_what_a_logarithm_cannot_show_is_refused(bad):
    with pytest.raises(InputError, match=r"HBM: .* cannot be drawn on a logarithmic axis"):
        roofline_figure(peak_flops_per_s=PEAK, link_bytes_per_s={"HBM": bad})
    point = RooflinePoint(label="copy", intensity=bad, flops_per_s=1e9)
    with pytest.raises(InputError, match="copy: intensity"):
        roofline_figure(peak_flops_per_s=PEAK, link_bytes_per_s=LINKS, points=[point])
