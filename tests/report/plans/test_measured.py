"""Measured against predicted on equal axes, and the losses of a run."""

import math

import pytest

from meshwright.accuracy.errors import Comparison
from meshwright.core.errors import InputError
from meshwright.report.figure import PALETTE, save
from meshwright.report.plans.measured import BAND, SHAPES, accuracy_figure, loss_figure
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


def line(figure, layer):
    return [(row["x"], row["y"]) for row in marks(figure)[layer]["rows"]]


def test_a_short_run_shows_its_losses_alone():
    figure = loss_figure([5.0, 4.5, 4.0], [512, 1024, 1536])
    assert line(figure, 0) == [(0.512, 5.0), (1.024, 4.5), (1.536, 4.0)]
    assert marks(figure)[0]["encoding"]["x"]["title"] == "tokens (k)"
    assert marks(figure)[0]["encoding"]["x"]["scale"] == {"zero": True}
    assert line(figure, 1) == [(1.536, 4.0)]


def test_a_long_run_has_a_mean_that_follows_a_straight_line_exactly():
    losses = [10 - 0.01 * step for step in range(200)]
    figure = loss_figure(losses, [1000 * (step + 1) for step in range(200)])
    assert marks(figure)[1]["rows"][0]["name"] == "mean over 11 steps"
    # Centred windows leave a straight line where it is; a trailing mean would lie above it.
    assert [loss for _, loss in line(figure, 1)] == pytest.approx(losses)


def test_the_mean_smooths_noise():
    losses = [3.0 + (-1) ** step for step in range(200)]
    means = [loss for _, loss in line(loss_figure(losses, range(1, 201)), 1)]
    assert max(abs(mean - 3.0) for mean in means[10:-10]) < 0.2


def test_a_diverged_run_leaves_a_gap(tmp_path):
    losses = [5.0, math.nan, 4.0, math.inf]
    figure = loss_figure(losses, [1, 2, 3, 4])
    assert [loss for _, loss in line(figure, 0)] == [5.0, None, 4.0, None]
    assert save(figure, tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_single_step_is_a_visible_point():
    assert marks(loss_figure([5.0], [512]))[0]["mark"]["point"] is True


@pytest.mark.parametrize(("losses", "tokens"), [([], []), ([1.0, 2.0], [1])])
def test_lists_that_do_not_go_together_are_refused(losses, tokens):
    with pytest.raises(InputError, match=f"there are {len(losses)} losses and {len(tokens)} token counts"):
        loss_figure(losses, tokens)
