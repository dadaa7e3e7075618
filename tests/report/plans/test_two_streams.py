from meshwright.cost.lanes import LaneSlices, Slice
from meshwright.report.figure import save
from meshwright.report.plans.timeline import two_streams_figure
from tests.charts import marks, texts

PAIR = LaneSlices(
    name="overlapped",
    slices=(
        Slice(lane="compute", what="forward", layer=0, start_s=0.0, end_s=0.01),
        Slice(lane="compute", what="backward", layer=0, start_s=0.01, end_s=0.019),
        Slice(lane="links", what="all-reduce", layer=0, start_s=0.015, end_s=0.02),
        Slice(lane="compute", what="forward", layer=1, start_s=0.0199, end_s=0.02),
    ),
)


def test_boxes_lie_on_their_lanes():
    rows = marks(two_streams_figure([PAIR, PAIR], title="t"), "bar")[0]["rows"]
    assert [(row["lane"], row["what"], row["start"]) for row in rows[:3]] == [
        ("0 compute", "forward", 0.0),
        ("0 compute", "backward", 10.0),
        ("0 links", "all-reduce", 15.0),
    ]
    assert {row["lane"] for row in rows[4:]} == {"1 compute", "1 links"}


def test_passes_carry_their_layer_where_there_is_room():
    rows = marks(two_streams_figure([PAIR], title="t"), "bar")[0]["rows"]
    assert [row["text"] for row in rows] == ["F1", "B1", "", ""]


def test_names_and_totals(tmp_path):
    figure = two_streams_figure([PAIR], title="t")
    assert texts(figure) == ["F1", "B1", "overlapped: compute", "links", "20 ms"]
    assert save(figure, tmp_path / "s.png").stat().st_size > 3000
