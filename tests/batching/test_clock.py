import numpy as np
import pytest

from meshwright.batching.clock import Clock, TabledClock
from meshwright.core.errors import InputError
from tests.batching.mock import AffineClock


class Bent(Clock):
    """The longer of loading and computing, as of a roofline."""

    def step_s(self, num_decode, cached_tokens, prefill_tokens, prefill_past):
        pairs = cached_tokens + prefill_tokens * (prefill_past + 1)
        return 1e-3 + np.maximum(1e-2 + 1e-7 * cached_tokens, 1e-4 * (num_decode + prefill_tokens) + 1e-9 * pairs)


MOST = (64, 100_000, 4096, 20_000)


def test_steps_are_single_steps():
    for clock in (AffineClock(0.7, 0.01, 0.003), Bent(), TabledClock(Bent(), MOST)):
        steps = clock.steps_s(50, 7, 1234)
        assert steps.tolist() == [float(clock.step_s(7, 1234 + 7 * at, 0, 0.0)) for at in range(50)]
    assert AffineClock(2.0).steps_s(3, 1, 1).tolist() == [2.0, 2.0, 2.0]


def test_a_table_is_exact_where_the_clock_is_linear():
    clock = AffineClock(0.01, 1e-4, 1e-7)
    table = TabledClock(clock, MOST)
    generator = np.random.default_rng(0)
    for at in generator.integers(0, MOST, (100, 4)).tolist():
        assert table.step_s(*at) == pytest.approx(clock.step_s(*at), rel=1e-12)
    assert table.step_s(*MOST) == pytest.approx(clock.step_s(*MOST))


def test_a_table_of_a_bent_clock_is_close():
    table = TabledClock(Bent(), MOST)
    at = np.random.default_rng(0).integers(0, MOST, (500, 4)).tolist()
    errors = [abs(float(table.step_s(*one)) / float(Bent().step_s(*one)) - 1) for one in at]
    assert max(errors) < 0.05  # in the cell of the bend
    assert np.mean(errors) < 0.005


@pytest.mark.parametrize("at", [(65, 0, 0, 0), (1, 100_001, 0, 0), (1, 10, 5000, 0.0), (1, 10, 50, 30_000.0)])
def test_beyond_the_table(at):
    with pytest.raises(InputError, match="beyond the table's"):
        TabledClock(AffineClock(1.0), MOST).step_s(*at)
