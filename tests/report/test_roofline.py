import itertools

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

# A made-up chip: 100 TFLOP/s, so that the critical intensities are 100 and 1000 FLOPs per byte.
PEAK = 1e14
LINKS = {"HBM": 1e12, "ICI": 1e11}


def rows(spec, layer):
    return spec["layer"][layer]["data"]["values"]


def test_lines_rise_with_the_bandwidth_and_bend_at_the_critical_intensity():
    spec = roofline_figure(peak_flops_per_s=PEAK, link_bytes_per_s=LINKS)
    hbm = [row for row in rows(spec, 0) if row["link"].startswith("HBM")]
    assert hbm[0]["flops_per_s"] / hbm[0]["intensity"] == pytest.approx(LINKS["HBM"])
    assert (hbm[1]["intensity"], hbm[1]["flops_per_s"]) == (100.0, PEAK)
    assert hbm[2]["flops_per_s"] == PEAK
    assert hbm[2]["intensity"] > 1000
    assert [row["text"] for row in rows(spec, 1)] == ["HBM 100", "ICI 1000"]


def test_points_are_drawn_where_they_are(tmp_path):
    point = RooflinePoint(label="B=32", intensity=32.0, flops_per_s=3.2e13)
    spec = roofline_figure(peak_flops_per_s=PEAK, link_bytes_per_s=LINKS, points=[point], title="matmul")
    drawn = [row for layer in spec["layer"] for row in layer["data"]["values"] if row.get("label") == "B=32"]
    assert {"label": "B=32", "intensity": 32.0, "flops_per_s": 3.2e13} in drawn
    assert spec["title"]["text"] == "matmul"
    assert save(spec, tmp_path / "roofline.png").stat().st_size > 10_000


def test_a_point_far_below_stays_inside_the_axes():
    point = RooflinePoint(label="slow", intensity=1e-3, flops_per_s=10.0)
    spec = roofline_figure(peak_flops_per_s=PEAK, link_bytes_per_s=LINKS, points=[point])
    encoding = spec["layer"][0]["encoding"]
    assert encoding["x"]["scale"]["domain"][0] < 1e-3
    assert encoding["y"]["scale"]["domain"][0] < 10.0


def test_labels_of_neighbours_do_not_overlap():
    points = [RooflinePoint(label=f"point {i}", intensity=100 * 1.05**i, flops_per_s=9e13) for i in range(6)]
    labels = _label_rows(points, [], _Frame(x=(1.0, 1e5), y=(1e10, 1e15)))
    assert len(labels) == 6
    for one, other in itertools.combinations(labels, 2):
        far_across = abs(one["x_px"] - other["x_px"]) >= len("point 0") * 6
        assert far_across or abs(one["y_px"] - other["y_px"]) >= LINE_PX


def test_pixels_run_over_the_whole_frame():
    frame = _Frame(x=(1.0, 1e4), y=(1e10, 1e14))
    assert frame.pixel(1.0, 1e10) == pytest.approx((0, HEIGHT_PX))
    assert frame.pixel(1e4, 1e14) == pytest.approx((WIDTH_PX, 0))


@pytest.mark.parametrize("bad", [0.0, -1.0, float("inf"), float("nan")])
def test_what_a_logarithm_cannot_show_is_refused(bad):
    with pytest.raises(InputError, match=r"positive numbers .* but HBM is"):
        roofline_figure(peak_flops_per_s=PEAK, link_bytes_per_s={"HBM": bad})
    point = RooflinePoint(label="copy", intensity=bad, flops_per_s=1e9)
    with pytest.raises(InputError, match="copy: intensity"):
        roofline_figure(peak_flops_per_s=PEAK, link_bytes_per_s=LINKS, points=[point])
