import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.batching.clock import TabledClock
from meshwright.batching.limits import SchedulerLimits
from meshwright.batching.simulation import ReplicaPool, simulate
from meshwright.batching.traffic import fixed, lognormal, poisson, traffic_of, uniform
from meshwright.core.errors import InputError
from tests.batching.mock import CLOCKS, AffineClock, limits, traffic
from tests.batching.naive import serve
from tests.speed import took

SECOND = AffineClock(1.0)
CLIENTS = st.sampled_from([1, 3, 8, np.inf])
"""Requests of the client on their way at most."""


def figures(record):
    """All times and all figures of a record as one array."""
    times = record.times
    found = [*times.admitted_s, *times.first_token_s, *times.ended_s, *times.num_preempted]
    for warm_up in (0.0, 0.1):
        summary = msgspec.to_builtins(record.summary(warm_up=warm_up))
        for value in (*summary.values(), *summary["pools"]):
            found += value.values() if isinstance(value, dict) else [value] if isinstance(value, float | int) else []
    return np.array(found, float)


@settings(max_examples=150, deadline=None)
@given(
    traffic=traffic(),
    limits=limits(),
    clock=CLOCKS,
    routing=st.sampled_from(["round_robin", "least_loaded", "prefix_aware"]),
    concurrency=CLIENTS,
)
def test_jumps_equal_single_steps(traffic, limits, clock, routing, concurrency):
    pool = ReplicaPool(limits=limits, clock=clock, num_replicas=2, routing=routing)
    jumped, single = (simulate(traffic, pool, concurrency=concurrency, most_jump=most) for most in (256, 1))
    np.testing.assert_allclose(figures(jumped), figures(single), rtol=1e-9)


@settings(max_examples=50, deadline=None)
@given(traffic=traffic(), limits=limits(), clock=CLOCKS, concurrency=CLIENTS)
def test_jumps_equal_single_steps_of_two_pools(traffic, limits, clock, concurrency):
    policy = "chunked" if limits.policy == "static" else limits.policy
    bounds = msgspec.structs.replace(limits, policy=policy, token_budget=limits.max_requests + 5)
    pools = (
        ReplicaPool(limits=limits, clock=clock, num_replicas=2),
        ReplicaPool(limits=bounds, clock=clock, num_replicas=2, routing="least_loaded"),
    )
    jumped, single = (
        simulate(traffic, *pools, transfer_s=lambda tokens: 0.1 * tokens, concurrency=concurrency, most_jump=most)
        for most in (256, 1)
    )
    np.testing.assert_allclose(figures(jumped), figures(single), rtol=1e-9)
    assert jumped.gaps.num.sum() == (traffic.output - 1).sum()


@settings(max_examples=150, deadline=None)
@given(traffic=traffic(), limits=limits(), clock=CLOCKS)
def test_times_equal_those_of_a_naive_simulation(traffic, limits, clock):
    bounds = msgspec.structs.replace(
        limits, prefix_cache=False, look_every=1, policy="interleaved" if limits.policy == "static" else limits.policy
    )
    record = simulate(traffic, ReplicaPool(limits=bounds, clock=clock))
    first, ended = serve(traffic, bounds, clock)
    np.testing.assert_allclose(record.times.first_token_s, first, rtol=1e-9)
    np.testing.assert_allclose(record.times.ended_s, ended, rtol=1e-9)


@settings(max_examples=50, deadline=None)
@given(traffic=traffic(), limits=limits())
def test_every_request_ends_once_with_all_its_tokens(traffic, limits):
    record = simulate(traffic, ReplicaPool(limits=limits, clock=SECOND, num_replicas=3, routing="least_loaded"))
    times = record.times
    assert (times.admitted_s >= traffic.arrival_s).all()
    assert (times.first_token_s > times.admitted_s).all()
    assert (times.ended_s - times.first_token_s >= traffic.output - 1 - 1e-9).all()
    assert record.gaps.num.sum() == (traffic.output - 1).sum()


@pytest.mark.parametrize("load", [0.4, 0.8])
def test_one_slot_is_an_m_d_1_queue(load):
    """Its mean wait is load * s / (2 (1 - load)) by the Pollaczek-Khinchine formula, here with steps of s = 1 / 2."""
    made = poisson(load, duration_s=40_000.0, prompt=fixed(8), output=fixed(2), seed=5)
    bounds = SchedulerLimits(policy="static", max_requests=1, num_pages=10)
    record = simulate(made, ReplicaPool(limits=bounds, clock=AffineClock(0.5)))
    wait_s = (record.times.admitted_s - made.arrival_s)[1000:]
    batches = np.array([part.mean() for part in np.array_split(wait_s, 30)])
    error = batches.std(ddof=1) / np.sqrt(len(batches))
    assert error < 0.06 * wait_s.mean()
    assert abs(wait_s.mean() - load / (2 * (1 - load))) < 3 * error


