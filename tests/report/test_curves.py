"""Curves on logarithmic axes."""

import pytest

from meshwright.core.errors import InputError
from meshwright.report.curves import Curve, Mark, curves_figure
from meshwright.report.figure import save
from meshwright.report.marks import log_ticks
from tests.charts import marks, texts

LINE = Curve(name="one", x=(1.0, 10.0, 100.0), y=(2.0, 20.0, 30.0))


def figure(*curves, marks=()):
    return curves_figure(curves, x_title="B", y_title="rate", title="t", marks=marks)


def test_points_names_and_marks(tmp_path):
    peak, here = Mark(axis="y", value=50.0, text="peak"), Mark(axis="x", value=5.0, text="here", at="end")
    chart = figure(LINE, Curve(name="two", x=(1.0,), y=(3.0,)), marks=[peak, here])
    _, two = marks(chart, "line")
    assert two["rows"] == [{"name": "two", "x": 1.0, "y": 3.0}]
    assert two["encoding"]["color"]["scale"]["domain"] == ["one", "two"]
    # the mark is inside the axis, though no curve reaches it
    assert two["encoding"]["y"]["scale"]["domain"][1] >= 50
    assert [mark["encoding"] for mark in marks(chart, "rule")] == [{"y": {"datum": 50.0}}, {"x": {"datum": 5.0}}]
    assert texts(chart) == ["peak", "here"]
    assert save(chart, tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_one_point_has_an_axis(tmp_path):
    (line,) = marks(figure(Curve(name="dot", x=(8.0,), y=(2.0,))))
    low, high = line["encoding"]["x"]["scale"]["domain"]
    assert low < 8 < high


@pytest.mark.parametrize(
    ("curves", "message"),
    [
        ((), "no curve"),
        ((Curve(name="a", x=(1.0, 2.0), y=(1.0,)),), "2 places do not go with 1 values"),
        ((Curve(name="a", x=(1.0,), y=(0.0,)),), "logarithmic axis"),
    ],
)
def test_refused(curves, message):
    with pytest.raises(InputError, match=message):
        figure(*curves)


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
