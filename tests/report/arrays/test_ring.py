"""The picture of a collective hop by hop: a panel per step, a cell per block that is somewhere."""

import numpy as np
import pytest

from meshwright.calculators.sharding.ring_steps import run_ring
from meshwright.core.errors import InputError
from meshwright.report.arrays.ring import ring_figure
from meshwright.report.figure import save


def cells(panel):
    """The rows of the layer of blocks: the first is the outline."""
    return panel["layer"][1]["data"]["values"]


def test_a_panel_per_step_and_a_cell_per_block(tmp_path):
    run = run_ring("all_gather", [np.zeros(1)] * 4, two_way=False)
    spec = ring_figure(run.frames, title="AllGather")
    assert [len(cells(panel)) for panel in spec["concat"]] == [4, 8, 12, 16]
    assert [panel["title"]["text"] for panel in spec["concat"]] == ["start", "step 1", "step 2", "step 3"]
    assert all(len(panel["layer"][2]["data"]["values"]) == 4 for panel in spec["concat"][1:])
    assert save(spec, tmp_path / "ring.png").read_bytes().startswith(b"\x89PNG")


def test_a_sum_says_how_many_addends_it_has():
    run = run_ring("reduce_scatter", [np.ones(4)] * 4, two_way=False)
    spec = ring_figure(run.frames, title="", sums=True)
    texts = [{cell["text"] for cell in cells(panel)} for panel in spec["concat"]]
    assert texts[0] == {"0", "1", "2", "3"}
    assert "2 of 4" in texts[1]
    assert texts[-1] == {"sum"}


def test_arrows_leave_where_there_is_no_room():
    small, large = (run_ring("all_gather", [np.zeros(1)] * n).frames[:2] for n in (8, 16))
    assert [len(ring_figure(frames, title="")["concat"][1]["layer"]) for frames in (small, large)] == [6, 4]


def test_what_is_not_drawn():
    with pytest.raises(InputError, match="at most 16"):
        ring_figure(run_ring("all_gather", [np.zeros(1)] * 17).frames, title="")
    with pytest.raises(InputError, match="no step"):
        ring_figure([], title="")
