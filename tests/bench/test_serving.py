"""The clock of an engine's steps, and the simulation of an engine that dispatches ahead."""

import itertools

import msgspec
import numpy as np
import pytest

from meshwright.batching.limits import SchedulerLimits
from meshwright.batching.simulation import ReplicaPool, simulate
from meshwright.batching.traffic import fixed, traffic_of, uniform
from meshwright.bench.serving.clock import (
    EngineClock,
    TimedStep,
    capacity_per_s,
    fit_clock,
    measure_clock,
    simulate_engine,
)
from meshwright.bench.serving.compare import LoadShape, check_lengths
from meshwright.bench.serving.load import LoadClient, ServerFacts
from meshwright.core.errors import InputError
from tests.bench.paced import VOCAB, paced_engine
from tests.serve.http.fake import in_loop, listening

CLOCK = EngineClock(
    decode_rows=(2, 4, 8), chunk_rows=(16, 32), decode_s=(0.01, 0.012, 0.016), chunk_s=(0.02, 0.03), cached_s=2e-6,
    pair_s=1e-6,
)  # fmt: skip
LIMITS = SchedulerLimits(max_requests=8, token_budget=32, page_len=8, num_pages=400, watermark=0)


def timed(noise: float = 0.0) -> list[TimedStep]:
    generator, steps = np.random.default_rng(0), []
    decodes = itertools.product((1, 2, 3, 5, 8), (10, 200, 900), (0,), (0.0,))
    chunks = itertools.product((0, 4), (0, 300), (5, 12, 25), (4.0, 90.0))
    for load in (*decodes, *chunks):
        for _ in range(9):
            seconds = float(CLOCK.step_s(*load)) * (1 + noise * generator.standard_normal())
            names = ("num_decode", "cached_tokens", "prefill_tokens", "prefill_past")
            steps.append(TimedStep(**dict(zip(names, load, strict=True)), seconds=seconds, kind=load))
    return steps


def test_a_fit_finds_the_numbers_that_made_the_times():
    found = fit_clock(CLOCK.decode_rows, CLOCK.chunk_rows, timed())
    assert found.decode_s == pytest.approx(CLOCK.decode_s)
    assert found.chunk_s == pytest.approx(CLOCK.chunk_s)
    assert (found.cached_s, found.pair_s) == pytest.approx((CLOCK.cached_s, CLOCK.pair_s))
    assert found.worst < 1e-9


def test_a_fit_says_how_far_off_it_is():
    found = fit_clock(CLOCK.decode_rows, CLOCK.chunk_rows, timed(noise=0.1))
    assert found.decode_s == pytest.approx(CLOCK.decode_s, rel=0.1)
    assert 0 < found.error < 0.05 < found.worst < 0.3


def test_single_slow_steps_change_nothing():
    steps = timed()
    slow = [msgspec.structs.replace(one, seconds=9.0) if not n % 9 else one for n, one in enumerate(steps)]
    assert fit_clock(CLOCK.decode_rows, CLOCK.chunk_rows, slow).decode_s == pytest.approx(CLOCK.decode_s)


def test_a_shape_without_times_lies_between_its_neighbours():
    steps = [one for one in timed() if one.prefill_tokens == 0 and one.num_decode != 3]
    found = fit_clock(CLOCK.decode_rows, CLOCK.chunk_rows, steps)
    assert found.decode_s[0] <= found.decode_s[1] <= found.decode_s[2] == pytest.approx(CLOCK.decode_s[2])
    assert found.chunk_s[0] == found.chunk_s[1] <= found.decode_s[0]


def test_a_step_costs_its_shape():
    assert CLOCK.step_s(3, 0, 0, 0.0) == CLOCK.step_s(4, 0, 0, 0.0) == 0.012
    assert CLOCK.step_s(4, 0, 10, 4.5) == pytest.approx(0.02 + 55e-6)
    assert CLOCK.step_s(0, 0, 64, 0.0) == pytest.approx(2 * 0.03 + 64e-6)
    singles = [CLOCK.step_s(4, 100 + 4 * n, 0, 0.0) for n in range(5)]
    assert CLOCK.steps_s(5, 4, 100).tolist() == singles


def test_tokens_of_a_lone_request_come_as_a_simulation_says():
    """An idle engine has no step ahead: both kinds of simulation agree."""
    traffic = traffic_of([0.0, 1.0], [10, 20], [5, 9])
    found, other = simulate_engine(traffic, LIMITS, CLOCK), simulate(traffic, ReplicaPool(limits=LIMITS, clock=CLOCK))
    assert found.ttft_s == pytest.approx(other.ttft_s)
    assert found.latency_s == pytest.approx(other.latency_s)
    assert sorted(found.gaps.gap_s) == pytest.approx(sorted(np.repeat(other.gaps.gap_s, other.gaps.num)))


