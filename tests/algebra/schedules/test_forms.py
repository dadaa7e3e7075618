"""The closed forms against the simulator, over a grid of sizes and of times."""

import numpy as np
import pytest

from meshwright.algebra.schedules.forms import is_legal, stage_forms
from meshwright.algebra.schedules.registry import build, definition, schedule_names
from meshwright.algebra.schedules.simulation import peak_stash, simulate
from meshwright.core.errors import InputError

TIMES = [
    (1, 1, 1), (1, 2, 1), (1, 2, 2), (2, 5, 2), (3, 4, 2),
    # nothing that a transformer does, but every longest path is the longest for some of them
    (0, 5, 5), (1, 3, 6), (7, 1, 0), (5, 1, 3), (1, 6, 4), (8, 3, 7), (2, 8, 0),
]  # fmt: skip
"""Forward, input gradients, weight gradients."""

SIZES = [
    (stages, microbatches, chunks)
    for stages in (1, 2, 3, 4, 5, 8)
    for microbatches in (1, 2, 3, 5, 7, 8, 9, 15, 16, 24)
    for chunks in (1, 2, 3)
]


def legal(name):
    return [
        (stages, microbatches, chunks)
        for stages, microbatches, chunks in SIZES
        if is_legal(name, stages=stages, microbatches=microbatches, chunks=chunks)
    ]


def simulated(name, stages, microbatches, chunks, times):
    made = build(name, stages=stages, microbatches=microbatches, chunks=chunks)
    forward, backward, weight = (time * made.piece_share for time in times)
    return simulate(made, forward_s=forward, backward_s=backward, weight_s=weight).bubble_s


def form(name, stages, microbatches, chunks, times):
    return stage_forms(name).bubble_s(stages, microbatches, chunks, *times)


@pytest.mark.parametrize("name", schedule_names())
def test_bubbles_are_those_of_the_simulator(name):
    sizes = [(p, m, v) for p, m, v in legal(name) if name != "zb-h2" or m >= p]
    assert len(sizes) >= 6
    for size in sizes:
        for times in TIMES:
            assert form(name, *size, times) == pytest.approx(simulated(name, *size, times), abs=1e-9), (size, times)


@pytest.mark.parametrize("name", schedule_names())
def test_one_stage_sends_nothing(name):
    assert not any(stage_forms(name).sends(*size) for size in legal(name) if size[0] == 1)


def test_zb_h2_with_few_microbatches_is_a_close_lower_bound():
    """Fewer microbatches than stages: further paths, which are longer by less than an eighth."""
    ratios = []
    for stages in (2, 4, 8, 12, 24):
        for microbatches in range(1, stages, 2):
            for times in [*TIMES, (4, 2, 4), (4, 2, 7)]:
                exact = simulated("zb-h2", stages, microbatches, 1, times)
                ratios.append(form("zb-h2", stages, microbatches, 1, times) / exact)
    assert max(ratios) == pytest.approx(1)
    assert 1 - 1 / 8 < min(ratios) < 1


@pytest.mark.parametrize("name", schedule_names())
def test_peak_stash_is_that_of_the_worst_device(name):
    for stages, microbatches, chunks in legal(name):
        made = build(name, stages=stages, microbatches=microbatches, chunks=chunks)
        found = stage_forms(name).stash(stages, microbatches, chunks)
        assert found == pytest.approx(max(peak_stash(made)))
        assert definition(name).stage_placement.weight_copies == made.weight_copies


@pytest.mark.parametrize("name", schedule_names())
def test_split_passes_are_those_of_the_rows(name):
    for stages, microbatches, chunks in legal(name):
        if stages > 1:
            rows = build(name, stages=stages, microbatches=microbatches, chunks=chunks).orders
            apart = max(sum(op.kind == "W" for op in row) for row in rows) / chunks
            assert stage_forms(name).split(stages, microbatches, chunks) == apart


@pytest.mark.parametrize("name", schedule_names())
def test_legal_is_what_can_be_built(name):
    for stages, microbatches, chunks in SIZES:
        try:
            build(name, stages=stages, microbatches=microbatches, chunks=chunks)
            exists = True
        except InputError:
            exists = False
        assert is_legal(name, stages=stages, microbatches=microbatches, chunks=chunks) == exists
    assert not is_legal(name, stages=0, microbatches=8)


@pytest.mark.parametrize("name", schedule_names())
def test_arrays_are_scalars_many_times(name):
    sizes = legal(name)
    stages, microbatches, chunks = (np.array(size) for size in zip(*sizes, strict=True))
    forward = np.linspace(1.0, 2.0, len(sizes))
    many = form(name, stages, microbatches, chunks, (forward, 2.0, 1.0))
    stashes = stage_forms(name).stash(stages, microbatches, chunks)
    assert many.shape == stashes.shape == stages.shape
    for number, size in enumerate(sizes):
        assert many[number] == pytest.approx(form(name, *size, (forward[number], 2.0, 1.0)))
        assert stashes[number] == pytest.approx(stage_forms(name).stash(*size))
