"""Policies beside what follows from their definitions: closed forms, faults by hand, hours that add up."""

from itertools import pairwise

import numpy as np
import pytest
from msgspec.structs import replace

from meshwright.core.errors import InputError
from meshwright.cost.formulas.failures import exact_steps, useful_share
from meshwright.simulate.fleet.fleet import POLICIES, Fault, TrainingFleet, checkpoint_steps, drawn_faults
from meshwright.simulate.fleet.outcome import simulate_faults, simulate_fleet
from meshwright.spec.faults.rates import FaultComponent, FaultRates, FaultTimes, load_rates

DAY_S = 86400.0
NO_TIME = dict.fromkeys(FaultTimes.__struct_fields__, 0.0) | {"disk_s": 1e9, "slowdown": 1.0}
"""Times of a fleet whose faults cost nothing."""


def fleet(kind="process", per_chip_hour=1e-4, times=None, **given) -> TrainingFleet:
    component = FaultComponent(name="chip", kind=kind, per_chip_hour=per_chip_hour)
    return TrainingFleet(**{
        **{"num_chips": 6000, "num_hosts": 750, "step_s": 15.0, "checkpoint_steps": 23},
        "rates": FaultRates(source="a test", components=(component,)),
        "times": times if isinstance(times, FaultTimes) else FaultTimes(**{**NO_TIME, **(times or {})}),
        **given,
    })  # fmt: skip


@pytest.mark.parametrize(("save_s", "restart_s"), [(10.0, 600.0), (60.0, 60.0), (0.0, 1200.0)])
def test_one_component_is_its_closed_form(save_s, restart_s):
    """Exponential faults of 6,000 chips: E[time] is that of Daly, within the interval of the mean over 40 seeds."""
    given = fleet(times={"save_s": save_s, "restart_s": restart_s})
    assert given.mtbf_s == pytest.approx(6000)
    expected = useful_share(23 * 15, checkpoint_s=save_s, restart_s=restart_s, mtbf=6000)
    goodputs = [
        simulate_faults(given, "stop", drawn_faults(given, 60 * DAY_S, seed), duration_s=60 * DAY_S).goodput.mean
        for seed in range(40)
    ]
    assert abs(np.mean(goodputs) - expected) < 3 * np.std(goodputs) / np.sqrt(len(goodputs))
    assert np.std(goodputs) < 0.01


def mean_goodput(given, policy) -> tuple[float, float]:
    """Mean and its error over 20 seeds of 60 days."""
    found = [
        simulate_faults(given, policy, drawn_faults(given, 60 * DAY_S, seed), duration_s=60 * DAY_S).goodput.mean
        for seed in range(20)
    ]
    return float(np.mean(found)), float(np.std(found) / np.sqrt(20))


def test_memory_and_islands_are_closed_forms_too():
    """A copy to memory is a checkpoint of all, an outer step one of an island, which fails an eighth as often."""
    given = fleet(times={"memory_s": 2.0, "restart_s": 300.0}, memory_steps=10)
    mean, error = mean_goodput(given, "memory")
    assert abs(mean - useful_share(150, checkpoint_s=2, restart_s=300, mtbf=6000)) < 3 * error
    given = fleet(times={"outer_s": 5.0, "restart_s": 300.0}, num_replicas=8, outer_every=20)
    mean, error = mean_goodput(given, "diloco")
    assert abs(mean - useful_share(300, checkpoint_s=5, restart_s=300, mtbf=48000)) < 3 * error


def test_an_elastic_fleet_keeps_what_lives_and_does_not_wait():
    """A replica is away R of every 8 M + R; all wait for each fault, for each return, and lose half a step."""
    given = fleet(times={"detect_s": 20.0, "regroup_s": 5.0, "restart_s": 580.0}, num_replicas=8)
    live, waits_s = 48000 / (48000 + 600), 20 + 2 * 5 + 15 / 2
    mean, _ = mean_goodput(given, "elastic")
    assert mean == pytest.approx(live * (1 - live * waits_s / 6000), abs=2e-3)


