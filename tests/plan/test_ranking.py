"""What is remembered of many candidates: the fastest, and those that nothing beats in seconds and bytes."""

import numpy as np

from meshwright.plan.ranking import KEPT_PER_VARIANT, TIE, fastest_and_leanest, unbeaten


def test_slow_falls_of_bytes_are_followed_to_the_leanest():
    """Each candidate needs 0.05% less than the one before, which alone counts as equal."""
    seconds = np.arange(2000.0)
    need = 100 * 0.9995 ** np.arange(2000)
    kept = fastest_and_leanest(seconds, need)
    assert set(range(KEPT_PER_VARIANT)) <= set(kept.tolist())
    assert need[kept].min() <= need.min() * (1 + TIE)
    assert len(kept) < 1300


def test_the_unbeaten_need_less_than_every_faster_one():
    rng = np.random.default_rng(0)
    for size in (0, 1, 7, 60):
        seconds, need = rng.integers(0, 9, size) * 1.0, 1 + rng.integers(0, 40, size) / 1000
        found, least = [], np.inf
        for index in sorted(range(size), key=lambda one: (seconds[one], need[one])):
            if need[index] < least * (1 - TIE):
                found.append(index)
                least = need[index]
        assert unbeaten(seconds, need) == found
