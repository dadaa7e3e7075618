import pytest

from meshwright.core.errors import InputError
from meshwright.report.figure import save
from meshwright.report.scaling import bandwidth_figure, scaling_figure
from tests.charts import marks, panels


def point(chips, rate, *, bubble=0.0, values=None):
    return {
        "values": values or {"on": str(chips)},
        "num_chips": chips,
        "step_s": 1e6 / rate,
        "tokens_per_s": rate,
        "mfu": 0.5,
        "exposed_share": 0.1,
        "bubble_share": bubble,
        "hbm_bytes_per_chip": 60e9,
    }


POINTS = (point(8, 1e4), point(16, 1.8e4), point(32, 3e4))


def lines(panel):
    return {row["name"] for line in marks(panel, "line") for row in line["rows"]}


def test_four_panels():
    throughput, step, shares, memory = panels(scaling_figure(POINTS, over="on", limit_bytes=80e9, title="t"))
    assert lines(throughput) == {"best plan", "perfect scaling"}
    assert lines(step) == {"time per step"}
    assert lines(shares) == {"MFU", "exposed communication"}
    assert lines(memory) == {"best plan", "what a chip holds"}


def test_perfect_scaling_starts_from_the_first_point():
    perfect, best = marks(panels(scaling_figure(POINTS, over="on", limit_bytes=80e9, title="t"))[0], "line")
    assert perfect["rows"][0]["name"] == "perfect scaling"
    assert best["encoding"]["color"]["scale"]["domain"] == ["best plan", "perfect scaling"]
    assert [(row["x"], row["y"]) for row in perfect["rows"]] == [(8, 10.0), (16, 20.0), (32, 40.0)]


def test_a_bubble_and_a_limit_are_drawn_where_there_are_any():
    points = (point(8, 1e4, bubble=0.2), point(16, 2e4))
    _, _, shares, memory = panels(scaling_figure(points, over="on", title="t"))
    assert "bubble" in lines(shares)
    assert lines(memory) == {"best plan"}


def test_another_field_has_its_values_side_by_side():
    points = [point(8, 1e4, values={"remat": name}) for name in ("none", "block")]
    throughput, step, *_ = panels(scaling_figure(points, over="remat", title="t"))
    assert lines(throughput) == {"best plan"}
    (line,) = marks(step, "line")
    assert [row["x"] for row in line["rows"]] == [0, 1]
    axis = line["encoding"]["x"]
    assert (axis["title"], axis["axis"]["labelExpr"]) == ("remat", '["none", "block"][datum.value]')
    # a short range has an axis from zero
    assert "scale" not in line["encoding"]["y"]


def test_collectives_that_coincide_share_a_line():
    both = [4e11, 3e11]
    figure = bandwidth_figure([2, 4], {"all-gather": both, "all-reduce": both, "all-to-all": [4e11, 1e11]}, title="t")
    encoding = marks(figure)[0]["encoding"]
    assert encoding["color"]["scale"]["domain"] == ["all-gather, all-reduce", "all-to-all"]
    assert encoding["y"]["title"] == "GB/s and chip"


def test_they_are_drawn(tmp_path):
    assert (
        save(scaling_figure(POINTS, over="on", limit_bytes=80e9, title="t"), tmp_path / "a.png").stat().st_size > 5000
    )
    assert save(bandwidth_figure([2, 4], {"all-gather": [4e11, 3e11]}, title="t"), tmp_path / "b.svg").exists()


def test_nothing_to_draw():
    with pytest.raises(InputError, match="nothing in the sweep runs"):
        scaling_figure((), over="on", title="t")
    with pytest.raises(InputError, match="Give clusters of several chips"):
        bandwidth_figure([], {"all-gather": []}, title="t")
