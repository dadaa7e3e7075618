"""Where the wall time of a run goes: steps, and everything that keeps them waiting."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import msgspec

Part = Literal["compile", "checkpoint", "evaluation", "data"]


class Goodput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of one start of a run, from the first thing it did to its summary.

    ``steps_s`` is the time in training steps; ``checkpoint_s`` what steps waited for checkpoints, not the writing
    that went on beside them; ``data_s`` what they waited for batches. ``lost_s`` are steps that an earlier start did
    and this one repeats, since no checkpoint held them. The rest of ``wall_s`` is start-up, logging and files.
    """

    wall_s: float
    steps_s: float
    compile_s: float = 0.0
    checkpoint_s: float = 0.0
    evaluation_s: float = 0.0
    data_s: float = 0.0
    lost_steps: int = 0
    lost_s: float = 0.0

    @property
    def share(self) -> float:
        """Goodput: the time in steps over the wall time."""
        return self.steps_s / self.wall_s

    @property
    def other_s(self) -> float:
        """What no part accounts for."""
        counted = self.steps_s + self.compile_s + self.checkpoint_s + self.evaluation_s + self.data_s
        return max(0.0, self.wall_s - counted)


class Stopwatch:
    """Adds up the seconds of each part from the moment it is made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._spent: Counter[Part] = Counter()

    @contextmanager
    def timed(self, part: Part) -> Iterator[None]:
        """Count the time inside as ``part``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(part, time.perf_counter() - start)

    def add(self, part: Part, seconds: float) -> None:
        """Count these seconds as ``part``."""
        self._spent[part] += seconds  # type: ignore[assignment]

    def seconds(self, part: Part) -> float:
        """What has been counted as ``part`` until now."""
        return self._spent[part]

    def goodput(self, *, steps_s: float, lost_steps: int = 0, lost_s: float = 0.0) -> Goodput:
        """All of it until now."""
        parts = {f"{part}_s": float(seconds) for part, seconds in self._spent.items()}
        wall = time.perf_counter() - self._start
        return Goodput(wall_s=wall, steps_s=steps_s, lost_steps=lost_steps, lost_s=lost_s, **parts)
