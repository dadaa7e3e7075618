"""Curves on logarithmic axes."""

import pytest

from meshwright.core.errors import InputError
from meshwright.report.curves import Curve, Mark, curves_figure
from meshwright.report.figure import save

LINE = Curve(name="one", x=(1.0, 10.0, 100.0), y=(2.0, 20.0, 30.0))


def figure(*curves, marks=()):
    return curves_figure(curves, x_title="B", y_title="rate", title="t", marks=marks)


def test_points_names_and_marks(tmp_path):
    marks = [Mark(axis="y", value=50.0, text="peak"), Mark(axis="x", value=5.0, text="here", at="end")]
    spec = figure(LINE, Curve(name="two", x=(1.0,), y=(3.0,)), marks=marks)
    lines = spec["layer"][0]
    assert [(row["curve"], row["x"], row["y"]) for row in lines["data"]["values"]][-1] == ("two", 1.0, 3.0)
    assert lines["encoding"]["color"]["scale"]["domain"] == ["one", "two"]
    # the mark is inside the axis, though no curve reaches it
    assert lines["encoding"]["y"]["scale"]["domain"][1] >= 50
    assert len(spec["layer"]) == 1 + 2 * 2
    assert save(spec, tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_one_point_has_an_axis(tmp_path):
    low, high = figure(Curve(name="dot", x=(8.0,), y=(2.0,)))["layer"][0]["encoding"]["x"]["scale"]["domain"]
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
