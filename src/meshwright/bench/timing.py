"""Times of calls with their spread, taken side by side and within a number of seconds."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import msgspec

MIN_REPEATS = 3
"""Fewer times than this have no spread: the figure counts as not measured."""
MAX_REPEATS = 30
GRACE_S = 0.3
GRACE_SHARE = 0.02
"""What may be used beyond a budget so that calls which are compiled by then get their fewest repeats: so many seconds,
or this share of the seconds for everything."""
NO_TIME = "no time left"


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


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds: the median of some repeats, and the quartiles around it."""

    median_s: float
    low_s: float
    high_s: float
    repeats: int

    def over(self, rounds: float) -> "Timing":
        """The same of one round, where a call makes several."""
        return Timing(
            median_s=self.median_s / rounds,
            low_s=self.low_s / rounds,
            high_s=self.high_s / rounds,
            repeats=self.repeats,
        )

    @property
    def spread(self) -> float:
        """Distance of the quartiles, as a share of the median."""
        return (self.high_s - self.low_s) / self.median_s


def timing_of(seconds: list[float]) -> Timing:
    """Median and quartiles of at least one time."""
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    return Timing(median_s=middle, low_s=low, high_s=high, repeats=len(seconds))


@dataclass(frozen=True, kw_only=True)
class Call:
    """What is timed, and its arguments in each repeat; making them is not timed."""

    run: Callable[..., Any]
    arguments: Callable[[int], tuple[Any, ...]] = lambda repeat: ()


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """What came of some calls: a timing each, and one line each for those that have none."""

    found: dict[str, Timing]
    why_not: dict[str, str]


def time_together(calls: Mapping[str, Call], budget: Budget, *, max_repeats: int = MAX_REPEATS) -> Times:
    """Every call timed in turns, so that whatever slows the machine down slows all of them.

    The first run of each, which compiles, is not counted. Turns go on until the budget is used up or ``max_repeats``
    are made, every second one backwards; calls with fewer than three times, for which there is a little grace, are not
    measured.
    """
    why_not: dict[str, str] = {}
    ready = {}
    for name, call in calls.items():
        reason = _warm_up(call, budget)
        if reason:
            why_not[name] = reason
        else:
            ready[name] = call
    seconds = _take_turns(ready, budget, why_not, max_repeats=max_repeats)
    found = {name: timing_of(times) for name, times in seconds.items() if len(times) >= MIN_REPEATS}
    for name in calls:
        if name not in found:
            why_not.setdefault(name, NO_TIME)
    return Times(found=found, why_not=why_not)


def _take_turns(
    calls: Mapping[str, Call], budget: Budget, why_not: dict[str, str], *, max_repeats: int
) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    grace = Budget(ends=max(budget.ends, budget.clock() + budget.grace_s), clock=budget.clock)
    for repeat in range(1, max_repeats + 1):
        order = list(calls)[:: 1 if repeat % 2 else -1]
        for name in order:
            if name in why_not:
                continue
            if (budget if repeat > MIN_REPEATS else grace).left_s <= 0:
                return seconds
            try:
                seconds[name].append(_once(calls[name], repeat))
            except jax.errors.JaxRuntimeError as error:
                why_not[name] = first_line(error)
    return seconds


def _warm_up(call: Call, budget: Budget) -> str:
    """Run a call once; the reason why it cannot be, or nothing."""
    if budget.left_s <= 0:
        return NO_TIME
    try:
        _once(call, 0)
    except (jax.errors.JaxRuntimeError, NotImplementedError, TypeError, ValueError) as error:
        # A backend says in one of these that it has no such element type, or no room.
        return first_line(error)
    return ""


def _once(call: Call, repeat: int) -> float:
    given = jax.block_until_ready(call.arguments(repeat))
    begin = time.perf_counter()
    jax.block_until_ready(call.run(*given))
    return time.perf_counter() - begin


def first_line(error: Exception) -> str:
    """The first line of an error, at most 100 characters."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:100]


def rounds_for(seconds: float, *, target_s: float = 0.02, most: int = 1024) -> int:
    """Rounds of something in one call, a power of two, so that the call takes about ``target_s``."""
    wanted = target_s / max(seconds, 1e-9)
    return int(min(most, 2 ** max(0, int(wanted).bit_length() - 1)))
