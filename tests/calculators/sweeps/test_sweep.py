"""The best plan on each of several clusters, and the clusters as a person writes them."""

import pytest

from meshwright.calculators.sweeps.sweep import node_clusters, scaling_curve, sweep_clusters
from meshwright.core.errors import InputError
from meshwright.cost.setting import Setting
from meshwright.plan.planner import rank_plans
from meshwright.spec.catalogue import load_model
from meshwright.spec.chip import chip
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.efficiency import fitted_calibration
from meshwright.spec.job import Job

LLAMA = load_model("llama3-8b")
JOB = Job(batch_seqs=64, seq_len=4096)


def curve(clusters, *, of=LLAMA, job=JOB, rates=None, **held):
    return scaling_curve(Setting(of, clusters[0], job, rates), clusters, **held)


def names(text):
    return [cluster.short_name.partition(":")[2] for cluster in sweep_clusters(text)]


def test_a_range_doubles_the_shortest_size():
    assert names("h100:8x1..8x8") == ["8x1", "8x2", "8x4", "8x8"]
    assert names("v5p:4x4x4..8x8x16") == ["4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16"]
    assert names("v5p:8x16x16..16x20x28") == ["8x16x16", "16x16x16", "16x16x28", "16x20x28"]
    assert names("h100:8x4..h100:8x4") == ["8x4"]


def test_lists_and_ranges_come_by_size():
    assert names("h100:8x8, h100:8x1..8x2") == ["8x1", "8x2", "8x8"]


@pytest.mark.parametrize("text", ["h100:8x8..8x1", "h100:8x1..v5p:4x4x4", "h100:8x1..8x2x2", "v5e:4x4..2*v5e:8x8"])
def test_what_is_no_range(text):
    with pytest.raises(InputError, match="is no range of clusters"):
        sweep_clusters(text)


def test_nodes_are_whole_domains():
    assert [c.short_name for c in node_clusters(chip("h100"), (1, 16))] == ["h100:8x1", "h100:8x16"]
    with pytest.raises(InputError, match="v5p has no nodes"):
        node_clusters(chip("v5p"), (1,))


def test_every_point_is_the_planners_own_answer():
    rates = fitted_calibration(chip("h100"))
    points = curve(sweep_clusters("h100:8x1..8x2"), rates=rates)
    for point in points:
        best = rank_plans(Setting(LLAMA, point.cluster, JOB, rates)).strategies[0]
        assert point.best.estimate.step_s == pytest.approx(best.estimate.step_s, rel=1e-9)
        assert point.best.strategy.mesh == best.strategy.mesh
        assert point.tokens_per_s == pytest.approx(64 * 4096 / best.estimate.step_s)
        assert point.parts.step_s == pytest.approx(best.estimate.step_s, rel=1e-6)
    assert points[1].best.estimate.step_s < points[0].best.estimate.step_s


def test_weak_scaling_keeps_the_batch_per_chip():
    points = curve(sweep_clusters("h100:8x2..8x4"), weak=True)
    assert [point.job.batch_seqs for point in points] == [64, 128]
    steps = [point.best.estimate.step_s for point in points]
    assert steps[1] == pytest.approx(steps[0], rel=0.05)


def test_where_nothing_runs_the_reason_is_said():
    small, large = curve(sweep_clusters("h100:8x1,h100:8x4"), of=load_model("llama3-70b"))
    assert small.best is None
    assert small.reason.startswith("does not fit: ")
    assert large.best is not None
    assert small.to_json()["mfu"] is None
    (odd,) = curve([parse_cluster("h100:7x1")], axes={"tensor": 7})
    assert odd.reason == "does not divide"


def test_axes_and_fields_stay_as_given():
    (point,) = curve([parse_cluster("h100:8x2")], axes={"tensor": 4}, overrides={"remat": "block"})
    assert (point.best.strategy.mesh["tensor"], point.best.strategy.remat) == (4, "block")


def test_what_a_token_costs():
    (point,) = curve([parse_cluster("v5p:2x2x2")])
    hours = point.best.estimate.step_s / 3600
    assert point.usd_per_token == pytest.approx(8 * hours * 4.2 / (64 * 4096))


def test_what_is_refused():
    with pytest.raises(InputError, match="a sweep is over clusters of one chip, not of h100 and v5p"):
        curve(sweep_clusters("h100:8x1,v5p:4x4x4"))
    odd = Job(batch_seqs=63, seq_len=4096)
    with pytest.raises(InputError, match="are no whole number on 8 chips"):
        curve((parse_cluster("h100:8x2"), parse_cluster("h100:8x1")), job=odd, weak=True)
