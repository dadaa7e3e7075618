"""Budgets and timings: what is measured in turns, what is left out, and that the seconds are kept."""

import time
from types import SimpleNamespace

import jax
import pytest

from meshwright.bench.devices import EMULATED
from meshwright.bench.elementwise import chain_elements
from meshwright.bench.timing import (
    MIN_REPEATS,
    SWEEPS,
    Budget,
    Call,
    budget_of,
    rounds_for,
    sweep_medians,
    time_together,
    timing_of,
)


class Clock:
    """A clock that a test moves."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_a_budget_is_shared_out_from_what_is_left():
    clock = Clock()
    budget = budget_of(10.0, clock)
    first = budget.share(0.5)
    assert first.left_s == 5.0
    clock.now = 8.0
    assert first.left_s == 0.0
    assert budget.left_s == 2.0
    assert budget.share(0.5).left_s == 1.0


def test_median_and_quartiles():
    found = timing_of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (found.median_s, found.low_s, found.high_s, found.repeats) == (3.0, 2.0, 4.0, 5)
    assert found.spread == pytest.approx(2 / 3)


def test_calls_take_turns_there_and_back():
    order: list[str] = []
    calls = {name: Call(run=lambda name=name: order.append(name)) for name in "abc"}
    found, why_not = time_together(calls, budget_of(5), max_repeats=3)
    assert order == [*"abc", *"abc", *"cba", *"abc"]
    assert {one.repeats for one in found.values()} == {3}
    assert not why_not


def test_times_are_of_one_round():
    calls = {"x": Call(run=lambda: time.sleep(0.08), rounds=4)}
    assert 0.02 <= time_together(calls, budget_of(5), max_repeats=3)[0]["x"].median_s < 0.08
    assert 0.02 <= sweep_medians(calls, seconds_each=0.0)["x"] < 0.08


def test_every_sweep_calls_all():
    order: list[str] = []
    sweep_medians({name: Call(run=lambda name=name: order.append(name)) for name in "ab"}, seconds_each=0.0)
    assert order == [*"ab", *"aabb" * SWEEPS]


def test_arguments_are_made_outside_the_time_and_for_every_repeat():
    given: list[int] = []

    def slow(repeat):
        time.sleep(0.1)
        return (repeat,)

    found, _ = time_together({"x": Call(run=given.append, arguments=slow)}, budget_of(5), max_repeats=3)
    assert given == [0, 1, 2, 3]
    assert found["x"].median_s < 0.05


def test_without_time_a_call_is_not_measured_and_says_so():
    ran = []
    _, why_not = time_together({"x": Call(run=lambda: ran.append(1))}, budget_of(0.0))
    assert not ran
    assert why_not == {"x": "no time left"}


def test_the_seconds_are_kept():
    started = time.perf_counter()
    found, _ = time_together({"x": Call(run=lambda: time.sleep(0.05))}, budget_of(0.4), max_repeats=1000)
    assert MIN_REPEATS <= found["x"].repeats <= 10
    assert time.perf_counter() - started < 20  # a thousand calls take 50 s


def test_slow_calls_get_no_more_than_a_little_grace():
    started = time.perf_counter()
    _, why_not = time_together({"x": Call(run=lambda: time.sleep(0.2))}, budget_of(0.1))
    assert why_not == {"x": "no time left"}
    assert time.perf_counter() - started < 6


def test_what_cannot_run_leaves_the_others_alone():
    def fail():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore")

    found, why_not = time_together({"x": Call(run=fail), "y": Call(run=lambda: None)}, budget_of(5), max_repeats=3)
    assert why_not == {"x": "RESOURCE_EXHAUSTED: out of memory"}
    assert set(found) == {"y"}


@pytest.mark.parametrize(("seconds", "rounds"), [(0.02, 1), (0.009, 2), (1e-3, 16), (1e-9, 1024), (5.0, 1)])
def test_rounds_fill_a_call(seconds, rounds):
    assert rounds_for(seconds, target_s=0.02) == rounds


def test_a_budget_is_frozen():
    with pytest.raises(AttributeError):
        Budget(ends=1.0).ends = 2.0


def test_longer_budgets_leave_more_grace():
    """A call that takes 0.3 s is still measured when compiling it used its share of a minute up, not of 5 seconds."""
    for seconds, measured in ((60.0, True), (5.0, False)):
        spent = budget_of(seconds).share(0.0)
        late = Budget(ends=spent.clock() + 0.05, clock=spent.clock, grace_s=spent.grace_s)
        found, _ = time_together({"x": Call(run=lambda: time.sleep(0.3))}, late)
        assert bool(found) is measured


def test_little_time_makes_smaller_arrays():
    devices = SimpleNamespace(emulated=True, sizes=EMULATED, devices=(0,) * 8, cache_bytes=64e6, memory_bytes=1e10)
    much, little = (chain_elements(devices, seconds) for seconds in (100.0, 0.6))
    assert (much, little) == (2**25, 2**21)
