"""The picture of a tiling: tiles, padding, order inside a tile."""

import pytest

from meshwright.core.errors import InputError
from meshwright.hlo.shapes import parse_shapes
from meshwright.report.arrays.tiling import FILL, PADDING, tiling_figure
from meshwright.report.figure import save


def figure(text: str):
    return tiling_figure(parse_shapes(text)[0], name="a")


def rects(panel, color):
    return next(
        layer["data"]["values"]
        for layer in panel["layer"]
        if layer.get("mark", {}).get("type") == "rect" and layer["mark"]["color"] == color
    )


def test_the_last_tiles_are_padded(tmp_path):
    spec = figure("f32[3,12,192]{2,1,0:T(8,128)}")
    panel, inside = spec["hconcat"]
    tiles, used = rects(panel, PADDING), rects(panel, FILL)
    assert len(tiles) == len(used) == 2 * 2
    areas = [
        (u["x2"] - u["x"]) * (u["y2"] - u["y"]) / (t["x2"] - t["x"]) / (t["y2"] - t["y"])
        for t, u in zip(tiles, used, strict=True)
    ]
    # 8 of 8 rows and 128 of 128 columns, then 64 of 128; 4 of 8 rows below
    assert areas == pytest.approx([1, 0.5, 0.5, 0.25])
    assert panel["title"]["text"] == "12 tiles of 8 x 128"
    assert "43.8% padding" in spec["title"]["subtitle"]
    assert [cell["text"] for cell in inside["layer"][1]["data"]["values"]][:2] == ["0", "1"]
    assert save(spec, tmp_path / "tiling.png").read_bytes().startswith(b"\x89PNG")


def test_packed_rows_share_a_word():
    _, inside = figure("bf16[16,128]{1,0:T(8,128)(2,1)}")["hconcat"]
    cells = inside["layer"][0]["data"]["values"]
    numbers = {(c["x"], c["y"]): (n["text"], c["shade"]) for c in cells for n in inside["layer"][1]["data"]["values"]
               if (n["x"], n["y"]) == (c["x"] + 0.5, c["y"] + 0.5)}  # fmt: skip
    assert [numbers[0, y][0] for y in range(4)] == ["0", "1", "256", "257"]
    assert numbers[0, 0][1] == numbers[0, 1][1] != numbers[1, 0][1]


@pytest.mark.parametrize("text", ["bf16[5000]{0:T(1024)(128)(2,1)}", "s32[]{:T(128)}", "f32[4096,32064]{0,1:T(8,128)}"])
def test_arrays_of_all_ranks_and_sizes(text, tmp_path):
    spec = figure(text)
    assert len(rects(spec["hconcat"][0], PADDING)) <= 25
    assert save(spec, tmp_path / "tiling.png").stat().st_size > 1000


def test_an_array_without_tiles():
    with pytest.raises(InputError, match="no tiles to draw"):
        figure("f32[8,8]{1,0}")
