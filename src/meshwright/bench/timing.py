"""Times of calls with their spread, taken side by side and within a number of seconds."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import jax
import msgspec

from meshwright.bench.results import Timing

MIN_REPEATS = 3
"""Fewer times than this have no spread: the figure counts as not measured."""
MAX_REPEATS = 30
GRACE_S = 0.3
GRACE_SHARE = 0.02
"""What may be used beyond a budget so that calls which are compiled by then get their fewest repeats: so many seconds,
or this share of the seconds for everything."""
NO_TIME = "no time left"
FAILURES = (jax.errors.JaxRuntimeError, NotImplementedError, TypeError, ValueError)
"""In one of these a backend says that it has no such element type, or no room."""
SWEEPS = 4


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The moment at which measuring has to be over, on a clock."""

    ends: float
    clock: Callable[[], float] = time.perf_counter
    grace_s: float = GRACE_S

    @property
    def left_s(self) -> float:
        """Seconds until then, never negative."""
        return max(0.0, self.ends - self.clock())

    def share(self, part: float) -> "Budget":
        """A budget that ends after this part of what is left."""
        return Budget(ends=self.clock() + self.left_s * part, clock=self.clock, grace_s=self.grace_s)


def budget_of(seconds: float, clock: Callable[[], float] = time.perf_counter) -> Budget:
    """A budget that begins now."""
    return Budget(ends=clock() + seconds, clock=clock, grace_s=max(GRACE_S, GRACE_SHARE * seconds))


@dataclass(frozen=True, kw_only=True)
class Call:
    """What is timed, and its arguments in each repeat; making them is not timed. A call makes some ``rounds``."""

    run: Callable[..., Any]
    arguments: Callable[[int], tuple[Any, ...]] = lambda repeat: ()
    rounds: int = 1

    def round_s(self, repeat: int) -> float:
        """Seconds of one round, from a call that is made now."""
        given = jax.block_until_ready(self.arguments(repeat))
        begin = time.perf_counter()
        jax.block_until_ready(self.run(*given))
        return (time.perf_counter() - begin) / self.rounds


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """What came of some calls: a timing each, and one line each for those that have none."""

    found: dict[Any, Timing]
    why_not: dict[Any, str]


def timing_of(seconds: list[float]) -> Timing:
    """Median and quartiles of at least one time."""
    low, middle, high = quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    return Timing(median_s=middle, low_s=low, high_s=high, repeats=len(seconds))


def time_together(calls: Mapping[Any, Call], budget: Budget, *, max_repeats: int = MAX_REPEATS) -> Times:
    """Every call timed in turns, so that whatever slows the machine down slows all of them.

    The first run of each, which compiles, is not counted. Turns go on until the budget is used up or ``max_repeats``
    are made, every second one backwards; calls with fewer than three times, for which there is a little grace, are not
    measured.
    """
    seconds: dict[Any, list[float]] = {name: [] for name in calls}
    why_not: dict[Any, str] = {}

    def run(name: Any, repeat: int) -> None:
        try:
            seconds[name].append(calls[name].round_s(repeat))
        except FAILURES as error:
            why_not[name] = first_line(error)

    for name in calls:
        if budget.left_s > 0:
            run(name, 0)
        else:
            why_not[name] = NO_TIME
    warm = [name for name in calls if name not in why_not]
    grace = Budget(ends=max(budget.ends, budget.clock() + budget.grace_s), clock=budget.clock)
    turns = ((repeat, name) for repeat in range(1, max_repeats + 1) for name in warm[:: 1 if repeat % 2 else -1])
    for repeat, name in turns:
        if (budget if repeat > MIN_REPEATS else grace).left_s <= 0:
            break
        if name not in why_not:
            run(name, repeat)
    found = {name: timing_of(times[1:]) for name, times in seconds.items() if len(times) > MIN_REPEATS}
    for name in calls:
        if name not in found:
            why_not.setdefault(name, NO_TIME)
    return Times(found=found, why_not=why_not)


def sweep_medians(calls: Mapping[str, Call], *, seconds_each: float) -> dict[str, float]:
    """Seconds of a round of every call: the median over several sweeps of the medians of each.

    A burst of other work on the machine hits few of the sweeps. In each a call is repeated for its share of the
    seconds, 2 to 200 times.
    """
    for call in calls.values():
        call.round_s(0)
    medians: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(SWEEPS):
        for name, call in calls.items():
            times: list[float] = []
            ends = time.perf_counter() + seconds_each / SWEEPS
            while len(times) < 2 or (time.perf_counter() < ends and len(times) < 200):
                times.append(call.round_s(len(times)))
            medians[name].append(median(times))
    return {name: median(times) for name, times in medians.items()}


def first_line(error: Exception) -> str:
    """The first line of an error, at most 100 characters."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:100]


def rounds_for(seconds: float, *, target_s: float = 0.02, most: int = 1024) -> int:
    """Rounds of something in one call, a power of two, so that the call takes about ``target_s``."""
    wanted = target_s / max(seconds, 1e-9)
    return int(min(most, 2 ** max(0, int(wanted).bit_length() - 1)))