def test_a_saturated_pool_serves_what_it_can():
    # A batch of 4 gets 4 tokens a second; a request takes one prefill and 9 decoded tokens beside others.
    bounds = SchedulerLimits(max_requests=4, token_budget=40, num_pages=1000)
    found = [
        simulate(
            poisson(rate, duration_s=2000.0, prompt=fixed(4), output=fixed(10), seed=1),
            ReplicaPool(limits=bounds, clock=SECOND),
        ).summary()
        for rate in (0.2, 1.0)
    ]
    assert found[0].requests_per_s == pytest.approx(found[0].offered_per_s, rel=0.05)
    assert found[1].requests_per_s == pytest.approx(0.4, rel=0.01)
    assert found[1].offered_per_s == pytest.approx(1.0, rel=0.05)
    assert (found[1].pools[0].utilisation, found[1].pools[0].mean_running) == (1.0, pytest.approx(4.0))
    assert found[1].queue.p99 > 900


def test_continuous_batching_beats_a_static_batch():
    made = poisson(0.3, duration_s=3000.0, prompt=fixed(4), output=uniform(1, 19), seed=1)
    by_policy = {}
    for policy in ("static", "interleaved", "chunked"):
        bounds = SchedulerLimits(policy=policy, max_requests=4, token_budget=40, num_pages=1000)
        by_policy[policy] = simulate(made, ReplicaPool(limits=bounds, clock=SECOND)).summary()
    assert by_policy["static"].ttft.mean > 2 * by_policy["chunked"].ttft.mean
    assert by_policy["interleaved"].itl.mean > by_policy["chunked"].itl.mean


def test_a_pool_hands_over_to_another():
    # Prefill 1 s each, one after the other; 0.5 s to hand over; three decoding steps from the next second on.
    record = simulate(
        traffic_of([0.0, 0.0], [5, 5], [4, 1]),
        ReplicaPool(limits=SchedulerLimits(policy="interleaved", token_budget=1, num_pages=9), clock=SECOND),
        ReplicaPool(limits=SchedulerLimits(num_pages=9), clock=SECOND),
        transfer_s=lambda tokens: tokens / 10,
    )
    assert record.times.first_token_s.tolist() == [1.0, 2.0]
    assert record.times.ended_s.tolist() == [4.5, 2.0]
    assert sorted(record.gaps.gap_s.tolist()) == [1.0, 1.0, 1.5]
    assert len(record.summary(warm_up=0.0).pools) == 2


def test_a_client_sends_the_next_request_when_one_ends():
    # One prompt of 4 tokens a step: first tokens at 1 and 2 s, ends at 3 and 4 s. The third is sent at 3 s and comes at
    # 4 s, in the step that also ends the second; the fourth is sent then and comes at 5 s.
    bounds = SchedulerLimits(max_requests=2, token_budget=5, num_pages=9)
    made = traffic_of([0.0] * 4, 4, 3)
    record = simulate(made, ReplicaPool(limits=bounds, clock=SECOND), concurrency=2)
    assert record.traffic.arrival_s.tolist() == [0.0, 0.0, 3.0, 4.0]
    assert record.ttft_s.tolist() == [1.0, 2.0, 1.0, 1.0]
    assert record.times.ended_s.tolist() == [3.0, 4.0, 6.0, 7.0]
    assert made.arrival_s.tolist() == [0.0] * 4


def test_a_client_does_not_send_what_has_not_arrived():
    bounds = SchedulerLimits(max_requests=2, token_budget=5, num_pages=9)
    record = simulate(
        traffic_of([0.0, 0.5, 9.0], 4, 2), ReplicaPool(limits=bounds, clock=SECOND), concurrency=1
    )  # fmt: skip
    assert record.traffic.arrival_s.tolist() == [0.0, 2.0, 9.0]
    with pytest.raises(InputError, match=r"concurrency is 0\. Give a client"):
        simulate(made := traffic_of([0.0], 4, 2), ReplicaPool(limits=bounds, clock=SECOND), concurrency=len(made) - 1)


def test_a_client_of_two_pools():
    # Prefill to 1 s, 0.5 s to hand over, three decoding steps to 4.5 s; then the next.
    pool = ReplicaPool(limits=SchedulerLimits(num_pages=9), clock=SECOND)
    record = simulate(traffic_of([0.0, 0.0], 5, 4), pool, pool, transfer_s=lambda tokens: tokens / 10, concurrency=1)
    assert record.traffic.arrival_s.tolist() == [0.0, 4.5]
    assert record.ttft_s.tolist() == [1.0, 1.0]
    assert record.times.ended_s.tolist() == [4.5, 9.0]


