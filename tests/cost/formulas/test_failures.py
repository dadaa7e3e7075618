"""Failures: times between them, the best interval, and the useful share beside a simulated fleet and Meta's formula."""

import numpy as np
import pytest

from meshwright.core.errors import InputError
from meshwright.cost.formulas.failures import (
    daly_interval_s,
    exact_steps,
    expected_s,
    goodput,
    linear_share,
    mtbf_s,
    recovery_interval_s,
    useful_share,
    young_interval_s,
)


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


def test_the_worked_interval():
    """changlan.org, Optimal Checkpointing Frequency: MTBI 6,000 s, recovery 600 s, checkpoint 10 s, step 15 s."""
    assert young_interval_s(10, 6000) / 15 == pytest.approx(23.1, abs=0.05)
    assert recovery_interval_s(10, 6000, 600) / 15 == pytest.approx(24.2, abs=0.05)
    assert exact_steps(15, checkpoint_s=10, mtbf=6000) == 23


@pytest.mark.parametrize(
    ("step_s", "checkpoint_s", "mtbf"), [(15, 10, 6000), (1, 60, 864), (40, 0.5, 300), (5, 900, 600), (100, 1, 30)]
)
def test_no_other_number_of_steps_is_better(step_s, checkpoint_s, mtbf):
    share = [useful_share(n * step_s, checkpoint_s=checkpoint_s, restart_s=30, mtbf=mtbf) for n in range(1, 2000)]
    assert exact_steps(step_s, checkpoint_s=checkpoint_s, mtbf=mtbf) == 1 + int(np.argmax(share))


def test_a_free_checkpoint_is_saved_at_every_step():
    assert exact_steps(15, checkpoint_s=0, mtbf=6000) == 1


def test_expected_time():
    assert expected_s(3600, mtbf=1e9) == pytest.approx(3600, rel=1e-5)
    assert expected_s(6000, mtbf=6000) == pytest.approx(6000 * (np.e - 1))
    assert expected_s(1e9, mtbf=1.0) == np.inf


RSC1, RSC2 = 24 * 3600 / 6.5e-3, 24 * 3600 / 2.34e-3
"""Seconds between failures of a node: 6.50 and 2.34 in 1000 node-days (arXiv 2410.21680v2, fig. 9)."""


@pytest.mark.parametrize(
    ("nodes", "node_s", "interval_min", "save_s", "restart_min", "said"),
    [
        (2000, RSC1, 60, 0, 5, 0.7),  # 16,000 GPUs in one run
        (2000, RSC1, 5, 0, 5, 0.93),
        (1000, RSC1, 30, 0, 6, 0.9),  # 8,000 GPUs, a minute in the queue (v1, observation 10)
        (1500, RSC1, 7, 10, 5, 0.9),  # 12,000 GPUs, a write of about 10 s (v2, observation 10)
        (12500, RSC2, 2, 0, 2, 0.9),  # 100,000 GPUs, about 2 minutes each
    ],
)
def test_metas_formula_at_its_own_examples(nodes, node_s, interval_min, save_s, restart_min, said):
    times = {"checkpoint_s": save_s, "restart_s": 60 * restart_min, "mtbf": node_s / nodes}
    assert linear_share(60 * interval_min, **times) == pytest.approx(said, abs=0.05)
    assert useful_share(60 * interval_min, **times) == pytest.approx(linear_share(60 * interval_min, **times), rel=0.06)


@pytest.mark.parametrize(("gpus", "hours"), [(16384, 1.8), (131072, 0.23)])
def test_metas_projected_times_to_failure(gpus, hours):
    assert RSC1 / (gpus / 8) / 3600 == pytest.approx(hours, abs=0.005)
