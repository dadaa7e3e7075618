import pytest

from meshwright.core.errors import InputError
from meshwright.report.figure import save
from meshwright.report.plans.breakdown import COLORS, breakdown_figure

PARTS = {"matmul": 0.3, "attention": 0.01, "exposed communication": 0.1, "optimizer": 0.0}
LINKS = {"fsdp links": 0.2, "tensor links": 0.1}


def test_both_bars_on_one_axis():
    spec = breakdown_figure(PARTS, LINKS, title="t")
    rows = [(row["bar"], row["part"], row["start"], row["end"]) for row in spec["layer"][0]["data"]["values"]]
    assert rows == [
        ("step", "matmul", 0.0, pytest.approx(300)),
        ("step", "attention", pytest.approx(300), pytest.approx(310)),
        ("step", "exposed communication", pytest.approx(310), pytest.approx(410)),
        ("links alone", "fsdp links", 0.0, pytest.approx(200)),
        ("links alone", "tensor links", pytest.approx(200), pytest.approx(300)),
    ]
    assert [row["text"] for row in spec["layer"][-1]["layer"][0].get("data", spec["layer"][-1]["data"])["values"]] == [
        "410 ms",
        "300 ms",
    ]


def test_parts_keep_their_colours_and_small_ones_have_no_label():
    spec = breakdown_figure(PARTS, LINKS, title="t")
    scale = spec["layer"][0]["encoding"]["color"]["scale"]
    assert scale["domain"] == ["matmul", "attention", "exposed communication", "fsdp links", "tensor links"]
    assert scale["range"][0] == COLORS["matmul"]
    assert [row["part"] for row in spec["layer"][1]["data"]["values"]] == [
        "matmul",
        "exposed communication",
        "fsdp links",
        "tensor links",
    ]


def test_one_chip_has_one_bar(tmp_path):
    spec = breakdown_figure({"matmul": 0.3}, {}, title="t")
    assert spec["layer"][0]["encoding"]["y"]["sort"] == ["step"]
    assert save(spec, tmp_path / "b.png").stat().st_size > 2000


@pytest.mark.parametrize("parts", [{}, {"matmul": 0.0}, {"matmul": float("nan")}, {"matmul": -1.0}])
def test_what_is_no_step(parts):
    with pytest.raises(InputError, match="There is no step to draw"):
        breakdown_figure(parts, {}, title="t")
