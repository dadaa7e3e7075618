"""Frontiers of step time against memory and against cost."""

import pytest

from meshwright.cost.setting import Setting
from meshwright.plan.pareto import pareto
from meshwright.plan.planner import rank_plans
from meshwright.spec.catalogue import load_model
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job

LLAMA, JOB = load_model("llama3-8b"), Job(batch_seqs=64, seq_len=4096)


@pytest.fixture(scope="module")
def ranked():
    return rank_plans(Setting(LLAMA, parse_cluster("v5p:2x2x4"), JOB), top=1)


@pytest.fixture(scope="module")
def found(ranked):
    return pareto(ranked)


def test_slower_plans_hold_less(found):
    steps = [one.predicted.step_s for one in found.memory]
    sizes = [one.predicted.hbm_bytes_per_chip for one in found.memory]
    assert len(steps) > 3
    assert steps == sorted(steps)
    assert sizes == sorted(sizes, reverse=True)


def test_the_frontier_begins_with_the_best_plan(found, ranked):
    assert found.memory[0].predicted.step_s == pytest.approx(ranked.plans[0].predicted.step_s, rel=2e-3)


def test_smaller_clusters_are_slower_and_cheaper(found):
    costs = [one.usd_per_token for one in found.cost]
    assert [one.cluster.num_chips for one in found.cost] == sorted(
        (one.cluster.num_chips for one in found.cost), reverse=True
    )
    assert costs == sorted(costs, reverse=True)
    first = found.cost[0]
    assert first.cluster.num_chips == 16
    assert costs[0] == pytest.approx(16 * 4.2 / 3600 * first.predicted.step_s / (64 * 4096))


def test_without_a_price_there_is_no_cost():
    found = pareto(rank_plans(Setting(LLAMA, parse_cluster("h800:8x1"), JOB), top=1))
    assert found.cost == ()
    assert found.memory[0].usd_per_token is None


@pytest.mark.slow
def test_the_frontier_is_of_the_chips_that_the_plans_use():
    tiny, job = load_model("tiny"), Job(batch_seqs=16, seq_len=512)
    result = rank_plans(Setting(tiny, parse_cluster("h100:8x3"), job), top=1)
    assert {one.cluster.short_name for one in pareto(result).memory} == {result.plans[0].cluster.short_name}
    assert result.plans[0].num_chips < 24
