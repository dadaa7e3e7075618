"""Closed forms of the named schedules for uniform stages: what the search multiplies a million times.

Sizes and times may be NumPy arrays; sizes that a schedule does not exist for are masked by `is_legal`, not branched on.
Each form is the longest path through the schedule's own rows, so that it equals the simulator's result: see
``tests/algebra/schedules/test_forms.py``.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from meshwright.algebra.schedules.rows import SCHEDULES
from meshwright.core.errors import InputError, nearest

Array = Any
"""A number or a NumPy array of them."""


class _Form(msgspec.Struct, frozen=True, kw_only=True):
    """Of (stages, microbatches, chunks) or of these and (forward, input gradients, weight gradients) in seconds."""

    bubble_s: Callable[[Array, Array, Array, Array, Array, Array], Array]
    stash: Callable[[Array, Array, Array], Array]
    legal: Callable[[Array, Array, Array], Array]
    weight_copies: int = 1
    is_split: bool = False


def bubble_seconds(
    name: str,
    *,
    stages: Array,
    microbatches: Array,
    chunks: Array = 1,
    forward_s: Array,
    backward_s: Array,
    weight_s: Array = 0.0,
) -> Array:
    """Seconds of a step beyond ``microbatches * (forward_s + backward_s + weight_s)``, with a barrier at its end.

    Times are of one microbatch through all layers of one device: ``backward_s`` for the gradients of the inputs (with
    any recomputation), ``weight_s`` for those of the weights, which schedules that do not split make in one pass.
    Sending is free here. Exact, but for zb-h2 with fewer microbatches than stages: a lower bound there, less than an
    eighth too low for up to 24 stages.
    """
    return _form(name).bubble_s(stages, microbatches, chunks, forward_s, backward_s, weight_s)


def peak_stash(name: str, *, stages: Array, microbatches: Array, chunks: Array = 1) -> Array:
    """Most whole-stage microbatches alive at once on the worst device; W keeps as much as B. Exact.

    The unit is what the backward pass of one microbatch needs of all layers of one device; what is kept for one of
    several pieces of a device counts as its part.
    """
    return _form(name).stash(stages, microbatches, chunks)


def is_legal(name: str, *, stages: Array, microbatches: Array, chunks: Array = 1) -> Array:
    """Whether the schedule exists for these sizes: where `schedule_rows.build` makes its rows."""
    stages, microbatches, chunks = (np.asarray(size) for size in (stages, microbatches, chunks))
    positive = (stages >= 1) & (microbatches >= 1) & (chunks >= 1)
    return positive & _form(name).legal(np.maximum(stages, 1), microbatches, chunks)


def weight_copies(name: str) -> int:
    """How often the devices hold the weights together: 2 where microbatches enter at both ends."""
    return _form(name).weight_copies


def is_split(name: str) -> bool:
    """Whether weight gradients have passes of their own."""
    return _form(name).is_split


def _form(name: str) -> _Form:
    if name not in _FORMS:
        raise InputError(f"schedule {name!r} is not known.{nearest(name, SCHEDULES)}")
    return _FORMS[name]


def _zb_h1_bubble(p: Array, m: Array, v: Array, f: Array, b: Array, w: Array) -> Array:
    """The first F's way down; or there and back less the W that fill; or the B's way up."""
    return _zero_bubble(p, np.minimum(m, p) - 1, f, b, w)


def _zb_h2_bubble(p: Array, m: Array, v: Array, f: Array, b: Array, w: Array) -> Array:
    return _zero_bubble(p, np.minimum(m, 2 * p - 1) - 1, f, b, w)


def _zero_bubble(p: Array, filling: Array, f: Array, b: Array, w: Array) -> Array:
    hops = np.subtract(p, 1)
    longest = np.maximum(hops * f, hops * (f + b) - filling * w)
    return np.maximum(longest, (hops - filling) * f + hops * b)


def _dual_bubble(hops: Array, f: Array, b: Array, w: Array) -> Array:
    """Of one stream that turns after ``hops`` steps, times per virtual stage."""
    longest = np.maximum(hops * f, hops * (f + b - w))
    longest = np.maximum(longest, hops * (2 * f - w - np.minimum(b, w)))
    return np.maximum(longest, hops * (b + np.maximum(b - w, 0)) - f)


_FORMS: dict[str, _Form] = {
    "naive": _Form(
        bubble_s=lambda p, m, v, f, b, w: np.subtract(p, 1) * m * (f + b + w),
        stash=lambda p, m, v: 1.0 + 0.0 * np.asarray(p),
        legal=lambda p, m, v: v == 1,
    ),
    "gpipe": _Form(
        bubble_s=lambda p, m, v, f, b, w: np.subtract(p, 1) * (f + b + w),
        stash=lambda p, m, v: m + 0.0 * np.asarray(p),
        legal=lambda p, m, v: v == 1,
    ),
    "1f1b": _Form(
        bubble_s=lambda p, m, v, f, b, w: np.subtract(p, 1) * (f + b + w),
        stash=lambda p, m, v: np.minimum(p, m),
        legal=lambda p, m, v: v == 1,
    ),
    "interleaved": _Form(
        bubble_s=lambda p, m, v, f, b, w: np.subtract(p, 1) * (f + b + w) / v,
        stash=lambda p, m, v: np.minimum(m * v, p * (v + 1) - 1) / v,
        legal=lambda p, m, v: (v >= 2) & (m % p == 0),
    ),
    "zb-h1": _Form(
        bubble_s=_zb_h1_bubble,
        stash=lambda p, m, v: np.minimum(p, m),
        legal=lambda p, m, v: v == 1,
        is_split=True,
    ),
    "zb-h2": _Form(
        bubble_s=_zb_h2_bubble,
        stash=lambda p, m, v: np.minimum(2 * np.asarray(p) - 1, m),
        legal=lambda p, m, v: v == 1,
        is_split=True,
    ),
    "dualpipe": _Form(
        bubble_s=lambda p, m, v, f, b, w: _dual_bubble(np.divide(p, 2) - 1, f, b, w),
        stash=lambda p, m, v: np.add(p, 1),
        legal=lambda p, m, v: (v == 1) & (p % 2 == 0) & (m % 2 == 0) & (m >= 2 * p),
        weight_copies=2,
        is_split=True,
    ),
    "dualpipe-v": _Form(
        bubble_s=lambda p, m, v, f, b, w: 0.5 * _dual_bubble(np.subtract(p, 1), f, b, w),
        stash=lambda p, m, v: np.add(p, 0.5),
        legal=lambda p, m, v: (v == 2) & (m >= 2 * p),
        is_split=True,
    ),
}
