from meshwright.report.figure import save
from meshwright.report.plans.pareto import pareto_figure
from tests.charts import marks, panels, texts

MEMORY = (
    (1.0, 70e9, "1"),
    (1.2, 50e9, ""),
    (8.0, 10e9, "2"),
    (8.01, 9.9e9, "3"),
)
COST = ((1.0, 200.0, "16 chips"), (2.0, 180.0, "8 chips"))


def test_memory_is_drawn_by_steps_and_cost_by_a_line():
    figure = pareto_figure(MEMORY, COST, limit_bytes=80e9, title="t")
    assert [line["mark"]["interpolate"] for line in marks(figure, "line")] == ["step-after", "linear"]
    (limit,) = marks(figure, "rule")
    assert limit["encoding"]["y"] == {"datum": 80.0}
    assert limit["rows"] == [{"text": "what a chip holds: 80 GB"}]


def test_labels_that_would_collide_are_on_the_other_side():
    figure = pareto_figure((*MEMORY, (8.02, 9.8e9, "4")), title="t")
    assert texts(figure) == ["1", "2", "3"]
    assert [len(dots["rows"]) for dots in marks(figure, "circle")] == [5, 4]


def test_the_axis_of_time_is_logarithmic_over_a_wide_range():
    figures = [pareto_figure(points, title="t") for points in (MEMORY, MEMORY[:2])]
    assert [marks(figure)[0]["encoding"]["x"]["scale"].get("type") for figure in figures] == ["log", None]


def test_the_number_of_a_plan_at_the_limit_is_below_it():
    """Of a limit of 16.9 GB on 320 px a label above 16.8 or 16 GB would cross the dashed line, not one above 12."""
    points = [(1.0, 16.8e9, "1"), (1.2, 16.0e9, "2"), (1.5, 12e9, "3")]
    drawn = marks(pareto_figure(points, limit_bytes=16.9e9, title="t"), "text")
    below = {row["text"] for mark in drawn if mark["mark"].get("baseline") == "top" for row in mark["rows"]}
    above = {row["text"] for mark in drawn if mark["mark"].get("baseline") == "bottom" for row in mark["rows"]}
    assert (below, above) == ({"1", "2"}, {"3"})


def test_one_cost_is_no_frontier():
    assert len(panels(pareto_figure(MEMORY, COST[:1], title="t"))) == 1


def test_it_is_drawn(tmp_path):
    assert save(pareto_figure(MEMORY, COST, limit_bytes=80e9, title="t"), tmp_path / "p.png").stat().st_size > 5000
