"""Judges islands by their messages: which states differ, which islands are slow. Sets timeouts by past steps' times."""

import statistics
import time
from collections import Counter, deque
from collections.abc import Sequence

import msgspec

from meshwright.islands.exchange import Timeouts

SLOW, SLOW_STEPS = 1.5, 20
"""An island is slow if its work takes over SLOW times the median of the others for SLOW_STEPS steps in a row."""
LEAST_STEP_S, STEPS_TO_WAIT, PACED_STEPS = 30.0, 10, 5
"""The timeout of a step is STEPS_TO_WAIT median steps, at least LEAST_STEP_S seconds, once PACED_STEPS are timed."""


class GoBackError(Exception):
    """All islands return to the newest checkpoint."""


def odd_islands(digests: Sequence[tuple[int, str]]) -> frozenset[int]:
    """Returns the islands whose state digests, (island, digest) per process, differ from the most frequent ones; all
    islands if two states are equally frequent. Islands with a "" digest are ignored."""
    by_island: dict[int, list[str]] = {}
    for island, digest in digests:
        by_island.setdefault(island, []).append(digest)
    words = {island: " ".join(own) for island, own in by_island.items() if all(own)}
    ranked = Counter(words.values()).most_common(2)
    if len(ranked) < 2:
        return frozenset()
    is_known = ranked[0][1] > ranked[1][1]
    return frozenset(island for island, own in words.items() if not is_known or own != ranked[0][0])


class Stragglers:
    """Detects slow islands from their seconds of work in each step."""

    def __init__(self) -> None:
        self._slow: set[int] = set()
        self._steps: Counter[int] = Counter()

    def seen(self, work_s: dict[int, float]) -> list[str]:
        """Adds a step, island -> seconds; returns a line for each island that has become slow or is no longer slow."""
        lines = []
        for island, own_s in work_s.items():
            others_s = statistics.median([s for other, s in work_s.items() if other != island] or [own_s])
            is_slow = own_s > SLOW * others_s
            self._steps[island] = self._steps[island] + 1 if is_slow != (island in self._slow) else 0
            if self._steps[island] == SLOW_STEPS:
                self._steps[island] = 0
                self._slow ^= {island}
                figures = f"it works {own_s:.3g} s a step, the others {others_s:.3g} s"
                lines.append(f"island {island} is {'slow' if is_slow else 'no longer slow'}: {figures}")
        return lines


class StepTimeouts:
    """Derives timeouts (``now``) from the median time of the last 50 steps; each timeout exceeds inner ones."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._first, self.now, self._since = timeouts, timeouts, 0.0
        self._step_s: deque[float] = deque(maxlen=50)

    @property
    def long(self) -> Timeouts:
        """The timeouts of a step that follows a long task, such as an evaluation; that step is not timed."""
        self._since = 0.0
        return msgspec.structs.replace(self.now, step_s=self.now.start_s / 2)

    def step_done(self) -> None:
        """Adds the time since the last step to the statistics and updates ``now``."""
        since, self._since = self._since, time.monotonic()
        if since:
            self._step_s.append(self._since - since)
        if len(self._step_s) >= PACED_STEPS:
            least_s, usual_s = min(self._first.step_s, LEAST_STEP_S), statistics.median(self._step_s)
            step_s = max(least_s, STEPS_TO_WAIT * usual_s)
            start_s = max(self._first.start_s, 3 * step_s)
            self.now = msgspec.structs.replace(self._first, step_s=step_s, start_s=start_s)
