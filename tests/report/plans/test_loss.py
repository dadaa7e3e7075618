import math

import pytest

from meshwright.core.errors import InputError
from meshwright.report.figure import save
from meshwright.report.plans.measured import loss_figure
from tests.charts import marks


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
