from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.train.optimizers.schedules import learning_rate
from meshwright.train.settings import ScheduleKind, TrainSettings


def rates(count, **changes):
    return learning_rate(TrainSettings(**{"learning_rate": 1.0, **changes}))(count)


def test_the_rate_rises_in_a_line_and_falls_on_a_cosine():
    found = rates(np.arange(31), steps=30, warmup_steps=10)
    np.testing.assert_allclose(found[:10], np.arange(1, 11) / 10, rtol=1e-6)
    np.testing.assert_allclose(found[[10, 20, 30]], [1.0, 0.1 + 0.9 * 0.5, 0.1], rtol=1e-6)


def test_linear_ends_at_the_floor():
    found = rates(np.array([10, 15, 20, 30, 99]), steps=30, warmup_steps=10, schedule="linear")
    np.testing.assert_allclose(found, [1.0, 0.775, 0.55, 0.1, 0.1], rtol=1e-6)


def test_constant_stays():
    np.testing.assert_array_equal(rates(np.arange(10, 200), schedule="constant"), 1.0)


def test_wsd_stays_and_falls_over_the_last_share():
    found = rates(np.array([5, 79, 80, 90, 100]), steps=100, warmup_steps=5, schedule="wsd", decay_fraction=0.2)
    np.testing.assert_allclose(found, [1.0, 1.0, 1.0, 0.55, 0.1], rtol=1e-6)


def test_rsqrt_meets_the_warmup_and_halves_when_updates_quadruple():
    found = rates(np.array([15, 63, 255]), warmup_steps=16, schedule="rsqrt")
    np.testing.assert_allclose(found, [1.0, 0.5, 0.25], rtol=1e-6)


@pytest.mark.parametrize("schedule", get_args(ScheduleKind))
def test_jax_and_numpy_agree_inside_and_outside_of_jit(schedule):
    rate = learning_rate(TrainSettings(schedule=schedule, steps=40, warmup_steps=7))
    numbers = np.arange(50)
    expected = rate(numbers)
    assert isinstance(expected, np.ndarray)
    np.testing.assert_allclose(jax.jit(rate)(jnp.asarray(numbers)), expected, rtol=1e-5)
    np.testing.assert_allclose(rate(jnp.int32(11)), expected[11], rtol=1e-5)
    assert float(rate(11)) == pytest.approx(expected[11])


@pytest.mark.parametrize("warmup", [0, 1, 50])
@pytest.mark.parametrize("schedule", get_args(ScheduleKind))
def test_any_warmup_gives_positive_rates_up_to_the_peak(schedule, warmup):
    found = rates(np.arange(20), steps=20, warmup_steps=warmup, schedule=schedule, min_learning_rate_ratio=0.0)
    assert (found > 0).all()
    assert found.max() <= 1 + 1e-6
