"""A planned service under load: its clock against the steps it was planned by, and what theory says of its queues."""

import msgspec
import numpy as np
import pytest

from meshwright.api.rates import rates_for
from meshwright.core.errors import InputError
from meshwright.cost.train_step import price_strategy
from meshwright.plan.serving.engines import phase_setting
from meshwright.plan.serving.planner import plan_service, service_setting
from meshwright.plan.serving.service import Service
from meshwright.plan.serving.storing import StoredDtypes
from meshwright.simulate.service import PricedClock, service_targets, service_traffic, simulate_service
from meshwright.spec.catalogue import load_model
from meshwright.spec.cluster import parse_cluster

CHAT = Service(prompt_len=1024, output_len=128, ttft_s=2.0, tpot_s=0.05)


@pytest.fixture(scope="module", params=["llama3-8b", "mixtral-8x7b"])
def planned(request):
    cluster = parse_cluster("h100:8x1")
    setting = service_setting(load_model(request.param), cluster, rates_for(cluster, None, fitted=True))
    return plan_service(setting, CHAT)


def loaded(result, plan, **load):
    return simulate_service(result, plan, service_traffic(CHAT, **load)).summary(service_targets(CHAT))


def clock_of(result, plan) -> PricedClock:
    setting = result.setting.on(plan.generate.part)
    stored = StoredDtypes(plan.weights, plan.cache).storage
    return PricedClock(msgspec.structs.replace(setting, storage=stored), plan.generate.strategy)


def test_steps_are_those_of_the_cost_model(planned):
    """A step at one length, prompts by themselves, and both together: weights are read once."""
    plan, clock = planned.plans[0], clock_of(planned, planned.plans[0])
    dtypes, pool = StoredDtypes(plan.weights, plan.cache), plan.generate
    seconds = {}
    for phase, batch, length in (("decode", 8, 512), ("prefill", pool.strategy.mesh["expert"], 256)):
        setting = phase_setting(planned.setting.on(pool.part), phase, dtypes, length, batch)
        seconds[phase] = price_strategy(setting, pool.strategy).estimate.step_s
    decode_s, prefill_s = seconds["decode"], seconds["prefill"]
    assert clock.step_s(8, 8 * 511, 0, 0.0) == pytest.approx(decode_s, rel=1e-6)
    # the first of 256 tokens sees itself, the last 256: 127.5 before one in the mean
    if not planned.setting.model.num_experts:
        assert clock.step_s(0, 0, 256, 127.5) == pytest.approx(prefill_s, rel=1e-6)
        assert prefill_s < clock.step_s(8, 8 * 511, 256, 127.5) < decode_s + prefill_s
    assert clock.step_s(0, 0, 4096, 8000.0) > clock.step_s(0, 0, 4096, 2047.5)
    many = clock.step_s(np.array([1, 8, 64]), np.array([511, 4088, 32704]), 0, 0.0)
    assert many[1] == pytest.approx(decode_s, rel=1e-6)
    assert list(many) == sorted(many)


def test_a_light_load_meets_what_was_planned(planned):
    """At a tenth of the rate nothing queues long, TPOT is below the steady state of full batches, all are served."""
    plan = planned.plans[0]
    found = loaded(planned, plan, duration_s=60, requests_per_s=plan.predicted.requests_per_s / 10)
    assert found.tpot.mean < plan.predicted.tpot_s
    assert found.ttft.p50 < 2 * plan.predicted.ttft_s + found.tpot.p50
    assert found.met > 0.95
    assert found.requests_per_s == pytest.approx(plan.predicted.requests_per_s / 10, rel=0.25)


def test_the_planned_rate_can_be_served_and_twice_as_much_cannot(planned):
    plan = planned.plans[0]
    within, beyond = (
        loaded(planned, plan, duration_s=60, requests_per_s=share * plan.predicted.requests_per_s)
        for share in (0.7, 2.0)
    )
    assert within.queue.p90 < 1
    assert beyond.queue.p90 > 5 * within.queue.p90
    assert beyond.goodput_per_s < beyond.requests_per_s
    busiest = max(pool.utilisation for pool in beyond.pools)
    assert busiest > 0.95


def test_a_client_of_few_requests(planned):
    """Alone, a request waits for its own prefill; 32 at a time wait for each other, and more end each second."""
    plan = planned.plans[0]
    traffic = service_traffic(CHAT, duration_s=10, requests_per_s=32, at_once=True)
    alone, many = (
        simulate_service(planned, plan, traffic, concurrency=count).summary(service_targets(CHAT)) for count in (1, 32)
    )
    assert alone.queue.p99 == 0
    assert alone.requests_per_s == pytest.approx(1 / alone.latency.mean, rel=0.05)
    assert many.requests_per_s > 4 * alone.requests_per_s
    assert many.ttft.mean > alone.ttft.mean


def test_figures_that_make_no_sense():
    for fields in ({"duration_s": 0.0, "requests_per_s": 1.0}, {"duration_s": 1.0, "requests_per_s": -1.0}):
        with pytest.raises(InputError, match="must be above 0"):
            service_traffic(CHAT, **fields)


def test_seeds_repeat(planned):
    plan = planned.plans[0]
    one, other = (
        loaded(planned, plan, duration_s=20, requests_per_s=5.0, seed=seed) for seed in (3, 3)
    )  # fmt: skip
    assert msgspec.structs.asdict(one.ttft) == msgspec.structs.asdict(other.ttft)


def test_policies_of_engines_that_do_both(planned):
    """Where all prompts wait, chunks delay the first token least and interleaving less than a static batch."""
    plan = next(one for one in planned.plans if not one.has_pools)
    traffic = service_traffic(CHAT, duration_s=20, requests_per_s=0.9 * plan.predicted.requests_per_s)
    found = {
        policy: simulate_service(planned, plan, traffic, policy=policy, spans=True)
        for policy in ("static", "interleaved", "chunked")
    }
    first = {policy: record.summary(service_targets(CHAT)).ttft.mean for policy, record in found.items()}
    assert first["chunked"] < first["static"]
    assert first["interleaved"] < first["static"]
    phases = {policy: {one.phase for one in record.spans[0]} for policy, record in found.items()}
    assert phases["interleaved"] == phases["chunked"] == {"prefill", "decode"}
    pools = next((one for one in planned.plans if one.has_pools), None)
    if pools is not None:
        with pytest.raises(InputError, match="policy 'static' needs engines that prefill and decode, not pools"):
            simulate_service(planned, pools, traffic, policy="static")
