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
        update = xp.asarray(count, dtype=xp.float32)
        warmup_steps = settings.warmup_steps
        ramp = (update + 1) / max(1, warmup_steps)
        return settings.learning_rate * xp.where(update < warmup_steps, ramp, _share_of_peak(update, settings, xp))

    return rate


def _share_of_peak(update: Any, settings: TrainSettings, xp: Any) -> Any:
    """Returns the schedule after the warm-up, as a share of the peak.

    "rsqrt" is sqrt(warmup / update), which is 1 where the warm-up ends. Source: Vaswani et al., Attention Is All You
    Need (2017), section 5.3. "wsd" (warm-up, stable, decay) stays at the peak until the last ``decay_fraction`` of the
    steps. Source: Hu et al., MiniCPM (2024), section 4.
    """
    kind, min_share = settings.schedule, settings.min_learning_rate_ratio
    start_step, num_steps = settings.warmup_steps, settings.steps
    if kind == "constant":
        return xp.ones_like(update)
    if kind == "rsqrt":
        warmup_steps = max(1, start_step)
        return xp.sqrt(warmup_steps / xp.maximum(update + 1, warmup_steps))
    if kind == "wsd":
        start_step = max(start_step, num_steps - round(settings.decay_fraction * num_steps))
    progress = xp.clip((update - start_step) / max(1, num_steps - start_step), 0.0, 1.0)
    if kind == "cosine":
        return min_share + (1 - min_share) * 0.5 * (1 + xp.cos(np.pi * progress))
    return 1 + (min_share - 1) * progress
