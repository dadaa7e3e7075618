"""Curves on logarithmic axes."""

import pytest

from meshwright.core.errors import InputError
from meshwright.report.curves import curves_figure
from meshwright.report.figure import save
from meshwright.report.marks import ReferenceLine, log_ticks
from tests.charts import marks, texts

LINE = [(1.0, 2.0), (10.0, 20.0), (100.0, 30.0)]


def figure(curves, references=()):
    return curves_figure(curves, x_title="B", y_title="rate", title="t", references=references)


def test_points_names_and_marks(tmp_path):
    peak, here = ReferenceLine(axis="y", value=50.0, text="peak"), ReferenceLine(axis="x", value=5.0, text="here")
    chart = figure({"one": LINE, "two": [(1.0, 3.0)]}, [peak, here])
    _, two = marks(chart, "line")
    assert two["rows"] == [{"name": "two", "x": 1.0, "y": 3.0}]
    assert two["encoding"]["color"]["scale"]["domain"] == ["one", "two"]
    # the mark is inside the axis, though no curve reaches it
    assert two["encoding"]["y"]["scale"]["domain"][1] >= 50
    assert [mark["encoding"] for mark in marks(chart, "rule")] == [{"y": {"datum": 50.0}}, {"x": {"datum": 5.0}}]
    assert texts(chart) == ["peak", "here"]
    assert save(chart, tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_one_point_has_an_axis(tmp_path):
    (line,) = marks(figure({"dot": [(8.0, 2.0)]}))
    low, high = line["encoding"]["x"]["scale"]["domain"]
    assert low < 8 < high


@pytest.mark.parametrize(
    ("curves", "message"),
    [
        ({}, "no curve"),
        ({"a": [(1.0, 1.0)], "b": []}, "no curve"),
        ({"a": [(1.0, 0.0)]}, "a: 0 cannot be drawn on a logarithmic axis"),
    ],
)
def test_refused(curves, message):
    with pytest.raises(InputError, match=message):
        figure(curves)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.5, 2000, [1, 10, 100, 1000]),
        (3, 60, [5, 10, 20, 50]),
        (1.1, 1.4, []),
    ],
)
def test_ticks(low, high, ticks):
    assert log_ticks(low, high) == ticks
