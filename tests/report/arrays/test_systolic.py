"""The picture of a systolic array: one panel per cycle, one cell per number."""

import numpy as np
import pytest

from meshwright.calculators.chips.systolic_frames import frames
from meshwright.core.errors import InputError
from meshwright.report.arrays.systolic import KINDS, systolic_figure
from meshwright.report.figure import save


def shown(rows, cols, num_inputs=3, **more):
    rng = np.random.default_rng(0)
    inputs, weights = rng.integers(1, 9, (num_inputs, rows)), rng.integers(1, 9, (rows, cols))
    return frames(inputs, weights, rows=rows, cols=cols, **more)


def test_a_panel_per_cycle_and_a_cell_per_unit():
    every = shown(4, 5)
    spec = systolic_figure(every, title="4 x 5", columns=4)
    assert len(spec["concat"]) == len(every)
    assert spec["columns"] == 4
    for frame, panel in zip(every, spec["concat"], strict=True):
        kinds = [cell["kind"] for cell in panel["data"]["values"]]
        assert set(kinds) <= set(KINDS)
        assert kinds.count("multiplies") == frame.num_busy
        inside = [c for c in panel["data"]["values"] if 0 <= c["x"] < 5 and 0 <= c["y"] < 4]
        assert len(inside) == 20


def test_a_cell_says_what_it_multiplies():
    (frame,) = shown(2, 2, cycles=[2])
    cell = systolic_figure([frame], title="")["concat"][0]["data"]["values"][0]
    assert cell["text"] == f"{frame.activations[0][0]}·{frame.weights[0][0]}"


def test_large_arrays_are_drawn_without_numbers(tmp_path):
    small, large = (systolic_figure(shown(n, n, cycles=[n]), title="") for n in (12, 13))
    assert [len(spec["concat"][0]["layer"]) for spec in (small, large)] == [3, 2]
    assert save(large, tmp_path / "large.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_not_drawn():
    with pytest.raises(InputError, match="at most 32 a side"):
        systolic_figure(shown(2, 33, cycles=[1]), title="")
    with pytest.raises(InputError, match="no cycle"):
        systolic_figure([], title="")
