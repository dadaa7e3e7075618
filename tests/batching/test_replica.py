"""Times of single requests, worked out by hand."""

import pytest

from meshwright.batching.limits import SchedulerLimits
from meshwright.batching.simulation import ReplicaPool, simulate
from meshwright.batching.traffic import traffic_of
from meshwright.core.errors import InputError
from tests.batching.mock import AffineClock

INF = float("inf")
NAN = float("nan")


def served(clock, *requests, **bounds):
    """Times and gaps (seconds, end, requests) of requests of (arrival, prompt, output)."""
    arrival_s, prompt, output = zip(*requests, strict=True)
    limits = SchedulerLimits(**{"num_pages": 100, "max_requests": 4, "token_budget": 8, **bounds})
    record = simulate(traffic_of(arrival_s, prompt, output), ReplicaPool(limits=limits, clock=clock))
    gaps = record.gaps
    return record.times, sorted(zip(gaps.gap_s.tolist(), gaps.end_s.tolist(), gaps.num.tolist(), strict=True))


def test_one_request():
    # A step of 1 s and 0.1 s for each cached token: prefill 1 s, then 4, 5 and 6 cached tokens.
    times, gaps = served(AffineClock(1.0, per_cached=0.1), (2.0, 4, 4))
    assert (times.admitted_s[0], times.first_token_s[0]) == (2.0, 3.0)
    assert times.ended_s[0] == pytest.approx(3.0 + 1.4 + 1.5 + 1.6)
    assert [gap for gap, _, _ in gaps] == pytest.approx([1.4, 1.5, 1.6])


def test_a_request_that_arrives_in_a_step_waits_for_its_end():
    times, _ = served(AffineClock(1.0), (0.0, 4, 10), (3.5, 4, 2))
    assert (times.admitted_s[1], times.first_token_s[1], times.ended_s[1]) == (4.0, 5.0, 6.0)
    assert times.ended_s[0] == 10.0


def test_a_request_that_arrives_as_a_step_ends_is_in_the_next():
    times, _ = served(AffineClock(1.0), (0.0, 4, 10), (3.0, 4, 2))
    assert times.admitted_s[1] == 3.0


def test_requests_of_the_same_time_are_prefilled_together():
    times, _ = served(AffineClock(1.0), (5.0, 4, 1), (5.0, 4, 1))
    assert times.ended_s.tolist() == [6.0, 6.0]


def test_chunks_of_a_long_prompt():
    # 20 tokens in chunks of 8, 8 and 4; causal pairs 36, 100 and 74 of 0.01 s.
    times, _ = served(AffineClock(1.0, per_prefill=0.01), (0.0, 20, 1))
    assert times.ended_s[0] == pytest.approx(3.0 + 0.01 * 20 * 21 / 2)


def test_a_prefill_in_between_is_a_gap():
    # Tokens of request 0 at 1, 2, 3 s; request 1 comes at 2.5 s and is prefilled until 4 s; then both decode.
    times, gaps = served(AffineClock(1.0), (0.0, 4, 5), (2.5, 4, 2), policy="interleaved")
    assert times.ended_s.tolist() == [6.0, 5.0]
    assert gaps == [(1.0, 2.0, 1), (1.0, 3.0, 1), (1.0, 5.0, 1), (1.0, 6.0, 1), (2.0, 5.0, 1)]


def test_a_preemption_is_a_gap():
    # Four pages of 4 tokens: with 8 + 8 tokens they are full at 5 s. Request 1 has made 5 tokens by then, is prefilled
    # from 7 to 8 s once request 0 has ended, which gives its sixth token, and decodes one more.
    requests = ((0.0, 4, 7), (0.0, 4, 7))
    times, gaps = served(AffineClock(1.0), *requests, page_len=4, num_pages=4, token_budget=16, watermark=0.0)
    assert times.num_preempted.tolist() == [0, 1]
    assert times.ended_s.tolist() == [7.0, 9.0]
    assert gaps[-1] == (3.0, 8.0, 1)
    assert sum(num for _, _, num in gaps) == 12


def test_tokens_that_a_static_batch_makes_beyond_the_end_are_not_counted():
    times, gaps = served(AffineClock(1.0), (0.0, 4, 2), (0.0, 4, 4), policy="static")
    assert times.ended_s.tolist() == [2.0, 4.0]
    assert gaps == [(1.0, 2.0, 1), (1.0, 2.0, 1), (1.0, 3.0, 1), (1.0, 4.0, 1)]


@pytest.mark.parametrize(("base", "shown"), [(0.0, "0"), (NAN, "nan"), (-1.0, "-1"), (INF, "inf")])
def test_a_clock_gives_positive_times(base, shown):
    said = f"a step with 0 requests that decode and 4 tokens of prefill lasts {shown} s. Give a clock with"
    with pytest.raises(InputError, match=said):
        served(AffineClock(base), (0.0, 4, 2))
