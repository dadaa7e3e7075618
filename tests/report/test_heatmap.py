import pytest

from meshwright.core.errors import InputError
from meshwright.report.figure import save
from meshwright.report.heatmap import HeatCell, heatmap_figure, short_mesh
from meshwright.spec.strategy import make_mesh
from tests.charts import marks

CELLS = (
    HeatCell(row="8B", column="1", value=0.5, lines=("fsdp8",)),
    HeatCell(row="8B", column="2", value=0.1, lines=("dp2 fsdp8",)),
    HeatCell(row="70B", column="1", value=None, lines=("does not fit",)),
    HeatCell(row="70B", column="2", value=0.4, lines=("pp2", "tp8")),
)
TITLES = {"row_title": "model", "column_title": "nodes", "value_title": "MFU", "title": "Best plans"}


def test_rows_and_columns_keep_their_order():
    empty, filled = marks(heatmap_figure(CELLS, **TITLES), "rect")
    assert (filled["encoding"]["x"]["sort"], filled["encoding"]["y"]["sort"]) == (["1", "2"], ["8B", "70B"])
    assert empty["rows"] == [{"row": "70B", "column": "1", "text": "does not fit"}]
    rows = {(row["row"], row["column"]): row for row in filled["rows"]}
    assert rows["70B", "2"]["headline"] == "40%"
    assert rows["70B", "2"]["text"] == "pp2\ntp8"


def test_text_is_white_on_dark_cells_alone(tmp_path):
    _, filled = marks(heatmap_figure(CELLS, **TITLES), "rect")
    assert [row["ink"] == "white" for row in filled["rows"]] == [True, False, True]
    assert save(heatmap_figure(CELLS, **TITLES), tmp_path / "grid.png").stat().st_size > 5000


def test_what_cannot_be_drawn():
    with pytest.raises(InputError, match="There is no cell to draw"):
        heatmap_figure((), **TITLES)
    with pytest.raises(InputError, match="601 cells are too many"):
        heatmap_figure([HeatCell(row=str(n), column="1", value=0.1) for n in range(601)], **TITLES)


def test_short_meshes():
    assert short_mesh(make_mesh({"fsdp": 64, "tensor": 4, "pipeline": 2})) == "pp2 fsdp64 tp4"
    assert short_mesh(make_mesh({})) == "1 chip"
