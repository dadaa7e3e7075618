import pytest

from meshwright.report.bars import breakdown_figure, memory_figure, step_breakdown_figure
from meshwright.report.figure import COLORS, save
from tests.charts import marks, texts

STEP = {"predicted": {"compute": 0.2, "ici": 0.05, "hbm": 0.0}, "measured": {"step": 0.3}}
PARTS = {"matmul": 0.3, "attention": 0.01, "exposed communication": 0.1, "optimizer": 0.0}
LINKS = {"fsdp links": 0.2, "tensor links": 0.1}


def boxes(figure):
    (bars,) = marks(figure, "bar")
    return bars["encoding"], [(row["bar"], row["part"], row["start"], row["end"]) for row in bars["rows"]]


def test_parts_are_stacked_in_order_in_one_unit():
    encoding, drawn = boxes(step_breakdown_figure(STEP))
    assert drawn == [
        ("predicted", "compute", 0.0, pytest.approx(200)),
        ("predicted", "ici", pytest.approx(200), pytest.approx(250)),
        ("measured", "step", 0.0, pytest.approx(300)),
    ]
    assert encoding["x"]["title"] == "time per step (ms)"
    assert encoding["color"]["scale"]["domain"] == ["compute", "ici", "step"]
    assert encoding["y"]["sort"] == ["predicted", "measured"]


def test_totals_stand_at_the_ends():
    totals = marks(step_breakdown_figure(STEP), "text")[-1]["rows"]
    assert [(row["bar"], row["text"]) for row in totals] == [("predicted", "250 ms"), ("measured", "300 ms")]


def test_the_memory_limit_is_a_line_in_the_axis_unit(tmp_path):
    figure = memory_figure({"plan": {"weights": 2e9, "optimizer": 8e9}}, limit_bytes=16e9)
    assert boxes(figure)[0]["x"]["title"] == "memory (GB)"
    assert marks(figure, "rule")[0]["rows"] == [{"limit": 16.0, "text": "limit 16 GB"}]
    assert save(figure, tmp_path / "memory.png").stat().st_size > 5_000
    without = memory_figure({"plan": {"weights": 2e6}})
    assert not marks(without, "rule")
    assert boxes(without)[0]["x"]["title"] == "memory (MB)"


def test_the_parts_of_a_step_and_its_links_on_one_axis():
    figure = breakdown_figure(PARTS, LINKS, title="t")
    encoding, drawn = boxes(figure)
    assert drawn == [
        ("step", "matmul", 0.0, pytest.approx(300)),
        ("step", "attention", pytest.approx(300), pytest.approx(310)),
        ("step", "exposed communication", pytest.approx(310), pytest.approx(410)),
        ("links alone", "fsdp links", 0.0, pytest.approx(200)),
        ("links alone", "tensor links", pytest.approx(200), pytest.approx(300)),
    ]
    # parts keep their colours, and small ones have no label
    scale = encoding["color"]["scale"]
    assert scale["domain"] == ["matmul", "attention", "exposed communication", "fsdp links", "tensor links"]
    assert scale["range"][0] == COLORS["matmul"]
    assert texts(figure) == ["300 ms", "100 ms", "200 ms", "410 ms"]


def test_one_chip_has_one_bar(tmp_path):
    figure = breakdown_figure({"matmul": 0.3}, {}, title="t")
    assert boxes(figure)[0]["y"]["sort"] == ["step"]
    assert save(figure, tmp_path / "b.png").stat().st_size > 2000


def test_a_category_has_one_colour_in_every_picture():
    """The order in which a bar names its parts changes with the plan; the colours do not."""
    first = memory_figure({"a": {"weights": 1.0, "optimizer": 2.0, "logits": 1.0}})
    other = memory_figure({"b": {"logits": 3.0, "gradients": 1.0, "weights": 1.0, "no category": 1.0}})
    steps = step_breakdown_figure({"predicted": {"matmul": 1.0, "bubble": 0.1}, "measured": {"whole step": 1.2}})
    scales = [boxes(figure)[0]["color"]["scale"] for figure in (first, other, steps)]
    maps = [dict(zip(one["domain"], one["range"], strict=True)) for one in scales]
    for colors in maps:
        assert {name: COLORS.get(name, color) for name, color in colors.items()} == colors
        assert len(set(colors.values())) == len(colors)
    assert maps[0]["weights"] == maps[1]["weights"]


def test_the_items_of_memory_have_different_colours():
    items = ("weights", "gradients", "optimizer", "activations", "logits", "kv cache", "communication", "workspace")
    assert len({COLORS[item] for item in items}) == len(items)


def test_a_total_does_not_cross_the_limit():
    """600 px are 80 GB: a total of 76 GB would begin 30 px before the limit and end beyond it, unlike one of 60 GB."""
    figure = memory_figure({"x": {"weights": 76e9}, "y": {"weights": 60e9}}, limit_bytes=80e9)
    totals = {row["text"]: row["end"] for row in marks(figure, "text")[-1]["rows"]}
    assert totals == {"76 GB": 80.0, "60 GB": 60.0}
