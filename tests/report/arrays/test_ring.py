"""The picture of a collective hop by hop: a panel per step, a cell per block that is somewhere."""

import pytest

from meshwright.calculators.links.ring_steps import collective_frames, exchange_moves, gather_moves
from meshwright.report.arrays.ring import ring_figure
from meshwright.report.figure import save
from tests.charts import marks, panels, said


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


@pytest.mark.parametrize(
    ("kind", "numbers", "of_each_panel", "meaning"),
    [
        (
            "reduce_scatter",
            "addends",
            [{"1"}, {"1", "2"}, {"1", "3"}, {"4"}],
            "counts its addends; 4 are the whole sum",
        ),
        ("all_gather", "sources", [set("0123")] * 4, "is the device whose data it is"),
    ],
)
def test_numbers_have_one_meaning_which_the_subtitle_says(kind, numbers, of_each_panel, meaning):
    """Addends of a block on a ring of 4, one way: 1 at the start, one more with each hop, 4 at the end."""
    frames = collective_frames(kind, 4, gather_moves(4, two_way=False))
    figure = ring_figure(frames, title="", numbers=numbers)
    assert [{cell["text"] for cell in cells(panel)} for panel in panels(figure)] == of_each_panel
    assert meaning in said(figure)["title"]["subtitle"]


def test_numbers_of_an_all_to_all_count_blocks():
    frames = collective_frames("all_to_all", 4, exchange_moves(4, wraps=True, two_way=True))
    found = panels(ring_figure(frames, title="", numbers="blocks"))
    assert {cell["text"] for cell in cells(found[0])} == {"1"}
    assert {cell["text"] for cell in cells(found[-1])} == {"4"}


def test_arrows_leave_where_there_is_no_room():
    small, large = (collective_frames("all_gather", n, gather_moves(n))[:2] for n in (8, 16))
    assert [len(marks(panels(ring_figure(frames, title=""))[1])) for frames in (small, large)] == [6, 4]
