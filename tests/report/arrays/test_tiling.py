"""The picture of a tiling: tiles, padding, order inside a tile."""

import pytest

from meshwright.core.errors import InputError
from meshwright.hlo.shapes import parse_shapes
from meshwright.report.arrays.tiling import FILL, PADDING, tiling_figure
from meshwright.report.figure import save
from tests.charts import marks, panels, said, texts


def figure(text: str):
    return tiling_figure(parse_shapes(text)[0], name="a")


def rects(panel, color):
    return next(mark["rows"] for mark in marks(panel, "rect") if mark["mark"]["color"] == color)


def test_the_last_tiles_are_padded(tmp_path):
    chart = figure("f32[3,12,192]{2,1,0:T(8,128)}")
    panel, inside = panels(chart)
    tiles, used = rects(panel, PADDING), rects(panel, FILL)
    assert len(tiles) == len(used) == 2 * 2
    areas = [
        (u["x2"] - u["x"]) * (u["y2"] - u["y"]) / (t["x2"] - t["x"]) / (t["y2"] - t["y"])
        for t, u in zip(tiles, used, strict=True)
    ]
    # 8 of 8 rows and 128 of 128 columns, then 64 of 128; 4 of 8 rows below
    assert areas == pytest.approx([1, 0.5, 0.5, 0.25])
    assert panel["title"]["text"] == "12 tiles of 8 x 128"
    assert "43.8% padding" in said(chart)["title"]["subtitle"]
    assert texts(inside)[:2] == ["0", "1"]
    assert save(chart, tmp_path / "tiling.png").read_bytes().startswith(b"\x89PNG")


def test_packed_rows_share_a_word():
    _, inside = panels(figure("bf16[16,128]{1,0:T(8,128)(2,1)}"))
    numbers = {(cell["x"], cell["y"]): (cell["text"], cell["shade"]) for cell in marks(inside, "rect")[0]["rows"]}
    assert [numbers[0, y][0] for y in range(4)] == ["0", "1", "256", "257"]
    assert numbers[0, 0][1] == numbers[0, 1][1] != numbers[1, 0][1]


@pytest.mark.parametrize("text", ["bf16[5000]{0:T(1024)(128)(2,1)}", "s32[]{:T(128)}", "f32[4096,32064]{0,1:T(8,128)}"])
def test_arrays_of_all_ranks_and_sizes(text, tmp_path):
    chart = figure(text)
    assert len(rects(panels(chart)[0], PADDING)) <= 25
    assert save(chart, tmp_path / "tiling.png").stat().st_size > 1000


def test_an_array_without_tiles():
    with pytest.raises(InputError, match="no tiles to draw"):
        figure("f32[8,8]{1,0}")
