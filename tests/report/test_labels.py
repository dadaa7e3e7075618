"""Places of texts: pixels of points, boxes along curves, and the first place that is free."""

import pytest

from meshwright.report.labels import Area, Frame, first_free, point_labels, reference, text_px
from meshwright.report.marks import ReferenceLine
from tests.charts import label_boxes, marks, overlaps

FRAME = Frame(x=(1.0, 1e4), y=(1e10, 1e14), size=(640, 400))
LINEAR = Frame(x=(0.0, 10.0), y=(0.0, 4.0), size=(200, 100), log=(False, False))


def test_pixels_run_over_the_whole_frame():
    assert FRAME.pixel(1.0, 1e10) == pytest.approx((0, 400))
    assert FRAME.pixel(1e4, 1e14) == pytest.approx((640, 0))
    assert FRAME.pixel(1e2, 1e12) == pytest.approx((320, 200))  # the middle in logarithms
    assert LINEAR.pixel(2.5, 3.0) == pytest.approx((50, 25))


def test_boxes_touch_if_they_share_more_than_an_edge():
    box = Area(10, 10, 5, 5)
    assert box.touches(Area(19, 10, 5, 5))
    assert not box.touches(Area(20, 10, 5, 5))
    assert not box.touches(Area(10, 20, 5, 5))


def test_a_curve_is_covered_without_holes_and_has_its_gaps():
    boxes = LINEAR.curve([(0.0, 0.0), (5.0, 2.0), (6.0, float("nan")), (8.0, 1.0), (10.0, 1.0)])
    on_it, in_the_gap = LINEAR.pixel(3.3, 1.32), LINEAR.pixel(7.0, 1.5)
    assert any(box.touches(Area(*on_it, 1, 1)) for box in boxes)
    assert not any(box.touches(Area(*in_the_gap, 4, 4)) for box in boxes)


def test_the_first_free_place_is_taken_and_else_the_one_with_the_fewest_clashes():
    taken = [Area(50, 50, 20, 20), Area(52, 50, 20, 20)]
    outside, covered, free = Area(195, 50, 10, 5), Area(45, 50, 10, 5), Area(150, 50, 10, 5)
    assert first_free([outside, covered, free], taken, LINEAR) is free
    assert taken[-1] is free
    half_covered = Area(74, 50, 3, 3)  # touches the second box alone
    assert first_free([covered, half_covered], taken, LINEAR) is half_covered


def test_labels_of_points_close_together_overlap_neither_each_other_nor_the_dots():
    rows = [{"x": 100.0 * 1.03**n, "y": 9e11 * 1.02**n, "text": f"point {n}"} for n in range(8)]
    taken = FRAME.dots([(row["x"], row["y"]) for row in rows], half=4)
    dots = list(taken)
    drawn = point_labels(rows, FRAME, taken)
    boxes = label_boxes(drawn)
    assert len(boxes) == 8
    assert overlaps(drawn) == []
    assert not any(box.touches(dot) for box in boxes.values() for dot in dots)
    assert marks(drawn, "rule")[0]["rows"]  # far ones have a line to their dots


def test_a_text_of_a_curve_is_where_no_other_curve_is():
    line, other = [(1.0, 1e11), (1e4, 1e13)], [(1.0, 1e14), (1e4, 1e12)]
    points = [(10.0**n, 1e11 * 10 ** (n / 2)) for n in range(5)]
    row = {"x": 1e4, "y": 1e13, "text": "compute", "along": points}
    drawn = point_labels([row], FRAME, [*FRAME.curve(line), *FRAME.curve(other)])
    (box,) = label_boxes(drawn).values()
    assert not any(box.touches(part) for part in (*FRAME.curve(line), *FRAME.curve(other)))


@pytest.mark.parametrize(("axis", "value"), [("y", 1e12), ("x", 100.0)])
def test_the_text_of_a_reference_line_leaves_the_place_that_a_curve_has(axis, value):
    line = ReferenceLine(axis=axis, value=value, text="what a chip holds")
    across = [(1.0, 1.3e12), (200.0, 1.3e12)] if axis == "y" else [(110.0, 1e10), (110.0, 1e12)]
    free, crossed = (label_boxes(reference(line, FRAME, FRAME.curve(curve))) for curve in ([], across))
    assert not any(box.touches(part) for box in crossed.values() for part in FRAME.curve(across))
    assert any(box.touches(part) for box in free.values() for part in FRAME.curve(across))


def test_narrow_letters_take_less_room():
    assert text_px("bf16[B,D]", 10) == pytest.approx(10 * (5 * 0.58 + 4 * 0.3))
