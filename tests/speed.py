"""CPU time beside that of fixed work, so that limits hold on slow and on busy machines."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Took:
    """CPU time of a context: ``yardsticks`` is known at its end."""

    yardsticks: float


def yardstick() -> float:
    """Returns the CPU seconds of a fixed loop of Python: 0.1 or so."""
    start = time.process_time()
    counts: dict[int, int] = {}
    for number in range(600_000):
        counts[number % 1000] = counts.get(number % 1000, 0) + number
    return time.process_time() - start


@contextmanager
def took() -> Iterator[Took]:
    """Measures the CPU time of its context in yardsticks, those of just before and after it."""
    found, before, start = Took(), yardstick(), time.process_time()
    yield found
    spent = time.process_time() - start
    found.yardsticks = 2 * spent / (before + yardstick())
