"""Seconds of a synchronous run, or of one island or replica of a fleet, by category."""

from collections import deque

WORDS = (
    *("productive", "checkpoint_save", "checkpoint_restore", "wasted_progress", "infrastructure_recovery"),
    *("device_init", "training_prep", "program_startup", "data_loading", "other"),
)
"""Categories of time, named as in ml-goodput-measurement; ``other`` is stragglers, regrouping and outer steps."""
WORK, SAVE, RESTORE, WASTED, RECOVERY, INIT, PREP, STARTUP, DATA, OTHER = range(len(WORDS))

Phases = list[tuple[int, float]]
"""(index in `WORDS`, seconds) of each phase before steps resume."""


class FleetRun:
    """A run on the fraction ``share`` of a fleet, in cycles: ``work_s`` seconds of steps, then ``save_s`` to save them
    and ``outer_s`` of an outer step.

    ``spent`` has the seconds by category, multiplied by ``share``."""

    def __init__(self, work_s: float, save_s: float, share: float, outer_s: float = 0.0) -> None:
        self.work_s, self.cycle_s, self.share = work_s, work_s + save_s + outer_s, share
        self.outer_share = outer_s and outer_s / (save_s + outer_s)
        self.spent = [0.0] * len(WORDS)
        self.now = self.offset = self.unsaved = self.ready_s = 0.0
        self.slow_until_s = self.slow_loss = 0.0  # a straggler takes slow_loss of the time until then
        self.phases: Phases = []
        self.lost_hosts: set[int] = set()
        self.trained: list[tuple[float, float, float]] | None = None
        # (time, offset in the cycle, work, unsaved work) at each return to full speed, for `saved_at`
        self._returns: deque[tuple[float, float, float, float]] = deque([(0.0, 0.0, 0.0, 0.0)], maxlen=256)

    def settle(self, time_s: float) -> None:
        """Accounts for the seconds up to ``time_s``, in which no fault happens: pending phases first, then cycles."""
        left_s, spent = time_s - self.now, self.spent
        while self.phases and left_s > 0:
            word, phase_s = self.phases[0]
            passed_s = min(phase_s, left_s)
            spent[word] += passed_s * self.share
            left_s -= passed_s
            if passed_s < phase_s:
                self.phases[0] = (word, phase_s - passed_s)
            else:
                self.phases.pop(0)
                if not self.phases:
                    self.lost_hosts.clear()
                    self._returns.append((time_s - left_s, self.offset, spent[WORK], self.unsaved))
        self.now = time_s
        if left_s <= 0:
            return
        if (slow_s := min(left_s, self.slow_until_s - time_s + left_s)) > 0:
            spent[OTHER] += slow_s * self.slow_loss * self.share
            left_s -= slow_s * self.slow_loss
            self._returns.append((time_s - left_s, self.offset, spent[WORK], self.unsaved))
        if self.trained is not None:
            self.trained.append((time_s - left_s, time_s, self.share))
        end_s = self.offset + left_s
        cycles = int(end_s / self.cycle_s)
        offset = end_s - cycles * self.cycle_s
        into_s = min(offset, self.work_s)
        work_s = cycles * self.work_s + into_s - min(self.offset, self.work_s)
        spent[WORK] += work_s * self.share
        saving_s = max(0.0, left_s - work_s) * self.share
        spent[SAVE] += saving_s * (1 - self.outer_share)
        spent[OTHER] += saving_s * self.outer_share
        self.unsaved = into_s * self.share if cycles else self.unsaved + work_s * self.share
        self.offset = offset

    def saved_at(self, time_s: float) -> float:
        """Returns the seconds of work, multiplied by ``share``, that were saved by an earlier ``time_s``."""
        since, offset, work, unsaved = next(
            (one for one in reversed(self._returns) if one[0] <= time_s), self._returns[0]
        )
        cycles = int((offset + max(0.0, time_s - since)) / self.cycle_s)
        kept = (cycles * self.work_s - min(offset, self.work_s)) * self.share if cycles else -unsaved
        return min(work + kept, self.spent[WORK] - self.unsaved)

    def lose(self, seconds: float) -> None:
        """Moves the last ``seconds`` of work, or all if there are fewer, to wasted progress."""
        seconds = min(seconds, self.spent[WORK])
        self.spent[WORK] -= seconds
        self.spent[WASTED] += seconds
        self.unsaved = max(0.0, self.unsaved - seconds)

    def stop(self, phases: Phases) -> None:
        """Restarts from the saved state after ``phases``, which replace pending phases."""
        self.offset = self.unsaved = 0.0
        self.phases = phases
        self.ready_s = self.now + sum(seconds for _, seconds in phases)
