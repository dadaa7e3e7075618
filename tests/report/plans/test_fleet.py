"""The picture of a fleet: lost hours by what took them, and how much of it makes steps."""

import pytest

from meshwright.report.plans.fleet import POINTS, fleet_figure
from meshwright.simulate.fleet.outcome import PolicyOutcome, Spread
from meshwright.simulate.fleet.run import WORDS
from tests.charts import marks, said, texts


def outcome(policy, trained, **seconds) -> PolicyOutcome:
    share = Spread(*3 * [seconds["productive"] / 1000])
    every = dict.fromkeys(WORDS, 0.0) | seconds
    return PolicyOutcome(policy=policy, faults=1, goodput=share, uptime=share, seconds=every, trained=trained)


OUTCOMES = [
    outcome("stop", [(0, 300, 1.0), (400, 1000, 1.0)], productive=850.0, wasted_progress=50.0, device_init=100.0),
    outcome("elastic", [(0, 300, 1.0), (300, 600, 0.5), (600, 1000, 1.0)], productive=850.0, device_init=150.0),
]


def test_bars_and_areas():
    figure = fleet_figure(OUTCOMES, duration_s=1000.0, shown_s=600.0, title="a fleet", subtitle="of two")
    boxes, *_ = marks(said(figure)["vconcat"][0], "bar")
    assert [(row["policy"], row["word"], round(row["end"] - row["start"], 6)) for row in boxes["rows"]] == [
        ("stop", "wasted progress", 5.0),
        ("stop", "device init", 10.0),
        ("elastic", "device init", 15.0),
    ]
    assert "85.0% kept" in texts(figure)
    for panel, mean in zip(said(figure)["vconcat"][1:], (500 / 600, 450 / 600), strict=True):
        rows = marks(panel, "area")[0]["rows"]
        assert len(rows) == POINTS
        assert rows[-1]["hours"] == pytest.approx(600 / 3600)
        assert sum(row["share"] for row in rows) / POINTS == pytest.approx(mean)


def test_a_fleet_that_loses_nothing_is_drawn():
    whole = [outcome("stop", [(0, 1000, 1.0)], productive=1000.0)]
    assert texts(fleet_figure(whole, duration_s=1000.0, shown_s=1000.0, title="")) == ["100.0% kept"]
