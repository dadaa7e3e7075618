import pytest

from meshwright.core.errors import InputError
from meshwright.report.figure import INK, save
from meshwright.report.labels import Frame
from meshwright.report.plans.comm_compute import MEMORY_BOUND, PANEL_PX, CommsCurve, comm_compute_figure
from tests.charts import label_boxes, marks, panels, said

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


def test_a_curve_is_dotted_and_the_picture_says_why_where_memory_binds():
    tokens = (1e3, 1e4, 1e5, 1e6)
    bound = CommsCurve(
        name="FSDP alone",
        seconds=(1.0,) * 4,
        compute_s=(0.5, 0.5, 1.0, 10.0),
        memory_bound=2,
    )
    figure = comm_compute_figure(tokens, [bound], title="t", subtitle="s.")
    assert said(figure)["title"]["subtitle"] == f"s. {MEMORY_BOUND}"
    solid, dotted = marks(panels(figure)[1], "line")
    # the dotted part goes up to the first batch of which FLOPs bind
    assert [row["x"] for row in solid["rows"]] == [1e5, 1e6]
    assert [row["x"] for row in dotted["rows"]] == [1e3, 1e4, 1e5]
    assert "strokeDash" in dotted["mark"]
    assert "strokeDash" not in solid["mark"]
    # times of communication do not depend on the chip's memory
    assert len(marks(panels(figure)[0], "line")) == 2


def test_no_label_lies_on_a_curve():
    """Figure 16's shape: seven curves around the dashed one of compute."""
    tokens = [10 ** (5 + n / 8) for n in range(25)]
    compute = [t / 1e9 for t in tokens]
    curves = [
        CommsCurve(name=f"tensor {2**k}", seconds=[2e-3 / 2**k + 2**k * t / 3e10 for t in tokens], compute_s=compute)
        for k in range(7)
    ]
    times, ratios = panels(comm_compute_figure(tokens, curves, title="t"))
    for panel in (times, ratios):
        (x, y), boxes = ([marks(panel)[0]["encoding"][c]["scale"]["domain"] for c in "xy"]), label_boxes(panel)
        frame = Frame(x=tuple(x), y=tuple(y), size=PANEL_PX)
        drawn = [[(row["x"], row["y"]) for row in line["rows"]] for line in marks(panel, "line")]
        crossed = [
            name for name, box in boxes.items() for line in drawn for part in frame.curve(line) if box.touches(part)
        ]
        assert len(boxes) == 1
        assert crossed == []


def test_times_over_many_decades_are_labelled_with_their_units():
    far = CommsCurve(name="far", seconds=(1e-4, 1e-2, 10.0), compute_s=(1e-4, 1e-2, 1.0))
    times, _ = panels(comm_compute_figure(TOKENS, [far], title="t"))
    axis = marks(times)[0]["encoding"]["y"]["axis"]
    assert "'s'" in axis["labelExpr"]
    assert axis["values"][0] == 1e-4