def test_a_request_that_arrives_meanwhile_waits_for_the_step_that_is_dispatched():
    first_s, step_s = float(CLOCK.step_s(0, 0, 8, 3.5)), float(CLOCK.step_s(1, 8, 0, 0.0))
    arrival_s = first_s + step_s / 2  # within the first step that decodes
    found = simulate_engine(traffic_of([0.0, arrival_s], [8, 8], [30, 1]), LIMITS, CLOCK)
    chunk_s = CLOCK.step_s(1, 10, 8, 3.5)
    waits_s = step_s / 2 + CLOCK.step_s(1, 9, 0, 0.0) + chunk_s
    assert found.ttft_s[1] == pytest.approx(waits_s)


@pytest.mark.parametrize("policy", ["chunked", "interleaved", "static"])
@pytest.mark.parametrize("num_pages", [400, 40])
def test_every_request_gets_all_its_tokens(policy, num_pages):
    limits = msgspec.structs.replace(LIMITS, policy=policy, num_pages=num_pages)
    traffic = LoadShape(prompt=uniform(1, 60), output=uniform(1, 60)).traffic(30.0, 80)
    found = simulate_engine(traffic, limits, CLOCK)
    assert not np.isnan(found.times.ended_s).any()
    assert found.gaps.num.sum() == (traffic.output - 1).sum()
    assert (found.gaps.gap_s > 0).all()
    assert (found.ttft_s > 0).all()


def test_capacity_is_what_a_flood_gets():
    traffic = LoadShape(prompt=fixed(16), output=fixed(16)).traffic(1.0, 100)
    capacity = capacity_per_s(traffic, LIMITS, CLOCK)
    for share in (0.7, 3.0):
        found = simulate_engine(traffic.at_rate(share * capacity), LIMITS, CLOCK).summary()
        assert found.requests_per_s == pytest.approx(min(share, 1.0) * capacity, rel=0.15)


def test_bursts_have_the_same_rate():
    counts = {}
    for burstiness in (1.0, 0.2):
        shape = LoadShape(prompt=fixed(4), output=fixed(4), burstiness=burstiness)
        arrival_s = shape.traffic(5.0, 2000).arrival_s
        assert arrival_s[-1] == pytest.approx(400, rel=0.01)
        counts[burstiness] = np.histogram(arrival_s, bins=100)[0].std()
    assert counts[0.2] > 1.5 * counts[1.0]
    with pytest.raises(InputError, match="burstiness"):
        LoadShape(prompt=fixed(4), output=fixed(4), burstiness=0).traffic(5.0, 20)


def test_requests_that_are_too_long_are_refused():
    with pytest.raises(InputError, match="too long for the server"):
        check_lengths(traffic_of([0.0], [400], [200]), ServerFacts(name="toy", max_len=512))


def test_the_steps_of_an_engine_are_timed(monkeypatch):
    clock = EngineClock(
        decode_rows=(1, 2, 4, 8), chunk_rows=(16, 32), decode_s=(0.003, 0.004, 0.008, 0.012), chunk_s=(0.02, 0.04),
        cached_s=0.0, pair_s=0.0,
    )  # fmt: skip
    found = measure_clock(paced_engine(LIMITS, clock, 128, monkeypatch), rounds=1)
    assert (found.decode_rows, found.chunk_rows) == (clock.decode_rows, clock.chunk_rows)
    assert found.decode_s == pytest.approx(clock.decode_s, rel=0.6)
    assert found.chunk_s == pytest.approx(clock.chunk_s, rel=0.6)
    assert 0 <= found.host_s < 0.02


@pytest.mark.slow
def test_a_paced_engine_is_as_simulated(monkeypatch):
    """The engine, the front end and HTTP are real; only the devices are played."""
    clock = EngineClock(
        decode_rows=(1, 2, 4, 8), chunk_rows=(16, 32), decode_s=(0.03, 0.03, 0.035, 0.04), chunk_s=(0.05, 0.08),
        cached_s=0.0, pair_s=0.0, host_s=0.001,
    )  # fmt: skip
    traffic = LoadShape(prompt=uniform(8, 24), output=fixed(16)).traffic(4.0, 40)

    @in_loop
    async def run():
        async with listening(paced_engine(LIMITS, clock, 128, monkeypatch)) as (_, port):
            client = LoadClient(f"http://127.0.0.1:{port}")
            facts = msgspec.structs.replace(await client.facts(), vocab_size=VOCAB)
            record = (await client.send(traffic, facts)).record
        measured, predicted = record.summary(), simulate_engine(record.traffic, LIMITS, clock).summary()
        for of in (lambda one: one.ttft.p50, lambda one: one.tpot.p50, lambda one: one.output_tokens_per_s):
            assert of(measured) == pytest.approx(of(predicted), rel=0.25)

    run()