@settings(max_examples=50, deadline=None)
@given(traffic=traffic(), limits=limits(), clock=CLOCKS)
def test_no_more_requests_are_on_their_way_than_the_client_has(traffic, limits, clock):
    record = simulate(traffic, ReplicaPool(limits=limits, clock=clock, num_replicas=2), concurrency=3)
    sent_s, ended_s = record.traffic.arrival_s, record.times.ended_s
    assert (sent_s >= traffic.arrival_s).all()
    for number, at_s in enumerate(sent_s):
        assert (ended_s[:number] > at_s).sum() < 3
        # it waits for nothing but its arrival or the end of another one
        assert at_s == traffic.arrival_s[number] or at_s in ended_s[:number]


def test_new_requests_are_looked_for_every_few_steps():
    # Prefill to 1 s; from then on a look at 1, 5 and 9 s: what comes at 1.5 s is prefilled from 5 s on.
    bounds = SchedulerLimits(num_pages=99, look_every=4)
    made = traffic_of([0.0, 1.5], 4, [20, 2])
    record = simulate(made, ReplicaPool(limits=bounds, clock=SECOND))
    assert record.times.first_token_s.tolist() == [1.0, 6.0]
    single = simulate(made, ReplicaPool(limits=bounds, clock=SECOND), most_jump=1)
    assert single.times.ended_s.tolist() == record.times.ended_s.tolist() == [20.0, 7.0]


def test_requests_go_to_the_least_loaded_replica():
    pool = ReplicaPool(limits=SchedulerLimits(num_pages=99, max_requests=1), clock=SECOND, num_replicas=2)
    made = traffic_of([0.0, 0.1, 5.5], 4, [20, 4, 4])
    ends = {}
    for routing in ("round_robin", "least_loaded"):
        ends[routing] = simulate(made, msgspec.structs.replace(pool, routing=routing)).times.ended_s[2]
    assert ends == {"round_robin": 24.0, "least_loaded": 9.5}


def test_requests_go_where_their_prefix_is():
    made = poisson(2.0, duration_s=500.0, prompt=fixed(8), output=fixed(2), seed=1)
    prefix = np.random.default_rng(0).integers(32, size=len(made))
    # 128 pages, of which a replica has room for half
    made = traffic_of(made.arrival_s, made.prompt + 64, made.output, prefix, 64)
    bounds = SchedulerLimits(num_pages=64, max_requests=8, token_budget=100, prefix_cache=True)
    ttft_s = {}
    for routing in ("round_robin", "prefix_aware"):
        pool = ReplicaPool(limits=bounds, clock=AffineClock(0.1, per_prefill=1e-4), num_replicas=4, routing=routing)
        ttft_s[routing] = simulate(made, pool).ttft_s[50:].mean()
    assert ttft_s["prefix_aware"] < ttft_s["round_robin"]


def test_preempted_requests_end():
    made = poisson(1.0, duration_s=300.0, prompt=uniform(1, 60), output=uniform(1, 60), seed=1)
    bounds = SchedulerLimits(num_pages=20, max_requests=16, token_budget=64)
    record = simulate(made, ReplicaPool(limits=bounds, clock=AffineClock(0.1)))
    assert record.times.num_preempted.sum() > 20
    assert np.isfinite(record.times.ended_s).all()


@pytest.mark.parametrize(
    ("pool", "said"),
    [
        ({"num_replicas": 0}, "num_replicas is 0. Give a positive number."),
        ({"routing": "least_load"}, "routing 'least_load' is not known. Did you mean 'least_loaded'?"),
        ({"limits": SchedulerLimits(num_pages=1)}, "request 0 .* needs 2 pages of 16 tokens, of 1 in all."),
    ],
)
def test_pools_that_cannot_run(pool, said):
    good = ReplicaPool(limits=SchedulerLimits(num_pages=9), clock=SECOND)
    with pytest.raises(InputError, match=said):
        simulate(traffic_of([0.0], 20, 2), msgspec.structs.replace(good, **pool))


def test_ten_minutes_of_a_replica_take_a_second():
    """The share of one of 64 replicas in 10,000 requests a minute; benchmarks/simulate.py has the hour of all."""
    made = poisson(10_000 / 60 / 64, duration_s=600.0, prompt=lognormal(500), output=lognormal(250, most=4096), seed=1)
    clock = TabledClock(AffineClock(0.011, 2e-4, 2e-8, 1e-9), (256, 500_000, 200_000, 50_000))
    with took() as cpu:
        simulate(made, ReplicaPool(limits=SchedulerLimits(num_pages=25_000), clock=clock)).summary()
    assert cpu.yardsticks < 12