def test_the_exact_interval_is_best_in_the_simulation_too():
    given = fleet(times={"save_s": 60.0, "restart_s": 300.0})
    best = exact_steps(15, checkpoint_s=60, mtbf=6000)
    faults = drawn_faults(given, 400 * DAY_S, 0)

    def goodput(steps: int) -> float:
        return simulate_faults(
            replace(given, checkpoint_steps=steps), "stop", faults, duration_s=400 * DAY_S
        ).goodput.mean

    assert max((best // 2, best, best * 2), key=goodput) == best


@pytest.mark.parametrize(
    ("kind", "times", "lost"),
    [
        ("process", {"detect_s": 20}, {"wasted_progress": 100, "infrastructure_recovery": 20}),
        ("hang", {"hang_s": 600}, {"wasted_progress": 100, "infrastructure_recovery": 600}),
        ("host", {"detect_s": 20, "swap_s": 60}, {"wasted_progress": 100, "infrastructure_recovery": 80}),
        ("straggler", {"straggler_s": 900, "slowdown": 1.5}, {"other": 300}),
        ("planned", {"save_s": 4}, {"checkpoint_save": 4 * 16 + 4}),
        (
            "process",
            {"init_s": 1, "prep_s": 2, "startup_s": 3, "restore_s": 4, "data_s": 5},
            {"wasted_progress": 100, "device_init": 1, "training_prep": 2, "program_startup": 3}
            | {"checkpoint_restore": 4, "data_loading": 5},
        ),
    ],
)  # fmt: skip
def test_one_fault_of_a_run_that_stops(kind, times, lost):
    """Ten steps of 60 s to a checkpoint; the fault comes 100 s after the eighth one."""
    given = fleet(times=times, step_s=60.0, checkpoint_steps=10, spares=0.1)
    fault_s = 8 * (600 + times.get("save_s", 0)) + 100
    found = simulate_faults(given, "stop", [Fault(fault_s, 0, kind)], duration_s=10_000.0)
    assert {word: s for word, s in found.seconds.items() if s and word != "productive"} == pytest.approx(lost)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("daily", "expected"), [(48, 0.713), (480, 0.667)])
def test_stragglers_that_overlap_make_steps_slow_once(policy, daily, expected):
    """Steps are slow while any of them is on: of a share 1 - e^(-rate T) of the time a third is lost, never more."""
    times = {"straggler_s": 3600.0, "slowdown": 1.5}
    given = fleet("straggler", daily / 24 / 6000, times, memory_steps=23)
    [found] = simulate_fleet(given, [policy], duration_s=30 * DAY_S, seeds=20)
    assert found.goodput.mean == pytest.approx(expected, abs=2e-3)
    assert found.goodput.p5 >= 1 / 1.5 - 1e-12


def test_a_straggler_prolongs_what_another_began_and_outlives_a_restart():
    given = fleet(times={"straggler_s": 900.0, "slowdown": 1.5, "restart_s": 100.0}, step_s=60.0, checkpoint_steps=10)
    faults = [Fault(1000.0, 0, "straggler"), Fault(1600.0, 0, "straggler"), Fault(2000.0, 0, "process")]
    found = simulate_faults(given, "stop", faults, duration_s=1e4)
    assert found.seconds["other"] == pytest.approx((1500 - 100) / 3)


def test_no_seconds_are_negative():
    """Also where saving takes none, and rounding makes the work of a cycle larger than the time that passed."""
    given = fleet("straggler", times={"straggler_s": 60.0, "slowdown": 1.5}, step_s=0.1)
    for seed in range(10):
        found = simulate_faults(given, "stop", drawn_faults(given, DAY_S, seed), duration_s=DAY_S)
        assert 0 <= found.seconds["checkpoint_save"] < 1e-6


@pytest.mark.parametrize(("policy", "outer_s"), [("elastic", 0), ("memory", 0), ("diloco", 24 * 5)])
def test_all_save_to_disk_once_in_disk_s_of_work(policy, outer_s):
    """Also where copies to memory are rare as nothing fails; outer steps are no part of it."""
    given = fleet(times={"save_s": 60.0, "disk_s": 3600.0, "outer_s": 5.0}, num_replicas=4, memory_steps=10**6)
    seconds = simulate_faults(given, policy, [], duration_s=10 * 3660.0 + outer_s).seconds
    assert (seconds["checkpoint_save"], seconds["other"]) == pytest.approx((600, outer_s))


def test_wrong_numbers_cost_what_was_saved_after_them():
    """They come 1,000 s before they are noticed, 200 s after a checkpoint: two later checkpoints are lost too."""
    given = fleet(step_s=60.0, checkpoint_steps=10)
    found = simulate_faults(given, "stop", [Fault(4800.0, 0, "corruption", 0, 1000.0)], duration_s=1e4)
    assert found.seconds["wasted_progress"] == 1200
    earlier = [Fault(4500.0, 0, "process"), Fault(4800.0, 0, "corruption", 0, 1000.0)]
    found = simulate_faults(given, "stop", earlier, duration_s=1e4)
    assert found.seconds["wasted_progress"] == 300 + 600 + 300


def test_a_host_without_a_spare_waits_for_a_repair():
    given = fleet(times={"repair_s": 500.0, "reboot_s": 50.0})
    for spares, kind, wait_s in ((0, "host", 500), (0, "reboot", 50), (0.001, "host", 0)):
        found = simulate_faults(replace(given, spares=spares), "stop", [Fault(100.0, 0, kind)], duration_s=1e4)
        assert found.seconds["infrastructure_recovery"] == wait_s


def test_a_fault_during_a_restart_begins_it_again():
    given = fleet(times={"restart_s": 300.0})
    found = simulate_faults(given, "stop", [Fault(345.0, 0, "process"), Fault(445.0, 0, "process")], duration_s=1e4)
    assert found.seconds["infrastructure_recovery"] == 400
    assert found.seconds["wasted_progress"] == 0


def test_an_elastic_fleet_goes_on_smaller():
    """One of four replicas is away for 1,000 s; all wait 5 s for its loss, and lose the step in flight."""
    times = {"detect_s": 4.0, "regroup_s": 1.0, "restart_s": 900.0, "startup_s": 66.0, "copy_s": 30.0}
    given = fleet(times=times, step_s=10.0, num_replicas=4)
    found = simulate_faults(given, "elastic", [Fault(1003.0, 2, "process")], duration_s=1e4)
    seconds = found.seconds
    assert seconds["wasted_progress"] == pytest.approx(3)
    assert seconds["infrastructure_recovery"] == pytest.approx(0.75 * 4 + 904 / 4)
    assert seconds["other"] == pytest.approx(0.75 * 1 + 1)
    assert seconds["productive"] == pytest.approx(1e4 - 3 - 0.75 * 4 - 904 / 4 - 1.75 - 66 / 4 - 30 / 4)


def test_a_cut_link_is_back_with_a_state_of_others():
    times = {"detect_s": 4.0, "regroup_s": 1.0, "restart_s": 900.0, "startup_s": 66.0, "copy_s": 30.0}
    given = fleet(times=times, step_s=10.0, num_replicas=4)
    seconds = simulate_faults(given, "elastic", [Fault(1000.0, 2, "link")], duration_s=1e4).seconds
    lost = {"infrastructure_recovery": 0.75 * 4 + 4 / 4, "checkpoint_restore": 30 / 4, "other": 0.75 + 1}
    assert {word: s for word, s in seconds.items() if s and word != "productive"} == pytest.approx(lost)


def test_an_elastic_fleet_that_loses_all_goes_back_to_the_disk():
    given = fleet(times={"restart_s": 100.0, "disk_s": 600.0}, step_s=10.0, num_replicas=2)
    both = [Fault(1000.0, 0, "process"), Fault(1050.0, 1, "process")]
    seconds = simulate_faults(given, "elastic", both, duration_s=1e4).seconds
    assert seconds["wasted_progress"] == pytest.approx(400 + 25)
    assert seconds["infrastructure_recovery"] == pytest.approx(100)


def test_memory_falls_back_to_the_disk_where_a_neighbour_is_lost_too():
    times = {"restart_s": 100.0, "disk_s": 1000.0, "copy_s": 7.0, "restore_s": 70.0}
    given = fleet(times=times, step_s=10.0, memory_steps=5, spares=0.1)
    near, far = ([Fault(1920.0, 0, "host", 9), Fault(1930.0, 0, "host", host)] for host in (10, 500))
    seconds = simulate_faults(given, "memory", far, duration_s=1e4).seconds
    assert (seconds["wasted_progress"], seconds["checkpoint_restore"]) == (20, 7)
    seconds = simulate_faults(given, "memory", near, duration_s=1e4).seconds
    assert (seconds["wasted_progress"], seconds["checkpoint_restore"]) == (20 + 900, 70)


def test_islands_stop_alone():
    given = fleet(times={"restart_s": 100.0, "outer_s": 1.0}, step_s=10.0, num_replicas=4, outer_every=10)
    seconds = simulate_faults(given, "diloco", [Fault(150.0, 1, "process")], duration_s=1e4).seconds
    assert seconds["wasted_progress"] == pytest.approx((150 - 101) / 4)
    assert seconds["infrastructure_recovery"] == pytest.approx(100 / 4)
    assert simulate_faults(given, "diloco", [], duration_s=1010.0).seconds["other"] == pytest.approx(10)


@pytest.mark.parametrize("policy", POLICIES)
def test_hours_add_up(policy):
    """Also where the fleet is nearly always in a restart; and no policy does better without the faults' cost."""
    rates, duration_s = load_rates("llama3"), 20 * DAY_S
    for chips, replicas in ((16384, 16), (2_000_000, 2)):
        given = fleet(rates=rates, times=FaultTimes(), num_chips=chips, num_hosts=chips // 8)
        given = replace(given, num_replicas=replicas, spares=0.02)
        [found] = simulate_fleet(given, [policy], duration_s=duration_s, seeds=2)
        assert sum(found.seconds.values()) == pytest.approx(duration_s)
        assert min(found.seconds.values()) >= 0
        assert found.goodput.p5 <= found.goodput.mean <= found.goodput.p95 <= found.uptime.p95 <= 1
        assert (
            all(start < end <= after for (start, end, _), (after, *_) in pairwise(found.trained)) or policy == "diloco"
        )


def test_order_of_policies_of_a_large_fleet():
    """What stops less keeps more: a part of the fleet before the whole, memory before the disk."""
    rates = load_rates("llama3")
    given = fleet(
        rates=rates, times=rates.times_at(), num_chips=100_000, num_hosts=12_500, num_replicas=32, spares=0.02
    )
    stop, elastic, memory, diloco = (
        outcome.goodput.mean for outcome in simulate_fleet(given, POLICIES, duration_s=30 * DAY_S, seeds=3)
    )
    assert stop < memory + 0.02 < diloco < elastic


@pytest.mark.parametrize("rule", ["young", "daly", "exact", "auto", "24steps", "360s"])
def test_rules_of_the_interval(rule):
    steps = checkpoint_steps(rule, step_s=15, save_s=10, mtbf_s=6000)
    assert steps == (24 if rule[0].isdigit() else 23)


@pytest.mark.parametrize("rule", ["often", "-3steps", "1week", "nan", "10min"])
def test_rules_that_are_none(rule):
    with pytest.raises(InputError, match="is not auto, exact, young, daly, 30steps or 600s"):
        checkpoint_steps(rule, step_s=15, save_s=10, mtbf_s=6000)


def test_faults_of_a_real_run_are_checked():
    for wrong in (Fault(1, 3, "process"), Fault(-1, 0, "process"), Fault(1, 0, "melted")):
        with pytest.raises(InputError, match="give process or link"):
            simulate_faults(fleet(), "stop", [wrong], duration_s=10.0)
