"""The time of a synchronous run, or of one part of a fleet, by what it was spent on."""

from collections import deque

WORDS = (
    *("productive", "checkpoint_save", "checkpoint_restore", "wasted_progress", "infrastructure_recovery"),
    *("device_init", "training_prep", "program_startup", "data_loading", "other"),
)
"""What time is spent on, in the words of ml-goodput-measurement; ``other`` is stragglers, groups and outer steps."""
WORK, SAVE, RESTORE, WASTED, RECOVERY, INIT, PREP, STARTUP, DATA, OTHER = range(len(WORDS))

Phases = list[tuple[int, float]]
"""(word, seconds) that pass before work goes on."""


class FleetRun:
    """Cycles of ``work_s`` of steps, ``save_s`` and an ``outer_s`` that keep them, on a ``share`` of the fleet.

    ``spent`` has seconds by word, those of the whole fleet.
    """

    def __init__(self, work_s: float, save_s: float, share: float, outer_s: float = 0.0) -> None:
        self.work_s, self.cycle_s, self.share = work_s, work_s + save_s + outer_s, share
        self.outer_share = outer_s and outer_s / (save_s + outer_s)
        self.spent = [0.0] * len(WORDS)
        self.now = self.offset = self.unsaved = self.ready_s = 0.0
        self.slow_until_s = self.slow_loss = 0.0  # until then, of all time in which work goes on
        self.phases: Phases = []
        self.lost_hosts: set[int] = set()
        self.trained: list[tuple[float, float, float]] | None = None
        # (time, offset, work, of it unsaved) at each return to full speed: what was saved before wrong numbers came
        self._returns: deque[tuple[float, float, float, float]] = deque([(0.0, 0.0, 0.0, 0.0)], maxlen=256)

    def settle(self, time_s: float) -> None:
        """Accounts the time until ``time_s``, in which no fault happened: first the phases, then cycles."""
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
        """Returns the work that was kept by an earlier time."""
        since, offset, work, unsaved = next(
            (one for one in reversed(self._returns) if one[0] <= time_s), self._returns[0]
        )
        cycles = int((offset + max(0.0, time_s - since)) / self.cycle_s)
        kept = (cycles * self.work_s - min(offset, self.work_s)) * self.share if cycles else -unsaved
        return min(work + kept, self.spent[WORK] - self.unsaved)

    def lose(self, seconds: float) -> None:
        """Turns the last seconds of work into wasted progress."""
        seconds = min(seconds, self.spent[WORK])
        self.spent[WORK] -= seconds
        self.spent[WASTED] += seconds
        self.unsaved = max(0.0, self.unsaved - seconds)

    def stop(self, phases: Phases) -> None:
        """Begins anew from what is kept, after these phases; those that were left are dropped."""
        self.offset = self.unsaved = 0.0
        self.phases = phases
        self.ready_s = self.now + sum(seconds for _, seconds in phases)
