"""Losses that are not finite, or far above those before them, and what a run does then."""

import math
import statistics
from collections import deque
from collections.abc import Callable

from meshwright.islands.watch import GoBackError
from meshwright.train.settings import TrainSettings

SPIKE_STEPS, LEAST_STEPS = 50, 10
"""A spike is told from the losses of so many steps, at least so many."""
MOST_BAD = 5
"""Bad losses without as many good ones as `SPIKE_STEPS` between them, after which a run ends all the same."""


class LossWatch:
    """Judges the loss of each step; ``recent`` are the last good ones, from which all who judge must start alike."""

    def __init__(self, settings: TrainSettings) -> None:
        self._settings, self._bad, self._good = settings, 0, 0
        self.recent: deque[float] = deque(maxlen=SPIKE_STEPS)

    def judge(self, step: int, loss: float, grad_norm: float, stop: Callable[[str], object]) -> str:
        """Returns a line on an update that was left out, "" for a good step. Raises GoBackError if the run is to go
        back; calls ``stop``, which raises an error, where it is to end, or the rest has not helped."""
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
        """Returns in words what is wrong with a step, "" if nothing."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(grad_norm):
            return f"the loss is {loss:.4g} and the norm of the gradient {grad_norm}"
        if self._settings.loss_spike and len(self.recent) >= LEAST_STEPS:
            mean, deviation = statistics.fmean(self.recent), statistics.stdev(self.recent)
            if loss > mean + self._settings.loss_spike * deviation:
                return f"the loss is {loss:.4g}, and was {mean:.4g} on average with a deviation of {deviation:.2g}"
        return ""
