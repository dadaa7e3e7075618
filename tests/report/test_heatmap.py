import pytest

from meshwright.core.errors import InputError
from meshwright.report.figure import save
from meshwright.report.heatmap import HeatCell, heatmap_figure
from tests.charts import marks

CELLS = (
    HeatCell("8B", "1", 0.5, ("50%", "fsdp8")),
    HeatCell("8B", "2", 0.1, ("10%", "dp2 fsdp8")),
    HeatCell("70B", "1", None, ("does not fit",)),
    HeatCell("70B", "2", 0.4, ("40%", "pp2", "tp8")),
)
TITLES = {"axes": ("model", "nodes"), "value_title": "MFU", "unit": "%", "title": "Best plans"}


def test_rows_and_columns_keep_their_order():
    empty, filled = marks(heatmap_figure(CELLS, **TITLES), "rect")
    assert (filled["encoding"]["x"]["sort"], filled["encoding"]["y"]["sort"]) == (["1", "2"], ["8B", "70B"])
    assert empty["rows"] == [{"row": "70B", "column": "1", "text": "does not fit"}]
    rows = {(row["row"], row["column"]): row for row in filled["rows"]}
    assert rows["70B", "2"]["headline"] == "40%"
    assert rows["70B", "2"]["text"] == "pp2\ntp8"


def test_text_is_white_on_dark_cells_alone():
    _, filled = marks(heatmap_figure(CELLS, **TITLES), "rect")
    assert [row["ink"] == "white" for row in filled["rows"]] == [True, False, True]


def test_values_have_a_prefix_or_stay_as_they_are():
    bytes_each = HeatCell("8B", "1", 4e9, ("4 GB", "fsdp8"))
    for unit, title, value in (("B", "MFU (GB)", 4.0), (None, "MFU", 4e9)):
        _, filled = marks(heatmap_figure([bytes_each], **TITLES | {"unit": unit}), "rect")
        assert (filled["encoding"]["color"]["title"], filled["rows"][0]["value"]) == (title, value)


def test_it_is_drawn(tmp_path):
    assert save(heatmap_figure(CELLS, **TITLES), tmp_path / "grid.png").stat().st_size > 5000


def test_what_cannot_be_drawn():
    with pytest.raises(InputError, match="there is no cell to draw"):
        heatmap_figure((), **TITLES)
