"""Losses that are not finite, or far above those before them, and what a run does then."""

import math
import statistics
from collections import deque

from meshwright.train.settings import BadLoss, TrainSettings

SPIKE_STEPS, LEAST_STEPS = 50, 10
"""A spike is told from the losses of so many steps, at least so many."""
MOST_BAD = 5
"""Bad losses without as many good ones as `SPIKE_STEPS` between them, after which a run ends all the same."""


class LossWatch:
    """Judges the loss of each step; ``recent`` are the last good ones, from which all who judge must start alike."""

    def __init__(self, settings: TrainSettings) -> None:
        self._settings, self._bad, self._good = settings, 0, 0
        self.recent: deque[float] = deque(maxlen=SPIKE_STEPS)

    def fault(self, loss: float, grad_norm: float) -> str:
        """Returns in words what is wrong with a step, "" if nothing."""
        fault, bound = "", self._settings.loss_spike
        if not math.isfinite(loss):
            fault = f"the loss is {loss}"
        elif not math.isfinite(grad_norm):
            fault = f"the loss is {loss:.4g} and the norm of the gradient {grad_norm}"
        elif bound and len(self.recent) >= LEAST_STEPS:
            mean, deviation = statistics.fmean(self.recent), statistics.stdev(self.recent)
            if loss > mean + bound * deviation:
                fault = f"the loss is {loss:.4g}, and was {mean:.4g} on average with a deviation of {deviation:.2g}"
        if not fault:
            self.recent.append(loss)
            self._good += 1
            self._bad *= self._good < SPIKE_STEPS
        return fault

    def policy(self) -> BadLoss:
        """Returns what to do about a bad loss: what is set, or "stop" where that has not helped."""
        self._bad, self._good = self._bad + 1, 0
        return self._settings.on_bad_loss if self._bad <= MOST_BAD else "stop"
