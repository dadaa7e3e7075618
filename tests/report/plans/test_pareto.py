import pytest

from meshwright.core.errors import InputError
from meshwright.report.figure import save
from meshwright.report.plans.pareto import WHOLE, pareto_figure, services_figure
from tests.charts import label_boxes, marks, overlaps, panels, texts

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
    (limit,) = [rule for rule in marks(figure, "rule") if "datum" in rule["encoding"].get("y", {})]
    assert limit["encoding"]["y"] == {"datum": 80.0}
    assert [row["text"] for row in limit["rows"]] == ["what a chip holds: 80 GB"]


def test_every_plan_of_the_table_has_its_number_and_none_overlap():
    """Eighteen plans, of which six take nearly the same time, as of Llama 3 8B on 64 H100."""
    close = [(2.0 + 0.02 * n, 60e9 / 1.2**n, str(n + 1)) for n in range(12)]
    apart = [(2.6 + 0.8 * n, 5e9 / 1.1**n, str(n + 13)) for n in range(6)]
    figure = pareto_figure([*close, *apart], limit_bytes=80e9, title="t")
    assert {*map(str, range(1, 19)), "what a chip holds: 80 GB"} == set(texts(figure))
    assert overlaps(figure) == []
    assert [len(dots["rows"]) for dots in marks(figure, "circle")] == [18, 18]


def test_the_axis_of_time_is_logarithmic_over_a_wide_range():
    figures = [pareto_figure(points, title="t") for points in (MEMORY, MEMORY[:2])]
    assert [marks(figure)[0]["encoding"]["x"]["scale"].get("type") for figure in figures] == ["log", None]


def test_the_number_of_a_plan_at_the_limit_does_not_cross_its_line():
    points = [(1.0, 16.8e9, "1"), (1.2, 16.0e9, "2"), (1.5, 12e9, "3")]
    figure = pareto_figure(points, limit_bytes=16.9e9, title="t")
    (_, top), boxes = marks(figure)[0]["encoding"]["y"]["scale"]["domain"], label_boxes(figure)
    line = 320 * (1 - 16.9 / top)
    assert [name for name, box in boxes.items() if abs(box.y - line) < box.down] == []


def test_one_cost_is_no_frontier():
    assert len(panels(pareto_figure(MEMORY, COST[:1], title="t"))) == 1


def test_it_is_drawn(tmp_path):
    assert save(pareto_figure(MEMORY, COST, limit_bytes=80e9, title="t"), tmp_path / "p.png").stat().st_size > 5000


CURVES = {"bf16": [(10.0, 5.0), (20.0, 50.0)], "int8": [(5.0, 8.0), (18.0, 90.0)]}
SPLIT = {"KV": [(5.0, 1.0), (18.0, 9.0)], "FLOPs": [(5.0, 0.001), (18.0, 2.0)], "stragglers": [(5.0, 0.0), (18.0, 0.0)]}


def test_the_chosen_service_and_the_split():
    above, below = panels(services_figure(CURVES, SPLIT, (18.0, 90.0, "the first: 2 x tp4"), title="services"))
    (ring,) = marks(above, "point")
    assert [(row["x"], row["y"]) for row in ring["rows"]] == [(18.0, 90.0)]
    assert texts(above) == ["the first: 2 x tp4"]
    assert [line["rows"][0]["name"] for line in marks(above, "line")] == ["bf16", "int8"]
    drawn = {line["rows"][0]["name"]: [(row["x"], row["y"]) for row in line["rows"]] for line in marks(below, "line")}
    assert drawn == {
        WHOLE: [(5.0, 5.0), (18.0, 18.0)],
        "KV": [(5.0, 1.0), (18.0, 9.0)],
        "FLOPs": [(5.0, None), (18.0, 2.0)],
    }


def test_a_logarithmic_axis_has_no_zero():
    with pytest.raises(InputError, match="bf16: 0 cannot be drawn"):
        services_figure({"bf16": [(0.0, 5.0)]}, SPLIT, (1.0, 1.0, "x"), title="services")
