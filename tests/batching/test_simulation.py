import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.batching.simulation import ReplicaPool, simulate, simulate_disaggregated
from tests.batching.naive import serve
from tests.batching.mock import CLOCKS, limits, traffic


def figures(record):
    """All times and all figures of a record as one array."""
    times = record.times
    rows = [times.admitted_s, times.first_token_s, times.ended_s, times.num_preempted]
    numbers = []
    for warm_up in (0.0, 0.1):
        summary = msgspec.to_builtins(record.summary(warm_up=warm_up))
        for value in (*summary.values(), *summary["pools"]):
            numbers += (
                list(value.values()) if isinstance(value, dict) else [value] if not isinstance(value, tuple) else []
            )
    return np.concatenate([*rows, np.array(numbers, float)])


@settings(max_examples=150, deadline=None)
@given(
    traffic=traffic(),
    limits=limits(),
    clock=CLOCKS,
    routing=st.sampled_from(["round_robin", "least_loaded", "prefix_aware"]),
)
def test_jumps_equal_single_steps(traffic, limits, clock, routing):
    pool = ReplicaPool(limits=limits, clock=clock, num_replicas=2, routing=routing)
    jumped = simulate(traffic, pool)
    single = simulate(traffic, pool, most_jump=1)
    np.testing.assert_allclose(figures(jumped), figures(single), rtol=1e-9)
    assert np.isfinite(jumped.times.ended_s).all()
    assert jumped.gaps.num.sum() == (traffic.output - 1).sum()


@settings(max_examples=150, deadline=None)
@given(traffic=traffic(), limits=limits(), clock=CLOCKS)
def test_times_equal_those_of_a_naive_simulation(traffic, limits, clock):
    bounds = msgspec.structs.replace(
        limits, prefix_cache=False, policy="interleaved" if limits.policy == "static" else limits.policy
    )
    record = simulate(traffic, ReplicaPool(limits=bounds, clock=clock))
    first, ended = serve(traffic, bounds, clock)
    np.testing.assert_allclose(record.times.first_token_s, first, rtol=1e-9)
    np.testing.assert_allclose(record.times.ended_s, ended, rtol=1e-9)
