import pytest

from meshwright.core.errors import InputError
from meshwright.report.figure import INK, save
from meshwright.report.plans.comm_compute import CommsCurve, comm_compute_figure
from tests.charts import marks, panels

TOKENS = (1e5, 1e6, 1e7)
CURVES = (
    CommsCurve(name="FSDP alone", seconds=(1.0, 1.0, 1.0), compute_s=(0.1, 1.0, 10.0), crossing=1e6),
    CommsCurve(name="best mesh", seconds=(0.5, 0.8, 1.0), compute_s=(0.1, 1.0, 10.0), crossing=7e5, strong=True),
    CommsCurve(name="none", seconds=(0.0, 0.0, 0.0), compute_s=(0.1, 1.0, 10.0)),
)


def test_times_and_ratios():
    times, ratios = panels(comm_compute_figure(TOKENS, CURVES, title="t"))
    drawn = [(row["name"], row["y"]) for line in marks(times, "line")[:2] for row in line["rows"]]
    assert drawn == [
        *(("FSDP alone", y) for y in (1.0, 1.0, 1.0)),
        *(("best mesh", y) for y in (0.5, 0.8, 1.0)),
    ]
    alone = [row["y"] for row in marks(ratios, "line")[0]["rows"]]
    assert alone == pytest.approx([0.1, 1.0, 10.0])


def test_crossings_lie_on_the_line_of_one():
    _, ratios = panels(comm_compute_figure(TOKENS, CURVES, title="t"))
    assert marks(ratios, "point")[0]["rows"] == [{"x": 1e6, "y": 1.0}, {"x": 7e5, "y": 1.0}]


def test_the_strong_curve_is_black():
    scale = marks(comm_compute_figure(TOKENS, CURVES, title="t"))[0]["encoding"]["color"]["scale"]
    assert dict(zip(scale["domain"], scale["range"], strict=True))["best mesh"] == INK
    assert "none" not in scale["domain"]


def test_it_is_drawn(tmp_path):
    assert save(comm_compute_figure(TOKENS, CURVES, title="t"), tmp_path / "c.png").stat().st_size > 5000
    with pytest.raises(InputError, match="no communication to draw"):
        comm_compute_figure(TOKENS, CURVES[2:], title="t")


def test_no_curve_leaves_the_picture():
    far = CommsCurve(name="far", seconds=(1e-6, 1.0, 1.0), compute_s=(0.1, 1.0, 1e4), strong=True)
    for part in panels(comm_compute_figure(TOKENS, (*CURVES[:2], far), title="t")):
        shown = [
            (line["encoding"]["y"]["scale"]["domain"], row["y"]) for line in marks(part, "line") for row in line["rows"]
        ]
        assert [y for (low, high), y in shown if not low <= y <= high] == []
