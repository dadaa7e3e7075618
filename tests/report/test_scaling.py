import pytest

from meshwright.core.errors import InputError
from meshwright.report.figure import save
from meshwright.report.scaling import ScalingPoint, bandwidth_figure, log_ticks, scaling_figure


def point(chips, rate, *, bubble=0.0, limit=80e9):
    return ScalingPoint(
        num_chips=chips,
        step_s=1e6 / rate,
        tokens_per_s=rate,
        mfu=0.5,
        exposed_share=0.1,
        bubble_share=bubble,
        hbm_bytes=60e9,
        limit_bytes=limit,
    )


POINTS = (point(8, 1e4), point(16, 1.8e4), point(32, 3e4))


def lines(panel):
    return {row["line"] for layer in panel["layer"] for row in layer["data"]["values"]}


def test_four_panels():
    throughput, step, shares, memory = scaling_figure(POINTS, title="t")["concat"]
    assert lines(throughput) == {"best plan", "perfect scaling"}
    assert lines(step) == {"time per step"}
    assert lines(shares) == {"MFU", "exposed communication"}
    assert lines(memory) == {"best plan", "what a chip holds"}


def test_perfect_scaling_starts_from_the_first_point():
    rows = scaling_figure(POINTS, title="t")["concat"][0]["layer"][0]["data"]["values"]
    assert [(row["chips"], row["y"]) for row in rows] == [(8, 10.0), (16, 20.0), (32, 40.0)]


def test_a_bubble_and_a_limit_are_drawn_where_there_are_any():
    spec = scaling_figure((point(8, 1e4, bubble=0.2, limit=None), point(16, 2e4, limit=None)), title="t")
    assert "bubble" in lines(spec["concat"][2])
    assert lines(spec["concat"][3]) == {"best plan"}


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


def test_collectives_that_coincide_share_a_line():
    both = [(2, 4e11), (4, 3e11)]
    spec = bandwidth_figure({"all-gather": both, "all-reduce": both, "all-to-all": [(2, 4e11), (4, 1e11)]}, title="t")
    assert spec["layer"][0]["encoding"]["color"]["scale"]["domain"] == ["all-gather, all-reduce", "all-to-all"]
    assert spec["layer"][0]["encoding"]["y"]["title"] == "GB/s and chip"


def test_they_are_drawn(tmp_path):
    assert save(scaling_figure(POINTS, title="t"), tmp_path / "a.png").stat().st_size > 5000
    assert save(bandwidth_figure({"all-gather": [(2, 4e11), (4, 3e11)]}, title="t"), tmp_path / "b.svg").exists()


def test_nothing_to_draw():
    with pytest.raises(InputError, match="nothing runs on any of the clusters"):
        scaling_figure((), title="t")
    with pytest.raises(InputError, match="Give clusters of several chips"):
        bandwidth_figure({"all-gather": []}, title="t")
