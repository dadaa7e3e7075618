import numpy as np

from meshwright.batching.steps_log import StepsLog


def test_gaps_are_within_runs():
    log = StepsLog(1)
    log.add_gap(0.5, 1.0, 3)
    log.add_ends(np.array([1.0, 1.5, 2.5]), 3)
    log.add_ends(np.array([7.0, 9.0]), 2)
    gaps = log.gaps()
    assert gaps.gap_s.tolist() == [0.5, 0.5, 1.0, 2.0]
    assert gaps.end_s.tolist() == [1.0, 1.5, 2.5, 9.0]
    assert gaps.num.tolist() == [3, 3, 3, 2]


def test_runs():
    log = StepsLog(2)
    log.add_run(0.0, 1.0, 3, 2)
    assert log.runs().tolist() == [[0.0, 1.0, 3.0, 2.0]]
    assert StepsLog(1).runs().shape == (0, 4)
    assert len(StepsLog(1).gaps().gap_s) == 0
