"""Times calls in alternation, within a budget of seconds: medians and quartiles."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles
from typing import TypeVar

import jax

from meshwright.bench.results import Timing
from meshwright.core.errors import first_line
from meshwright.core.progress import tracked

MIN_REPEATS = 3
"""Fewest repeats that show a spread; a call with fewer counts as not measured."""
MAX_REPEATS = 30
GRACE_S = 0.3
GRACE_SHARE = 0.02
"""Compiled calls may together exceed their budget by the larger of these, seconds or share of the whole budget, to
reach ``MIN_REPEATS``."""
NO_TIME = "no time left"
FAILURES = (jax.errors.JaxRuntimeError, NotImplementedError, TypeError, ValueError)
"""A backend raises one of these for an element type it does not support, or when memory runs out."""
SWEEPS = 4


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A time budget: ``ends`` is the time on ``clock`` at which measuring ends; ``grace_s`` may extend it."""

    ends: float
    clock: Callable[[], float] = time.perf_counter
    grace_s: float = GRACE_S

    @property
    def left_s(self) -> float:
        """Seconds until the end, never negative."""
        return max(0.0, self.ends - self.clock())

    def share(self, part: float) -> "Budget":
        """Returns a budget of this share of the seconds left."""
        return Budget(ends=self.clock() + self.left_s * part, clock=self.clock, grace_s=self.grace_s)


def budget_of(seconds: float, clock: Callable[[], float] = time.perf_counter) -> Budget:
    """Returns a budget that starts now."""
    return Budget(ends=clock() + seconds, clock=clock, grace_s=max(GRACE_S, GRACE_SHARE * seconds))


Name = TypeVar("Name")


@dataclass(frozen=True, kw_only=True)
class Call:
    """A function to time, of ``rounds`` rounds a call; ``arguments`` makes its inputs before the clock starts."""

    run: Callable[..., object]
    arguments: Callable[[int], tuple[object, ...]] = lambda repeat: ()
    rounds: int = 1

    def round_s(self, repeat: int) -> float:
        """Runs the call and returns the seconds of one round."""
        arguments = jax.block_until_ready(self.arguments(repeat))
        begin_s = time.perf_counter()
        jax.block_until_ready(self.run(*arguments))
        return (time.perf_counter() - begin_s) / self.rounds


def timing_of(seconds: list[float]) -> Timing:
    """Returns median and quartiles of one or more times."""
    low_s, median_s, high_s = quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    return Timing(median_s=median_s, low_s=low_s, high_s=high_s, repeats=len(seconds))


def time_together(
    calls: Mapping[Name, Call], budget: Budget, *, max_repeats: int = MAX_REPEATS
) -> tuple[dict[Name, Timing], dict[Name, str]]:
    """Times calls in alternation, so that other load on the machine affects all of them alike.

    Returns timings by name, and the error or ``NO_TIME`` of each call that failed or had too few repeats.

    The first run of each call compiles it and does not count. Repeats go on until the budget is used up or
    ``max_repeats`` is reached, every second one in reverse order. The budget is extended a little to reach
    ``MIN_REPEATS``; a call with fewer counts as not measured.
    """
    times_by_name: dict[Name, list[float]] = {name: [] for name in calls}
    reason_by_name: dict[Name, str] = {}

    def run(name: Name, repeat: int) -> None:
        try:
            times_by_name[name].append(calls[name].round_s(repeat))
        except FAILURES as error:
            reason_by_name[name] = first_line(error)[:100]

    for name in calls:
        if budget.left_s > 0:
            run(name, 0)
        else:
            reason_by_name[name] = NO_TIME
    warm_names = [name for name in calls if name not in reason_by_name]
    grace_budget = Budget(ends=max(budget.ends, budget.clock() + budget.grace_s), clock=budget.clock)
    turns = ((repeat, name) for repeat in range(1, max_repeats + 1) for name in warm_names[:: 1 if repeat % 2 else -1])
    for repeat, name in turns:
        if (budget if repeat > MIN_REPEATS else grace_budget).left_s <= 0:
            break
        if name not in reason_by_name:
            run(name, repeat)
    timing_by_name = {name: timing_of(times[1:]) for name, times in times_by_name.items() if len(times) > MIN_REPEATS}
    for name in calls:
        if name not in timing_by_name:
            reason_by_name.setdefault(name, NO_TIME)
    return timing_by_name, reason_by_name


def sweep_medians(calls: Mapping[str, Call], *, seconds_each: float) -> dict[str, float]:
    """Returns seconds per round of every call: the median over several sweeps of each sweep's median.

    Other load on the machine is bursty, so it affects few of the sweeps. A sweep repeats each call for its share of
    ``seconds_each``, 2 to 200 times.
    """
    for call in tracked(calls.values(), "compiling what is measured"):
        call.round_s(0)
    medians_by_name: dict[str, list[float]] = {name: [] for name in calls}
    for _ in tracked(range(SWEEPS), "measuring rates, sweeps"):
        for name, call in calls.items():
            times_s: list[float] = []
            end_s = time.perf_counter() + seconds_each / SWEEPS
            while len(times_s) < 2 or (time.perf_counter() < end_s and len(times_s) < 200):
                times_s.append(call.round_s(len(times_s)))
            medians_by_name[name].append(median(times_s))
    return {name: median(medians) for name, medians in medians_by_name.items()}


def rounds_for(seconds: float, *, target_s: float = 0.02, most: int = 1024) -> int:
    """Returns a power of two: the rounds of ``seconds`` each that fit into ``target_s``, from 1 to ``most``."""
    num_rounds = target_s / max(seconds, 1e-9)
    return int(min(most, 2 ** max(0, int(num_rounds).bit_length() - 1)))
