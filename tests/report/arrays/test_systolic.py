"""The picture of a systolic array: one panel per cycle, one cell per number."""

import numpy as np
import pytest

from meshwright.calculators.verbs.systolic import frames
from meshwright.core.errors import InputError
from meshwright.report.arrays.systolic import KINDS, systolic_figure
from meshwright.report.figure import save
from tests.charts import marks, panels


def shown(rows, cols, num_inputs=3, **more):
    rng = np.random.default_rng(0)
    inputs, weights = rng.integers(1, 9, (num_inputs, rows)), rng.integers(1, 9, (rows, cols))
    return frames(inputs, weights, rows=rows, cols=cols, **more)


def test_a_panel_per_cycle_and_a_cell_per_unit():
    every = shown(4, 5)
    for frame, panel in zip(every, panels(systolic_figure(every, title="4 x 5")), strict=True):
        cells = marks(panel, "rect")[0]["rows"]
        kinds = [cell["kind"] for cell in cells]
        assert set(kinds) <= set(KINDS)
        assert kinds.count("multiplies") == frame.num_busy
        inside = [c for c in cells if 0 <= c["x"] < 5 and 0 <= c["y"] < 4]
        assert len(inside) == 20


def test_a_cell_says_what_it_multiplies():
    (frame,) = shown(2, 2, cycles=[2])
    cell = marks(systolic_figure([frame], title=""))[0]["rows"][0]
    assert cell["text"] == f"{frame.activations[0][0]}·{frame.weights[0][0]}"


def test_large_arrays_are_drawn_without_numbers(tmp_path):
    small, large = (systolic_figure(shown(n, n, cycles=[n]), title="") for n in (12, 13))
    assert [len(marks(figure)) for figure in (small, large)] == [3, 2]
    assert save(large, tmp_path / "large.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_not_drawn():
    with pytest.raises(InputError, match="at most 32 a side"):
        systolic_figure(shown(2, 33, cycles=[1]), title="")
