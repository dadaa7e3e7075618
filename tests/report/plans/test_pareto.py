import pytest

from meshwright.core.errors import InputError
from meshwright.report.figure import save
from meshwright.report.plans.pareto import ParetoPoint, pareto_figure

MEMORY = (
    ParetoPoint(step_s=1.0, amount=70e9, label="1"),
    ParetoPoint(step_s=1.2, amount=50e9),
    ParetoPoint(step_s=8.0, amount=10e9, label="2"),
    ParetoPoint(step_s=8.01, amount=9.9e9, label="3"),
)
COST = (ParetoPoint(step_s=1.0, amount=200.0, label="16 chips"), ParetoPoint(step_s=2.0, amount=180.0, label="8 chips"))


def test_memory_is_drawn_by_steps_and_cost_by_a_line():
    memory, cost = pareto_figure(MEMORY, COST, limit_bytes=80e9, title="t")["hconcat"]
    marks = [layer.get("mark", {}).get("interpolate") for panel in (memory, cost) for layer in panel["layer"]]
    assert [mark for mark in marks if mark] == ["step-after", "linear"]
    assert memory["layer"][0]["data"]["values"] == [{"y": 80.0, "text": "what a chip holds: 80 GB"}]


def test_labels_that_would_collide_are_left_out():
    (memory,) = pareto_figure(MEMORY, title="t")["hconcat"]
    assert [row["label"] for row in memory["layer"][-1]["data"]["values"]] == ["1", "2"]
    assert len(memory["layer"][2]["data"]["values"]) == 3


def test_the_axis_of_time_is_logarithmic_over_a_wide_range():
    (wide,) = pareto_figure(MEMORY, title="t")["hconcat"]
    (narrow,) = pareto_figure(MEMORY[:2], title="t")["hconcat"]
    scales = [panel["layer"][0]["encoding"]["x"]["scale"].get("type") for panel in (wide, narrow)]
    assert scales == ["log", None]


def test_one_cost_is_no_frontier():
    assert len(pareto_figure(MEMORY, COST[:1], title="t")["hconcat"]) == 1


def test_it_is_drawn(tmp_path):
    assert save(pareto_figure(MEMORY, COST, limit_bytes=80e9, title="t"), tmp_path / "p.png").stat().st_size > 5000
    with pytest.raises(InputError, match="There is no plan to draw"):
        pareto_figure((), title="t")
