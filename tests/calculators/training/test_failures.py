"""Failures: times between them, the best interval, and the useful share beside a simulated fleet."""

import numpy as np
import pytest

from meshwright.calculators.training.failures import daly_interval_s, goodput, mtbf_s, useful_share, young_interval_s
from meshwright.core.errors import InputError


def test_ten_in_a_thousand_node_days():
    assert mtbf_s(1, failures_per_node_day=0.01) == 100 * 86400
    assert mtbf_s(100, failures_per_node_day=0.01) == 86400
    assert mtbf_s(10_000, failures_per_node_day=0.01) / 60 == pytest.approx(14.4)


@pytest.mark.parametrize(("checkpoint_s", "mtbf"), [(60, 864), (30, 86400), (1, 900), (300, 3600)])
def test_dalys_interval_loses_least(checkpoint_s, mtbf):
    at = daly_interval_s(checkpoint_s, mtbf)
    intervals = at * np.geomspace(0.3, 3, 401)
    shares = [useful_share(t, checkpoint_s=checkpoint_s, restart_s=120, mtbf=mtbf) for t in intervals]
    best = useful_share(at, checkpoint_s=checkpoint_s, restart_s=120, mtbf=mtbf)
    assert best == pytest.approx(max(shares), abs=5e-4)
    young = useful_share(young_interval_s(checkpoint_s, mtbf), checkpoint_s=checkpoint_s, restart_s=120, mtbf=mtbf)
    assert young <= best + 1e-9


def test_intervals_agree_where_checkpoints_are_short():
    assert daly_interval_s(1, 1e6) == pytest.approx(young_interval_s(1, 1e6), rel=1e-3)
    assert daly_interval_s(5000, 1000) == 1000


def simulated(mean_s: float, checkpoint_s: float, restart_s: float, interval_s: float) -> float:
    """Useful share of many intervals: each is begun again, after a restart, until no failure interrupts it."""
    rng = np.random.default_rng(7)
    time_s, done = 0.0, 0
    for _ in range(20_000):
        while (failure := rng.exponential(mean_s)) < interval_s + checkpoint_s:
            time_s += failure
            while (again := rng.exponential(mean_s)) < restart_s:
                time_s += again
            time_s += restart_s
        time_s += interval_s + checkpoint_s
        done += 1
    return done * interval_s / time_s


@pytest.mark.parametrize(("mean_s", "restart_s"), [(900.0, 300.0), (86400.0, 600.0)])
def test_the_share_beside_a_simulation(mean_s, restart_s):
    interval = daly_interval_s(60, mean_s)
    formula = useful_share(interval, checkpoint_s=60, restart_s=restart_s, mtbf=mean_s)
    assert simulated(mean_s, 60, restart_s, interval) == pytest.approx(formula, rel=0.02)


def test_shares_add_up():
    found = goodput(10_000, failures_per_node_day=0.01, checkpoint_s=30, restart_s=300)
    assert found["goodput"] + found["lost_to_checkpoints"] + found["lost_to_failures"] == pytest.approx(1)
    assert found["failures_per_day"] == 100
    assert found["interval_s"] == found["daly_interval_s"]
    assert (
        goodput(10_000, failures_per_node_day=0.01, checkpoint_s=30, restart_s=300, interval_s=10)["interval_s"] == 10
    )


def test_a_fleet_that_never_gets_to_save():
    assert useful_share(1e6, checkpoint_s=1, restart_s=1, mtbf=1.0) == 0.0


@pytest.mark.parametrize("wrong", [{"num_nodes": 0}, {"checkpoint_s": 0}, {"restart_s": -1}, {"interval_s": -5}])
def test_what_no_fleet_has(wrong):
    given = {"num_nodes": 10, "failures_per_node_day": 0.01, "checkpoint_s": 1, "restart_s": 1, **wrong}
    with pytest.raises(InputError):
        goodput(given.pop("num_nodes"), **given)
