"""Times of a sequence's tokens."""

import pytest

from meshwright.serve.token_times import TokenTimes


def test_times_of_tokens():
    times = TokenTimes(start_s=1.0)
    assert (times.ttft_s, times.tpot_s) == (None, None)
    assert times.token(1.5) is None
    assert (times.ttft_s, times.tpot_s) == (0.5, None)
    assert times.token(1.6) == pytest.approx(0.1)
    assert times.token(2.1) == pytest.approx(0.5)
    assert times.ttft_s == 0.5
    assert times.tpot_s == pytest.approx(0.3)
    assert times.num_tokens == 3
