"""The learning rate of every update: a pure function of the update's number, for NumPy and JAX."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from meshwright.train.settings import TrainSettings

Rate = Callable[[Any], Any]
"""Number of the update, from 0 (or an array of them) -> its learning rate."""


def learning_rate(settings: TrainSettings) -> Rate:
    """Returns the rate as a function of the update, counted from 0; JAX arrays give JAX arrays, all else NumPy arrays.

    It rises linearly to the peak at update ``warmup_steps - 1`` and follows the schedule from there. The first update
    has rate peak / warmup_steps and not 0, which would waste a step.
    """

    def rate(count: Any) -> Any:
        xp: Any = jnp if isinstance(count, Array) else np
        number = xp.asarray(count, dtype=xp.float32)
        warmup = settings.warmup_steps
        rising = (number + 1) / max(1, warmup)
        return settings.learning_rate * xp.where(number < warmup, rising, _share_of_peak(number, settings, xp))

    return rate


def _share_of_peak(number: Any, settings: TrainSettings, xp: Any) -> Any:
    """Returns the schedule after the warm-up, as a share of the peak.

    "rsqrt" is sqrt(warmup / update), which meets the warm-up at its end. Source: Vaswani et al., Attention Is All You
    Need (2017), section 5.3. "wsd" (warm-up, stable, decay) stays at the peak until the last ``decay_fraction`` of the
    steps. Source: Hu et al., MiniCPM (2024), section 4.
    """
    kind, floor = settings.schedule, settings.min_learning_rate_ratio
    start, steps = settings.warmup_steps, settings.steps
    if kind == "constant":
        return xp.ones_like(number)
    if kind == "rsqrt":
        warmup = max(1, start)
        return xp.sqrt(warmup / xp.maximum(number + 1, warmup))
    if kind == "wsd":
        start = max(start, steps - round(settings.decay_fraction * steps))
    progress = xp.clip((number - start) / max(1, steps - start), 0.0, 1.0)
    if kind == "cosine":
        return floor + (1 - floor) * 0.5 * (1 + xp.cos(np.pi * progress))
    return 1 + (floor - 1) * progress
