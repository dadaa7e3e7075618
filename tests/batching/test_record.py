import numpy as np
import pytest

from meshwright.batching.limits import SchedulerLimits
from meshwright.batching.record import LatencyTargets, StepsLog, percentiles
from meshwright.batching.simulation import ReplicaPool, simulate
from meshwright.batching.traffic import fixed, lognormal, poisson, traffic_of
from meshwright.core.errors import InputError
from tests.batching.mock import AffineClock

LIMITS = SchedulerLimits(num_pages=1000, max_requests=8, token_budget=64, page_len=4)
BY_HAND = traffic_of([0.0, 0.0, 10.0], [4, 4, 4], [1, 5, 3])
"""With steps of 1 s: first tokens at 1, 1, 11 s, ends at 1, 5, 13 s."""


def serve(traffic, clock=None, num_replicas=1):
    return simulate(traffic, ReplicaPool(limits=LIMITS, clock=clock or AffineClock(1.0), num_replicas=num_replicas))


def test_figures_by_hand():
    found = serve(BY_HAND).summary(LatencyTargets(ttft_s=1.0, tpot_s=1.0), warm_up=0.0)
    assert (found.start_s, found.end_s, found.num_requests) == (0.0, 13.0, 3)
    assert (found.ttft.mean, found.tpot.mean, found.itl.p99, found.queue.p99) == (1.0, 1.0, 1.0, 0.0)
    assert (found.latency.mean, found.latency.p50) == (3.0, 3.0)
    assert found.latency.p90 == pytest.approx(np.percentile([1, 5, 3], 90))
    assert (found.requests_per_s, found.offered_per_s) == (3 / 13, 3 / 13)
    assert (found.input_tokens_per_s, found.output_tokens_per_s) == (12 / 13, 9 / 13)
    assert (found.goodput_per_s, found.met) == (3 / 13, 1.0)
    (pool,) = found.pools
    assert pool.utilisation == 8 / 13
    assert pool.mean_running == pytest.approx((1 + 5 + 3) / 13)
    assert pool.mean_batch == 1.0


def test_goodput_needs_both_targets():
    record = serve(traffic_of([0.0, 0.5], [4, 4], [2, 2]))
    assert record.ttft_s.tolist() == [1.0, 1.5]
    for targets, met in ((1.2, 2.0), 0.5), ((2.0, 0.9), 0.0), ((2.0, 1.0), 1.0):
        found = record.summary(LatencyTargets(ttft_s=targets[0], tpot_s=targets[1]), warm_up=0.0)
        assert found.met == met
        assert found.goodput_per_s == pytest.approx(met * found.requests_per_s)


def test_warm_up_and_draining_are_left_out():
    found = serve(BY_HAND).summary(warm_up=0.2)
    assert (found.start_s, found.end_s, found.num_requests) == (2.0, 10.0, 1)
    assert found.requests_per_s == 1 / 8
    assert found.pools[0].utilisation == 3 / 8


def test_requests_that_come_at_once_have_no_warm_up():
    assert serve(traffic_of([0.0, 0.0], [4, 4], [1, 3])).summary().end_s == 3.0


def test_waste_of_last_pages():
    made = traffic_of([0.0] * 4, [3, 4, 5, 30], [1, 2, 9, 40])
    used = taken = 0
    for prompt, output in zip(made.prompt.tolist(), made.output.tolist(), strict=True):
        for tokens in range(prompt + 1, prompt + output):
            used, taken = used + tokens, taken + 4 * -(-tokens // 4)
    assert serve(made).summary().page_waste == pytest.approx(1 - used / taken)


def test_littles_law():
    made = poisson(0.5, duration_s=2000.0, prompt=fixed(4), output=lognormal(20, sigma=0.5), seed=2)
    record = serve(made, AffineClock(0.05, 0.01, 1e-4), num_replicas=2)
    found = record.summary(warm_up=0.0)
    residence_s = (record.times.ended_s - record.times.admitted_s).mean()
    assert 2 * found.pools[0].mean_running == pytest.approx(found.requests_per_s * residence_s, rel=1e-9)


def test_percentiles_of_counted_values_are_those_of_all():
    generator = np.random.default_rng(0)
    values, num = generator.normal(size=50), generator.integers(1, 9, 50)
    found = percentiles(values, num.astype(np.int32))
    each = np.repeat(values, num)
    assert found.mean == pytest.approx(each.mean())
    assert [found.p50, found.p90, found.p99] == pytest.approx(np.percentile(each, [50, 90, 99]).tolist())
    assert percentiles(values).p90 == pytest.approx(np.percentile(values, 90))
    assert np.isnan(percentiles(np.empty(0)).mean)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"targets": LatencyTargets(ttft_s=-1.0)}, "targets of -1 s and inf s. Give positive times."),
        ({"warm_up": 1.0}, "warm_up is 1. Give a share of the time from 0 to below 1."),
    ],
)
def test_questions_that_cannot_be(given, said):
    with pytest.raises(InputError, match=said):
        serve(BY_HAND).summary(**given)


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
