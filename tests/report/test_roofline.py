import itertools
import math

import pytest

from meshwright.core.errors import InputError
from meshwright.report.figure import save
from meshwright.report.roofline import (
    HEIGHT_PX,
    LINE_PX,
    WIDTH_PX,
    RooflinePoint,
    _Frame,
    _label_rows,
    roofline_figure,
)
from tests.charts import marks, said

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
    assert [row["text"] for row in marks(figure, "rule")[0]["rows"]] == ["HBM 100", "ICI 1000"]


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


def test_labels_of_neighbours_do_not_overlap():
    points = [RooflinePoint(label=f"point {i}", intensity=100 * 1.05**i, flops_per_s=9e13) for i in range(6)]
    labels = _label_rows(points, [], _Frame(x=(1.0, 1e5), y=(1e10, 1e15)))
    assert len(labels) == 6
    for one, other in itertools.combinations(labels, 2):
        far_across = abs(one["x_px"] - other["x_px"]) >= len("point 0") * 6
        assert far_across or abs(one["y_px"] - other["y_px"]) >= LINE_PX


def test_a_label_crosses_no_dashed_line():
    """v5e: the point of a product with B = 8 is left of VMEM's critical intensity, and its label right of it."""
    figure = roofline_figure(
        peak_flops_per_s=197e12,
        link_bytes_per_s={"HBM": 819e9, "VMEM": 18e12},
        points=[RooflinePoint("bf16[B,D] * bf16[D,F] -> bf16[B,F]", 8.0, 8 * 819e9)],
    )
    (row,) = next(mark["rows"] for mark in marks(figure, "text") if "x_px" in mark["rows"][0])
    dashed = 640 * math.log(197e12 / 18e12 / 1) / math.log(8 * 197e12 / 819e9 / 1)
    assert row["dot_x_px"] < dashed < row["x_px"]


def test_pixels_run_over_the_whole_frame():
    frame = _Frame(x=(1.0, 1e4), y=(1e10, 1e14))
    assert frame.pixel(1.0, 1e10) == pytest.approx((0, HEIGHT_PX))
    assert frame.pixel(1e4, 1e14) == pytest.approx((WIDTH_PX, 0))


@pytest.mark.parametrize("bad", [0.0, -1.0, float("inf"), float("nan")])
def test_what_a_logarithm_cannot_show_is_refused(bad):
    with pytest.raises(InputError, match=r"HBM: .* cannot be drawn on a logarithmic axis"):
        roofline_figure(peak_flops_per_s=PEAK, link_bytes_per_s={"HBM": bad})
    point = RooflinePoint(label="copy", intensity=bad, flops_per_s=1e9)
    with pytest.raises(InputError, match="copy: intensity"):
        roofline_figure(peak_flops_per_s=PEAK, link_bytes_per_s=LINKS, points=[point])
