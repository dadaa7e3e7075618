import pytest

from meshwright.core.errors import InputError
from meshwright.report.bars import memory_figure, step_breakdown_figure
from meshwright.report.figure import save

STEP = {"predicted": {"compute": 0.2, "ici": 0.05, "hbm": 0.0}, "measured": {"step": 0.3}}


def values(spec, layer):
    return spec["layer"][layer]["data"]["values"]


def test_parts_are_stacked_in_order_in_one_unit():
    spec = step_breakdown_figure(STEP)
    drawn = [(row["bar"], row["part"], row["start"], row["end"]) for row in values(spec, 0)]
    assert drawn == [
        ("predicted", "compute", 0.0, pytest.approx(200)),
        ("predicted", "ici", pytest.approx(200), pytest.approx(250)),
        ("measured", "step", 0.0, pytest.approx(300)),
    ]
    encoding = spec["layer"][0]["encoding"]
    assert encoding["x"]["title"] == "time per step (ms)"
    assert encoding["color"]["scale"]["domain"] == ["compute", "ici", "step"]
    assert encoding["y"]["sort"] == ["predicted", "measured"]


def test_totals_stand_at_the_ends():
    totals = values(step_breakdown_figure(STEP), 1)
    assert [(row["bar"], row["total"]) for row in totals] == [("predicted", "250 ms"), ("measured", "300 ms")]


def test_the_memory_limit_is_a_line_in_the_axis_unit(tmp_path):
    spec = memory_figure({"plan": {"weights": 2e9, "optimizer": 8e9}}, limit_bytes=16e9)
    assert spec["layer"][0]["encoding"]["x"]["title"] == "memory (GB)"
    assert values(spec, 1) == [{"limit": 16.0, "text": "limit 16 GB"}]
    assert save(spec, tmp_path / "memory.png").stat().st_size > 5_000


def test_without_a_limit_there_is_no_line():
    spec = memory_figure({"plan": {"weights": 2e6}})
    assert len(spec["layer"]) == 2
    assert spec["layer"][0]["encoding"]["x"]["title"] == "memory (MB)"


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_amounts_that_cannot_be_drawn_are_refused(bad):
    with pytest.raises(InputError, match="Bar 'predicted' has amounts that cannot be drawn: compute"):
        step_breakdown_figure({"predicted": {"compute": bad}})


def test_no_bar_is_refused():
    with pytest.raises(InputError, match="There is no bar"):
        memory_figure({})
