"""Fits recover what made the points, also when one of them is far off."""

import math

import numpy as np
import pytest

from meshwright.bench.fit import crossing, fit_knee, fit_line

SIZES = [4096.0 * 4**power for power in range(6)]


def test_a_known_latency_and_rate():
    line = fit_line(SIZES, [5e-6 + size / 2e11 for size in SIZES])
    assert line.start == pytest.approx(5e-6)
    assert line.slope == pytest.approx(1 / 2e11)
    assert line.error == pytest.approx(0, abs=1e-12)
    assert line.at(1e6) == pytest.approx(1e-5)


@pytest.mark.parametrize("spoiled", range(6))
def test_one_disturbed_point_does_not_move_the_line(spoiled):
    seconds = [2e-5 + size / 1e9 for size in SIZES]
    seconds[spoiled] *= 3
    line = fit_line(SIZES, seconds)
    assert line.start == pytest.approx(2e-5)
    assert line.slope == pytest.approx(1e-9)


def test_noise_of_a_few_percent():
    noise = np.random.default_rng(0).normal(1, 0.03, len(SIZES))
    line = fit_line(SIZES, [(1e-4 + size / 1e9) * more for size, more in zip(SIZES, noise, strict=True)])
    assert line.start == pytest.approx(1e-4, rel=0.1)
    assert line.slope == pytest.approx(1e-9, rel=0.1)
    assert line.error < 0.06


def test_neither_latency_nor_rate_is_negative():
    falling = fit_line([1.0, 2.0, 4.0], [4.0, 3.0, 2.0])
    assert falling.slope == 0
    assert falling.start == 3.0
    steep = fit_line([1.0, 2.0, 4.0], [1.0, 4.0, 16.0])
    assert steep.start >= 0


@pytest.mark.parametrize("knee", [3.0, 24.0, 240.0])
def test_a_known_knee(knee):
    batches = [2.0**power for power in range(12)]
    noise = np.random.default_rng(1).normal(1, 0.02, len(batches))
    seconds = [max(1e-3, 1e-3 * batch / knee) * more for batch, more in zip(batches, noise, strict=True)]
    found = fit_knee(batches, seconds)
    assert found.at == pytest.approx(knee, rel=0.06)
    assert found.floor == pytest.approx(1e-3, rel=0.05)
    assert found.error < 0.04


def test_a_spike_does_not_move_the_knee():
    batches = [2.0**power for power in range(10)]
    seconds = [max(1.0, batch / 16) for batch in batches]
    seconds[2] *= 2
    found = fit_knee(batches, seconds)
    assert found.at == pytest.approx(16)


def test_points_on_one_side_have_no_knee():
    batches = [1.0, 2.0, 4.0, 8.0]
    assert fit_knee(batches, [1.0, 1.0, 1.0, 1.0]) is None
    assert fit_knee(batches, batches) is None
    assert fit_knee([1.0], [1.0]) is None


def test_where_a_curve_passes_a_level():
    assert crossing([1, 2, 4, 8], [1, 1, 2, 4], 2 * math.sqrt(2)) == pytest.approx(4 * math.sqrt(2))
    assert crossing([1, 2, 4], [1, 1, 1.5], 2) is None
