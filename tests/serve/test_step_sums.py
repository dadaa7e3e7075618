"""Sums over an engine's steps: what each held by the scheduler, and the seconds between what a client sees."""

import time
from collections import Counter

import numpy as np
import pytest

from meshwright.batching.limits import POLICIES, SchedulerLimits
from meshwright.batching.request import GenerationRequest
from meshwright.batching.scheduler import Scheduler
from meshwright.serve.engine import Engine
from meshwright.serve.group import EngineGroup
from meshwright.serve.request import TokenRequest
from meshwright.serve.step_sums import StepSums, SummedSteps, held_step
from tests.serve.test_engine_pool import PAGE_LEN, SLOTS, CheckedStep
from tests.speed import took

PROMPTS = [(7, 5), (3, 9), (12, 2), (5, 1), (9, 8), (2, 6)]
LIMITS = {"max_requests": SLOTS, "page_len": PAGE_LEN, "num_pages": 60, "token_budget": 8}


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def engine_of(monkeypatch):
    def make(**options) -> Engine:
        limits = SchedulerLimits(**{**LIMITS, **options})
        step = CheckedStep(limits.num_pages, batch_invariant=False)
        monkeypatch.setattr("meshwright.serve.engine.TokenDrawer", lambda *_: step)
        return Engine(step, None, limits)

    return make


def planned_of(prompts=PROMPTS):
    """Every step of a scheduler with these requests."""
    scheduler = Scheduler(SchedulerLimits(**LIMITS))
    for number, (prompt, output) in enumerate(prompts):
        scheduler.submit(GenerationRequest(number=number, prompt=prompt, output=output))
    while scheduler.load:
        planned = scheduler.plan()
        yield planned
        scheduler.commit(planned)


def test_sums_are_those_of_the_planned_steps(engine_of):
    engine = engine_of()
    engine.run([TokenRequest(prompt=(1,) * prompt, max_tokens=output) for prompt, output in PROMPTS])
    found = engine.state().sums
    assert {kind for kind, _ in found} == {"decode", "mixed"}
    expected, steps = np.zeros(5), Counter[str]()
    for planned in planned_of():
        pairs = planned.prefill_tokens * (planned.prefill_past + 1)
        held = [len(planned.decode), planned.cached_tokens, planned.prefill_tokens, pairs]
        steps["mixed" if planned.prefill else "decode"] += 1
        expected += [1, *held]
    totals = {
        kind: StepSums(*map(sum, zip(*(one for (its, _), one in found.items() if its == kind), strict=True)))
        for kind in ("decode", "mixed")
    }
    assert {kind: one.steps for kind, one in totals.items()} == steps
    whole = [a + b for a, b in zip(*totals.values(), strict=True)]
    np.testing.assert_allclose([whole[0], *whole[2:6]], expected)
    # each pair of a token and one up to it is attended to once: by the prompt's tokens, then by the output's
    pairs = sum(length * (length + 1) / 2 for prompt, output in PROMPTS for length in [prompt + output - 1])
    assert sum(one.pairs + one.cached + one.decoded for one in totals.values()) == pytest.approx(pairs)
    # a row with logits for each token
    assert totals["decode"].outputs == totals["decode"].decoded
    assert sum(one.outputs for one in totals.values()) == sum(output for _, output in PROMPTS)
    # a sequence reads its positions once a step, however many of its rows are in it
    assert totals["decode"].positions == totals["decode"].cached + totals["decode"].decoded
    assert totals["mixed"].cached < totals["mixed"].positions < totals["mixed"].cached + totals["mixed"].pairs
    for (kind, rows), one in found.items():
        assert one.decoded + one.prefilled <= rows * one.steps, (kind, rows)


def test_engines_of_a_group_add_to_the_same_sums(engine_of):
    alone, group = engine_of(), EngineGroup([engine_of(), engine_of()])
    asked = [TokenRequest(prompt=(1,) * prompt, max_tokens=output) for prompt, output in PROMPTS]
    alone.run(asked)
    group.run(asked)
    found, state = group.state().sums, group.state()
    assert sum(one.steps for one in found.values()) == state.steps > max(one.state().steps for one in group.engines)
    assert all(one.state().sums is found for one in group.engines)
    for field in ("decoded", "prefilled", "outputs"):  # the same tokens, whoever made them
        assert sum(getattr(one, field) for one in found.values()) == sum(
            getattr(one, field) for one in alone.state().sums.values()
        )


def test_a_step_lasts_from_its_dispatch_or_the_end_of_the_step_before():
    clock = Clock()
    times, planned = SummedSteps(clock), next(planned_of([(4, 2)]))

    def dispatched():
        return held_step([planned], clock.at, decoded=0, rows=8, outputs=1)

    first = dispatched()
    clock.at += 1.0
    second = dispatched()  # while the first one runs
    clock.at += 2.0
    times.read(first)
    clock.at += 0.5
    times.read(second)
    assert times.sums[("mixed", 8)].seconds == 3.5
    clock.at += 60.0  # nothing to do
    third = dispatched()
    clock.at += 0.25
    times.read(third)
    assert times.sums[("mixed", 8)] == StepSums(3, 3.75, 0, 0, 12, 30.0, 12, 3)


def test_another_thread_keeps_what_it_has_copied():
    clock = Clock()
    times, planned = SummedSteps(clock), next(planned_of([(4, 2)]))
    times.read(held_step([planned], clock.at, decoded=0, rows=8, outputs=1))
    copied = dict(times.sums)
    times.read(held_step([planned], clock.at, decoded=0, rows=8, outputs=1))
    assert copied[("mixed", 8)].steps == 1
    assert times.sums[("mixed", 8)].steps == 2


@pytest.mark.parametrize("policy", POLICIES)
def test_seconds_add_up_to_the_time_that_an_engine_works(engine_of, policy):
    engine = engine_of(policy=policy)
    slept, step = 0.002, engine.packed.step
    engine.packed.step = lambda *given: (time.sleep(slept), step(*given))[1]
    start_s = time.perf_counter()
    outputs = engine.run([TokenRequest(prompt=(1,) * prompt, max_tokens=output) for prompt, output in PROMPTS])
    wall_s, sums = time.perf_counter() - start_s, engine.state().sums.values()
    seconds, steps = sum(one.seconds for one in sums), sum(one.steps for one in sums)
    assert steps == engine.state().steps
    assert slept * steps <= seconds <= wall_s
    assert seconds > 0.5 * wall_s
    for of_one in outputs:
        assert start_s <= of_one[0].admitted_s <= start_s + wall_s
        assert len({one.admitted_s for one in of_one}) == 1
    assert max(of_one[0].admitted_s for of_one in outputs) > min(of_one[0].admitted_s for of_one in outputs)


def test_adding_a_step_takes_microseconds():
    clock = Clock()
    times, steps = SummedSteps(clock), list(planned_of(PROMPTS * 20))
    with took() as cpu:
        for planned in steps:
            times.read(held_step([planned], clock(), decoded=len(planned.decode), rows=8, outputs=1))
    assert cpu.yardsticks / len(steps) < 5e-4  # a yardstick is 0.1 s; about 4e-5
