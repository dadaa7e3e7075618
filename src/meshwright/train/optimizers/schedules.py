"""The learning rate of every update: a pure function of its number, in NumPy and in JAX alike."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.train.settings import ScheduleKind, TrainSettings

Rate = Callable[[Any], Any]
"""Number of the update, from 0 (or an array of them) -> its learning rate."""

_Shape = Callable[[Any, TrainSettings, Any], Any]


def learning_rate(settings: TrainSettings) -> Rate:
    """The rate of update ``count``, counted from 0; an array of JAX gives one, anything else gives NumPy's.

    It rises in a line to the peak at update ``warmup_steps - 1`` and follows the schedule from there. The first
    update has rate peak / warmup_steps and not 0, which would waste its step.
    """
    shape = SCHEDULES[settings.schedule]

    def rate(count: Any) -> Any:
        xp: Any = jnp if isinstance(count, jax.Array) else np
        number = xp.asarray(count, dtype=xp.float32)
        warmup = settings.warmup_steps
        rising = (number + 1) / max(1, warmup)
        return settings.learning_rate * xp.where(number < warmup, rising, shape(number, settings, xp))

    return rate


def _progress(number: Any, start: int, stop: int, xp: Any) -> Any:
    """0 at update ``start``, 1 at update ``stop``, in a line between them."""
    return xp.clip((number - start) / max(1, stop - start), 0.0, 1.0)


def _cosine(number: Any, settings: TrainSettings, xp: Any) -> Any:
    done = _progress(number, settings.warmup_steps, settings.steps, xp)
    floor = settings.min_learning_rate_ratio
    return floor + (1 - floor) * 0.5 * (1 + xp.cos(np.pi * done))


def _linear(number: Any, settings: TrainSettings, xp: Any) -> Any:
    done = _progress(number, settings.warmup_steps, settings.steps, xp)
    return 1 + (settings.min_learning_rate_ratio - 1) * done


def _constant(number: Any, settings: TrainSettings, xp: Any) -> Any:
    return xp.ones_like(number)


def _wsd(number: Any, settings: TrainSettings, xp: Any) -> Any:
    """Warm-up, stable, decay: at the peak until the last ``decay_fraction`` of the steps, then a line.

    Source: Hu et al., MiniCPM, section 4.
    """
    start = max(settings.warmup_steps, settings.steps - round(settings.decay_fraction * settings.steps))
    return 1 + (settings.min_learning_rate_ratio - 1) * _progress(number, start, settings.steps, xp)


def _rsqrt(number: Any, settings: TrainSettings, xp: Any) -> Any:
    """sqrt(warmup / update), which meets the warm-up at its end. Source: Vaswani et al., section 5.3."""
    warmup = max(1, settings.warmup_steps)
    return xp.sqrt(warmup / xp.maximum(number + 1, warmup))


SCHEDULES: dict[ScheduleKind, _Shape] = {
    "cosine": _cosine,
    "linear": _linear,
    "constant": _constant,
    "wsd": _wsd,
    "rsqrt": _rsqrt,
}
"""Schedule -> the share of the peak after the warm-up."""
