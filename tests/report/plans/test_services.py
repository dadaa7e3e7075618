"""The picture of services that nothing beats: the chosen one is marked, and the split below leaves out nothing seen."""

import pytest

from meshwright.core.errors import InputError
from meshwright.report.plans.pareto import WHOLE, services_figure
from tests.charts import marks, panels, texts

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
