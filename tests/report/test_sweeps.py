"""Curves on linear and logarithmic axes, and heatmaps."""

import pytest

from meshwright.core.errors import InputError
from meshwright.report import sweeps
from meshwright.report.figure import save
from meshwright.report.marks import ReferenceLine, log_ticks
from tests.charts import marks, panels, texts


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
    throughput, step, shares, memory = panels(sweeps.scaling_figure(POINTS, over="on", limit_bytes=80e9, title="t"))
    assert lines(throughput) == {"best plan", "perfect scaling"}
    assert lines(step) == {"time per step"}
    assert lines(shares) == {"MFU", "exposed communication"}
    assert lines(memory) == {"best plan", "what a chip holds"}


def test_perfect_scaling_starts_from_the_first_point():
    perfect, best = marks(panels(sweeps.scaling_figure(POINTS, over="on", limit_bytes=80e9, title="t"))[0], "line")
    assert perfect["rows"][0]["name"] == "perfect scaling"
    assert best["encoding"]["color"]["scale"]["domain"] == ["best plan", "perfect scaling"]
    assert [(row["x"], row["y"]) for row in perfect["rows"]] == [(8, 10.0), (16, 20.0), (32, 40.0)]


def test_a_bubble_and_a_limit_are_drawn_where_there_are_any():
    points = (point(8, 1e4, bubble=0.2), point(16, 2e4))
    _, _, shares, memory = panels(sweeps.scaling_figure(points, over="on", title="t"))
    assert "bubble" in lines(shares)
    assert lines(memory) == {"best plan"}


def test_another_field_has_its_values_side_by_side():
    points = [point(8, 1e4, values={"remat": name}) for name in ("none", "block")]
    throughput, step, *_ = panels(sweeps.scaling_figure(points, over="remat", title="t"))
    assert lines(throughput) == {"best plan"}
    (line,) = marks(step, "line")
    assert [row["x"] for row in line["rows"]] == [0, 1]
    axis = line["encoding"]["x"]
    assert (axis["title"], axis["axis"]["labelExpr"]) == ("remat", '["none", "block"][datum.value]')
    # a short range has an axis from zero
    assert "scale" not in line["encoding"]["y"]


def test_collectives_that_coincide_share_a_line():
    both = [4e11, 3e11]
    figure = sweeps.bandwidth_figure(
        [2, 4], {"all-gather": both, "all-reduce": both, "all-to-all": [4e11, 1e11]}, title="t"
    )
    encoding = marks(figure)[0]["encoding"]
    assert encoding["color"]["scale"]["domain"] == ["all-gather, all-reduce", "all-to-all"]
    assert encoding["y"]["title"] == "GB/s and chip"


def test_they_are_drawn(tmp_path):
    scaling = sweeps.scaling_figure(POINTS, over="on", limit_bytes=80e9, title="t")
    assert save(scaling, tmp_path / "a.png").stat().st_size > 5000
    assert save(sweeps.bandwidth_figure([2, 4], {"all-gather": [4e11, 3e11]}, title="t"), tmp_path / "b.svg").exists()


def test_nothing_to_draw():
    with pytest.raises(InputError, match="nothing in the sweep runs"):
        sweeps.scaling_figure((), over="on", title="t")
    with pytest.raises(InputError, match="Give clusters of several chips"):
        sweeps.bandwidth_figure([], {"all-gather": []}, title="t")
    with pytest.raises(InputError, match="there is no cell to draw"):
        sweeps.heatmap_figure((), axes=("model", "nodes"), value_title="MFU", unit="%", title="Best plans")


LINE = [(1.0, 2.0), (10.0, 20.0), (100.0, 30.0)]


def figure(curves, references=()):
    return sweeps.curves_figure(curves, x_title="B", y_title="rate", title="t", references=references)


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
        (1.1, 1.45, [1.2, 1.4]),
    ],
)
def test_ticks(low, high, ticks):
    assert log_ticks(low, high) == ticks


CELLS = (
    sweeps.HeatCell("8B", "1", 0.5, ("50%", "fsdp8")),
    sweeps.HeatCell("8B", "2", 0.1, ("10%", "dp2 fsdp8")),
    sweeps.HeatCell("70B", "1", None, ("does not fit",)),
    sweeps.HeatCell("70B", "2", 0.4, ("40%", "pp2", "tp8")),
)
TITLES = {"axes": ("model", "nodes"), "value_title": "MFU", "unit": "%", "title": "Best plans"}


def test_rows_and_columns_keep_their_order():
    empty, filled = marks(sweeps.heatmap_figure(CELLS, **TITLES), "rect")
    assert (filled["encoding"]["x"]["sort"], filled["encoding"]["y"]["sort"]) == (["1", "2"], ["8B", "70B"])
    assert empty["rows"] == [{"row": "70B", "column": "1", "text": "does not fit"}]
    rows = {(row["row"], row["column"]): row for row in filled["rows"]}
    assert rows["70B", "2"]["headline"] == "40%"
    assert rows["70B", "2"]["text"] == "pp2\ntp8"


def test_text_is_white_on_dark_cells_alone():
    _, filled = marks(sweeps.heatmap_figure(CELLS, **TITLES), "rect")
    assert [row["ink"] == "white" for row in filled["rows"]] == [True, False, True]


def test_values_have_a_prefix_or_stay_as_they_are():
    bytes_each = sweeps.HeatCell("8B", "1", 4e9, ("4 GB", "fsdp8"))
    for unit, title, value in (("B", "MFU (GB)", 4.0), (None, "MFU", 4e9)):
        _, filled = marks(sweeps.heatmap_figure([bytes_each], **TITLES | {"unit": unit}), "rect")
        assert (filled["encoding"]["color"]["title"], filled["rows"][0]["value"]) == (title, value)


def test_cells_that_do_not_fit_have_an_edge_and_a_legend(tmp_path):
    large = sweeps.HeatCell("70B", "1", 0.3, ("30%", "fsdp8"), fits=False)
    *_, edge = marks(sweeps.heatmap_figure([*CELLS[:2], large, CELLS[3]], **TITLES), "rect")
    assert [(row["row"], row["column"]) for row in edge["rows"]] == [("70B", "1")]
    assert edge["encoding"]["stroke"]["scale"]["domain"] == [sweeps.TOO_LARGE]
    assert edge["encoding"]["stroke"]["legend"]["orient"] == "bottom"
    assert save(sweeps.heatmap_figure([*CELLS, large], **TITLES), tmp_path / "large.png").stat().st_size > 5000
    assert len(marks(sweeps.heatmap_figure(CELLS, **TITLES), "rect")) == 2


def test_axes_have_real_units():
    """0.004 dollars are no millidollars, and a count below a thousand has no unit at all."""
    point = {"values": {"prompt": "1Ki"}, "tokens_per_s_per_chip": 441.0, "tpot_s": 4e-3, "ttft_s": 0.2}
    points = [point | {"usd_per_m_input": 4e-3, "usd_per_m_output": 9e-3}] * 2
    figure = sweeps.service_figure(points, over="prompt", title="t")
    assert {mark["encoding"]["y"]["title"] for mark in marks(figure)} == {
        "output tokens/s per chip",
        "time per output token (ms)",
        "time to the first token (ms)",
        "per million tokens ($)",
    }


def test_many_points_have_no_dots_that_hide_the_line():
    many = [(float(n), 1.0 * n) for n in range(1, 60)]
    dots = [marks(figure({"one": points}), "line")[0]["mark"]["point"] for points in (LINE, many)]
    assert [bool(one) for one in dots] == [True, False]
