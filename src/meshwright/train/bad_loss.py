"""Detects losses that are not finite or far above recent ones, and decides what the run does then."""

import math
import statistics
from collections import deque
from collections.abc import Callable

from meshwright.islands.watch import GoBackError
from meshwright.train.settings import TrainSettings

SPIKE_STEPS, LEAST_STEPS = 50, 10
"""Most and fewest recent good losses with which a loss is compared to detect a spike."""
MOST_BAD = 5
"""Most bad losses that a run survives; the count restarts after `SPIKE_STEPS` good losses in a row."""


class LossWatch:
    """Judges the loss of each step. ``recent`` are the last good losses; all islands must start with equal ones."""

    def __init__(self, settings: TrainSettings) -> None:
        self._settings, self._bad, self._good = settings, 0, 0
        self.recent: deque[float] = deque(maxlen=SPIKE_STEPS)

    def judge(self, step: int, loss: float, grad_norm: float, stop: Callable[[str], object]) -> str:
        """Returns "" for a good step, and a line for a bad step whose update is skipped. Raises GoBackError for a bad
        step under "rollback"; under "stop", or after `MOST_BAD`, calls ``stop``, which must raise an error."""
        fault = self.fault(loss, grad_norm)
        if not fault:
            self.recent.append(loss)
            self._good += 1
            self._bad *= self._good < SPIKE_STEPS
            return ""
        self._bad, self._good = self._bad + 1, 0
        if self._settings.on_bad_loss == "stop" or self._bad > MOST_BAD:
            stop(fault)
        if self._settings.on_bad_loss == "rollback":
            raise GoBackError(f"step {step}: {fault}")
        return f"step {step}: {fault}; its update is left out"

    def fault(self, loss: float, grad_norm: float) -> str:
        """Returns a text of what is wrong with a step's loss or gradient norm, "" if nothing is."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(grad_norm):
            return f"the loss is {loss:.4g} and the norm of the gradient {grad_norm}"
        if self._settings.loss_spike and len(self.recent) >= LEAST_STEPS:
            mean, deviation = statistics.fmean(self.recent), statistics.stdev(self.recent)
            if loss > mean + self._settings.loss_spike * deviation:
                return f"the loss is {loss:.4g}, and was {mean:.4g} on average with a deviation of {deviation:.2g}"
        return ""
