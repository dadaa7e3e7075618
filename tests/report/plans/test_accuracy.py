"""Measured against predicted: one point each, on equal axes, and one legend."""

from meshwright.accuracy.errors import Comparison
from meshwright.report.figure import PALETTE, save
from meshwright.report.plans.measured import BAND, SHAPES, accuracy_figure
from tests.charts import marks


def predictions(num_groups=2):
    return [
        Comparison(
            id=f"{group}-{number}",
            group=f"group {group}" if group else "",
            job="j",
            core=True,
            chip="h100",
            fitted=True,
            measured_s=0.1 * 10**number,
            predicted_s=0.1 * 10**number * (1 + 0.02 * group),
            low_s=None,
            high_s=None,
        )
        for group in range(num_groups)
        for number in range(3)
    ]


def figure(num_groups=2):
    return accuracy_figure(predictions(num_groups), title="t", subtitle="s")


def test_points_and_axes(tmp_path):
    """Both axes have one domain that holds every point, so that the diagonal is where the two are equal."""
    *_, points = marks(figure())
    assert [row["id"] for row in points["rows"]] == ["0-0", "0-1", "0-2", "1-0", "1-1", "1-2"]
    assert points["rows"][0]["group"] == "no group"
    x, y = points["encoding"]["x"], points["encoding"]["y"]
    assert x["scale"] == y["scale"]
    low, high = x["scale"]["domain"]
    assert low < 0.1 < 10.2 < high
    assert "seconds" in x["title"]
    assert "seconds" in y["title"]
    assert save(figure(), tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_band_is_a_fifth_to_either_side():
    band, line, _ = marks(figure())
    for row in band["rows"]:
        assert (row["low"] / row["measured"], row["high"] / row["measured"]) == (1 - BAND, 1 + BAND)
        assert row["predicted"] == row["measured"]
    assert line["encoding"]["y"]["field"] == "predicted"


def test_groups_are_told_apart():
    """More groups than colours: colour and shape together are different, and both scales make one legend."""
    count = len(PALETTE) + 3
    *_, points = marks(figure(count))
    color, shape = (points["encoding"][name]["scale"] for name in ("color", "shape"))
    assert color["domain"] == shape["domain"]
    assert len(set(zip(color["range"], shape["range"], strict=True))) == len(color["domain"]) == count
    assert set(shape["range"]) == set(SHAPES[:2])
