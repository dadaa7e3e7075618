"""The picture of a collective hop by hop: a panel per step, a cell per block that is somewhere."""

from meshwright.calculators.links.ring_steps import collective_frames, gather_moves
from meshwright.report.arrays.ring import ring_figure
from meshwright.report.figure import save
from tests.charts import marks, panels


def cells(panel):
    """The rows of the blocks: the first rectangles are the outline, the last those that came."""
    return marks(panel, "rect")[1]["rows"]


def test_a_panel_per_step_and_a_cell_per_block(tmp_path):
    frames = collective_frames("all_gather", 4, gather_moves(4, two_way=False))
    figure = ring_figure(frames, title="AllGather")
    assert [len(cells(panel)) for panel in panels(figure)] == [4, 8, 12, 16]
    assert [panel["title"]["text"] for panel in panels(figure)] == ["start", "step 1", "step 2", "step 3"]
    assert all(len(marks(panel, "rect")[2]["rows"]) == 4 for panel in panels(figure)[1:])
    assert save(figure, tmp_path / "ring.png").read_bytes().startswith(b"\x89PNG")


def test_a_sum_says_how_many_addends_it_has():
    frames = collective_frames("reduce_scatter", 4, gather_moves(4, two_way=False))
    texts = [{cell["text"] for cell in cells(panel)} for panel in panels(ring_figure(frames, title="", sums=True))]
    assert texts[0] == {"0", "1", "2", "3"}
    assert "2 of 4" in texts[1]
    assert texts[-1] == {"sum"}


def test_arrows_leave_where_there_is_no_room():
    small, large = (collective_frames("all_gather", n, gather_moves(n))[:2] for n in (8, 16))
    assert [len(marks(panels(ring_figure(frames, title=""))[1])) for frames in (small, large)] == [6, 4]
