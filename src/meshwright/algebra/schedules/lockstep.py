"""Closed forms of the named schedules as one program runs them on all devices: in fused ticks, in lockstep.

`schedule_forms` has devices that run ahead of each other as far as messages let them. Here all devices take part in
every tick (see `schedule_fused`): a message takes a tick each way, so that more microbatches are in flight, and what
fills a bubble elsewhere may not. Sizes and times may be NumPy arrays. The forms equal the tables of `schedule_ticks`
and `fused_seconds`: see ``tests/algebra/schedules/test_lockstep.py``.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from meshwright.algebra.schedules.forms import Array, peak_stash
from meshwright.algebra.schedules.rows import SCHEDULES
from meshwright.core.errors import InputError, nearest


class LockstepSlots(msgspec.Struct, frozen=True, kw_only=True):
    """Slots of each buffer, as `schedule_ticks.Slots` has them. Those of ``stash`` and ``handed`` are of one virtual
    stage, 1/chunks of a device's layers."""

    x: Array
    dx: Array
    stash: Array
    head: Array
    handed: Array


def lockstep_slots(name: str, *, stages: Array, microbatches: Array, chunks: Array = 1) -> LockstepSlots:
    """The buffers of the worst device, which all devices have, as all run one program. Exact."""
    p, m, v = (np.asarray(size) for size in (stages, microbatches, chunks))
    form = _form(name)
    return LockstepSlots(
        x=1 + (p > form.two_ways_from),
        dx=1 + 0 * p,
        stash=form.stash(p, m, v),
        head=form.head(m),
        handed=form.handed(p, m),
    )


def lockstep_ticks(name: str, *, stages: Array, microbatches: Array, chunks: Array = 1) -> Array:
    """Rows of the table; a step waits for the messages of all but the last. Exact."""
    return _form(name).ticks(*(np.asarray(size) for size in (stages, microbatches, chunks)))


def lockstep_bubble_seconds(
    name: str,
    *,
    stages: Array,
    microbatches: Array,
    chunks: Array = 1,
    forward_s: Array,
    backward_s: Array,
    weight_s: Array = 0.0,
) -> Array:
    """Seconds of a step beyond its passes, as `schedule_forms.bubble_seconds` says, with every tick in lockstep.

    Exact, but for zb-h2 with more microbatches than stages and fewer than twice as many less one: an upper bound there.
    """
    p, m, v = (np.asarray(size) for size in (stages, microbatches, chunks))
    form = _form(name)
    hops, waits = form.hops(p, m), form.weight_hops(p, m)
    return (hops * (forward_s + backward_s) + waits * weight_s) / (v if form.is_divided else 1)


class _Form(msgspec.Struct, frozen=True, kw_only=True):
    """Of stages p, microbatches m, chunks v. The bubble is ``hops`` F and B, and ``weight_hops`` W."""

    hops: Callable[[Any, Any], Any] = lambda p, m: p - 1
    weight_hops: Callable[[Any, Any], Any] = lambda p, m: p - 1
    is_divided: bool = False
    ticks: Callable[[Any, Any, Any], Any] = lambda p, m, v: m + 2 * (p - 1)
    stash: Callable[[Any, Any, Any], Any] = lambda p, m, v: np.minimum(2 * p - 1, m)
    handed: Callable[[Any, Any], Any] = lambda p, m: 0 * p
    head: Callable[[Any], Any] = lambda m: 1 + 0 * m
    two_ways_from: float = np.inf


def _form(name: str) -> _Form:
    if name not in _FORMS:
        raise InputError(f"schedule {name!r} is not known.{nearest(name, SCHEDULES)}")
    return _FORMS[name]


def _as_elsewhere(name: str) -> Callable[[Any, Any, Any], Any]:
    """Microbatches in flight where lockstep adds none, in pieces."""
    return lambda p, m, v: np.rint(v * peak_stash(name, stages=p, microbatches=m, chunks=v)).astype(int)


_FORMS: dict[str, _Form] = {
    "naive": _Form(
        hops=lambda p, m: (p - 1) * m,
        weight_hops=lambda p, m: (p - 1) * m,
        ticks=lambda p, m, v: m * (2 * p - 1),
        stash=_as_elsewhere("naive"),
    ),
    "gpipe": _Form(ticks=lambda p, m, v: 2 * (m + p) - 3, stash=_as_elsewhere("gpipe"), head=lambda m: m),
    "1f1b": _Form(),
    "interleaved": _Form(
        is_divided=True, ticks=lambda p, m, v: v * (m + p) + p - 2, stash=_as_elsewhere("interleaved")
    ),
    "zb-h1": _Form(weight_hops=lambda p, m: np.maximum(p - m, 0), handed=np.minimum),
    "zb-h2": _Form(
        weight_hops=lambda p, m: p - 1 - np.where(m > p, 0, m // 2),
        ticks=lambda p, m, v: m + 2 * (p - 1) + np.clip(m - p, 0, p - 1),
        handed=lambda p, m: np.minimum(2 * p - 1, m),
    ),
    "dualpipe": _Form(
        hops=lambda p, m: p - 2,
        weight_hops=lambda p, m: p - 2,
        stash=_as_elsewhere("dualpipe"),
        handed=lambda p, m: p // 2,
        two_ways_from=2,
    ),
    "dualpipe-v": _Form(
        ticks=lambda p, m, v: 2 * m + 4 * p - 2,
        stash=_as_elsewhere("dualpipe-v"),
        handed=lambda p, m: p + 0 * m,
        two_ways_from=0,
    ),
}
